"""What interrupted a driven run and how it was overcome, from its driver's journal; of every job in the folder, newest first."""

from collections.abc import Sequence
from typing import Any

from megascale_jax.cluster.story import PARTS
from megascale_jax.config.cluster import JOB_FOLDER
from megascale_jax.views.dashboard.page import Page, Query
from megascale_jax.views.dashboard.run_view import Missing, RunView, files
from megascale_jax.views.figures import Part, bar_svg
from megascale_jax.views.job_story import IncidentStory, JobStory, read_stories

MOST_INCIDENTS, MOST_LINES = 50, 400
"""Of a job: the newest ones are shown."""
_COLOURS: dict[str, int] = dict(zip(PARTS, (3, 7, 4, 5), strict=True))


def stories_of(run: RunView) -> tuple[JobStory, ...] | Missing:
    """The jobs of the run's drivers, newest last; empty: it was never driven."""
    return run.known("stories", lambda: read_stories(run.folder), files(JOB_FOLDER))


def incident_card(one: IncidentStory, longest_s: float | None = None) -> dict[str, Any]:
    """An incident as its template shows it; bars of several are comparable by the ``longest_s`` of them."""
    parts = [Part(name, lasted_s, _COLOURS[name], f"{lasted_s:.1f} s") for name, lasted_s in one.spent_s]
    words = ", ".join(f"{part.name} {part.text}" for part in parts)
    bar = bar_svg(parts, f"incident {one.number}: {words}", whole=longest_s)
    return {**{name: getattr(one, name) for name in IncidentStory.__dataclass_fields__}, "began": one.began_unix_s, "bar": bar}


def job_card(number: int, story: JobStory) -> dict[str, Any]:
    """A job as its template shows it."""
    shown = story.incidents[::-1][:MOST_INCIDENTS]
    longest_s = max((sum(lasted_s for _, lasted_s in one.spent_s) for one in shown), default=None)
    return {
        "number": number,
        "story": story,
        "incidents": [incident_card(one, longest_s) for one in shown],
        "hidden": len(story.incidents) - len(shown),
        "lost_s": sum(one.took_s or 0.0 for one in story.incidents),
        "lost_steps": sum(one.lost_steps or 0 for one in story.incidents),
        "lines": story.lines[::-1][:MOST_LINES],
        "num_lines": len(story.lines),
    }


def job_cards(stories: Sequence[JobStory]) -> list[dict[str, Any]]:
    """All jobs, newest first."""
    return [job_card(number, story) for number, story in reversed(list(enumerate(stories, 1)))]


def _context(run: RunView, query: Query) -> dict[str, Any]:
    stories = stories_of(run)
    return {"stories": stories, "jobs": job_cards(stories) if stories else []}


INCIDENTS = Page("incidents", "Incidents", "incidents.html", _context)

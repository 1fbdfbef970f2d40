"""A run in one file for a postmortem: what the dashboard's pages tell, without a server, a script or the network.

Everything is in the file: styles, pictures as SVG, the heat map as PNG. A policy in it forbids scripts and connections, so whatever a
name in the run says, a browser runs nothing. The same files give the same bytes at the same ``now``.

What cannot be read is said where it would stand; a report is made of any folder.
"""

import base64
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from megascale_jax.observe.provenance import PACKAGE, library_versions
from megascale_jax.views.curve import CONFIG_FILE
from megascale_jax.views.dashboard.goodput import booked_time
from megascale_jax.views.dashboard.incidents import job_cards, stories_of
from megascale_jax.views.dashboard.overview import facts_of, summary
from megascale_jax.views.dashboard.render import STATIC, filled
from megascale_jax.views.dashboard.run_view import Missing, RunView, made
from megascale_jax.views.dashboard.timeline import Shown, read_shown
from megascale_jax.views.run_heat_map import plot_run
from megascale_jax.views.slow_devices import SlowDevices, find_slow
from megascale_jax.views.step_processes import find_step
from megascale_jax.views.step_times import StepTimes, read_step_times
from megascale_jax.views.why import Judgement, judge

WINDOW = 1000
"""Newest steps among which devices are compared, and the slowest step with details is looked for."""
MOST_UNITS, MOST_INCIDENTS, WITH_LOGS, MOST_LINES, MOST_RANKS, MOST_CONFIG = 2500, 30, 5, 200, 16, 64 << 10
"""Of a report: units with a box of their own, incidents, those with logs, lines of the driver, ranks named, characters of the config."""
READ_S = 600.0
"""Longest that one reading may take."""


@dataclass(frozen=True)
class Heat:
    """The heat map of the window: a PNG as a ``data:`` address, and what it shows in words."""

    address: str
    words: str
    first: int
    last: int
    slow: SlowDevices
    notes: tuple[str, ...]


def report_html(run: RunView, now: float) -> bytes:
    """The file. ``run``: with the patience of `READ_S`; ``now``: seconds since 1970, when it is made."""
    found = summary(run, now, judged=_judged(run, now))
    stories, booked = stories_of(run), booked_time(run)
    step = made(lambda: _step(run.folder))
    times = made(lambda: _times(run.folder))
    heat = made(lambda: _heat(run.name, *times)) if not isinstance(times, Missing) else times
    jobs = [_with_fewer(card) for card in job_cards(stories)] if stories else []
    judgement = found["judgement"]
    config = made(lambda: (run.folder / CONFIG_FILE).read_text(errors="replace"))
    parts = {
        **found,
        "facts": facts_of(found),
        "ranks": _ranks(judgement) if judgement is not None else [],
        "stories": stories,
        "jobs": jobs,
        "booked": booked,
        "step_shown": step,
        "heat": heat,
        "config": config if isinstance(config, Missing) else config[:MOST_CONFIG],
        "is_config_cut": not isinstance(config, Missing) and len(config) > MOST_CONFIG,
        "versions": _versions(found),
        "notes": list(dict.fromkeys(_notes(found, booked, step, heat))),
    }
    return filled("report.html", run=run, now=now, style=_style(), **parts).encode()


def _judged(run: RunView, now: float) -> Judgement | Missing:
    progress = run.progress
    return judge(progress[0], now=now) if progress else progress


def _style() -> Markup:
    """Our own files, in which nothing is escaped."""
    return Markup("\n").join(Markup((STATIC / name).read_text()) for name in ("style.css", "figures.css"))


def _step(run: Path) -> Shown:
    """The slowest step with details of the window, without such a one the newest. Raises UsageError, RunFolderError."""
    detailed = find_step(run).detailed
    slowest = None
    if detailed:
        times = read_step_times(run, (max(0, detailed[-1] - WINDOW), detailed[-1] + 1))
        whole = np.nanmax(times.whole.reshape(times.steps.size, -1), axis=1)
        lasted = {int(step): float(seconds) for step, seconds in zip(times.steps, whole, strict=True) if int(step) in detailed}
        slowest = max(lasted, key=lambda step: (lasted[step], step), default=None)
    return read_shown(run, slowest, 0, 0, MOST_UNITS)


def _times(run: Path) -> tuple[StepTimes, SlowDevices]:
    last = find_step(run).step
    times = read_step_times(run, (max(0, last - WINDOW), last + 1))
    return times, find_slow(times)


def _heat(name: str, times: StepTimes, slow: SlowDevices) -> Heat:
    with tempfile.TemporaryDirectory(prefix="heat-map-") as place:
        path = Path(place) / "heat.png"
        plot_run(times, slow, name, path)
        content = base64.b64encode(path.read_bytes()).decode()
    words = "; ".join(f"{one.label} takes {one.excess:.0%} longer in {one.optype}" for one in slow.devices[:8]) or "no device stands out"
    all_notes = (*times.notes, *slow.notes)
    return Heat(f"data:image/png;base64,{content}", words, int(times.steps[0]), int(times.steps[-1]), slow, all_notes)


def _with_fewer(card: dict[str, Any]) -> dict[str, Any]:
    """A job's card within the bounds of a report."""
    shown = card["incidents"][:MOST_INCIDENTS]
    few = [one if number < WITH_LOGS else {**one, "logs": ()} for number, one in enumerate(shown)]
    hidden = card["hidden"] + len(card["incidents"]) - len(shown)
    return {**card, "incidents": few, "hidden": hidden, "lines": card["lines"][:MOST_LINES]}


def _ranks(found: Judgement) -> list[Any]:
    """Ranks that the verdict is about."""
    chosen = {*found.named, *found.suspects}
    return [one for one in found.ranks if one.rank in chosen][:MOST_RANKS]


def _versions(found: dict[str, Any]) -> dict[str, str]:
    """Of the run, once it has finished; those of the program that makes the report are said as such."""
    record = found["record"]
    ended = record.summary if record else None
    own = library_versions()
    reader = {"this report": f"{PACKAGE} {own[PACKAGE]}"} if PACKAGE in own else {}
    if ended is None:
        return reader
    return {**({"commit": ended.commit} if ended.commit else {}), **ended.versions, **reader}


def _notes(found: dict[str, Any], booked: Any, step: Any, heat: Any) -> Iterator[str]:
    yield from found["missing"]
    if booked:
        yield from (*booked.found.trend.notes, *booked.found.notes)
    if not isinstance(step, Missing):
        yield from step.picture.notes
    if not isinstance(heat, Missing):
        yield from heat.notes

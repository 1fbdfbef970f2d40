"""The first page: what the run does now, how far it is, what it loses to, and whether somebody should look."""

import json
import math
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from megascale_jax.checkpoint.manifest import CHECKPOINTS, published_steps, read_manifest
from megascale_jax.comm.address import is_remote
from megascale_jax.comm.storage import Storage
from megascale_jax.errors import RunFolderError
from megascale_jax.observe.events import EVENTS_FOLDER
from megascale_jax.observe.metrics import METRICS_FILE
from megascale_jax.views.curve import RunRecord
from megascale_jax.views.dashboard.goodput import booked_time
from megascale_jax.views.dashboard.incidents import incident_card, stories_of
from megascale_jax.views.dashboard.page import Page, Query
from megascale_jax.views.dashboard.render import duration, filled
from megascale_jax.views.dashboard.run_view import METRICS, Missing, RunView, every, files
from megascale_jax.views.figures import Curve, curves_svg
from megascale_jax.views.job_story import JobStory
from megascale_jax.views.why import Judgement

TAIL_BYTES = 256 << 10
"""Of `metrics.jsonl`: its newest lines are enough to know how it goes."""
_PACE_STEPS = 200
"""Newest lines from which the time of a step is taken."""
_TONES = {"hang": "bad", "slow": "warn", "unknown": "warn", "running": "good", "ended": "quiet", "failed": "bad", "finished": "good"}


@dataclass(frozen=True)
class Pace:
    """How a run goes by its newest lines of metrics; ``None``: not known. ``step_s``: median seconds of a step, pauses included."""

    step: int
    loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    step_s: float | None
    wall_s: float
    changed_unix_s: float


def read_pace(run: Path) -> Pace | None:
    """From the end of the run's metrics; ``None`` before the first step. Raises RunFolderError without such a file."""
    path = run / METRICS_FILE
    if not path.is_file():
        raise RunFolderError(f"There is no {METRICS_FILE}: no step is done yet, or this is no run.")
    with path.open("rb") as stream:
        size = path.stat().st_size
        stream.seek(max(0, size - TAIL_BYTES))
        content = stream.read(TAIL_BYTES)
    lines = [line for raw in content.split(b"\n") if (line := _line(raw)) is not None]
    if not lines:
        return None
    newest = lines[-1]
    lasted = [
        (second["wall_s"] - first["wall_s"]) / (second["step"] - first["step"])
        for first, second in pairwise(lines[-_PACE_STEPS - 1 :])
        if second["step"] > first["step"]
    ]
    step_s = statistics.median(lasted) if lasted else None
    loss, tokens_per_s, mfu = (_finite(newest.get(name)) for name in ("loss", "tokens_per_s", "mfu"))
    return Pace(newest["step"], loss, tokens_per_s, mfu, step_s, float(newest["wall_s"]), path.stat().st_mtime)


def _line(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    is_step = isinstance(line, dict) and line.get("kind") == "train" and type(line.get("step")) is int
    return line if is_step and _finite(line.get("wall_s")) is not None else None


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def loss_picture(record: RunRecord) -> Markup:
    """Losses over steps, training and held-out."""
    train, held_out = record.train, record.evaluation
    curves = [Curve("training", train.steps, train.losses), Curve("held-out", held_out.steps, held_out.losses)]
    last = f"{train.losses[-1]:.4f} at step {train.steps[-1]:.0f}" if train.losses.size else "none"
    return curves_svg([one for one in curves if one.x.size], f"loss over steps, nats per token; the newest: {last}")


def summary(run: RunView, now: float | None = None, judged: Judgement | Missing | None = None) -> dict[str, Any]:
    """Everything that the page shows, for a report too.

    ``now``: seconds since 1970, by default this moment; ``judged``: what `why` says as of then, by default as of some seconds ago.
    """
    now = time.time() if now is None else now
    pace = run.known("pace", lambda: read_pace(run.folder), METRICS)
    stories, record, config = stories_of(run), run.record, run.config
    progress = run.progress if judged is None else judged
    job = stories[-1] if stories else None
    judgement = None if isinstance(progress, Missing) else progress[1] if isinstance(progress, tuple) else progress
    status = run.status if job is not None and not job.has_ended else Missing("No driver has this run now.")
    steps = _steps(config)
    ranks = [one.step for one in judgement.ranks if one.step is not None] if judgement is not None else []
    step = pace.step if pace else max(job.step if job else 0, min(ranks, default=0))
    left_s = pace.step_s * (steps - step) if pace and pace.step_s and steps and steps > step else None
    read = {"pace": pace, "losses": record, "ranks": progress, "configuration": config, "incidents": stories}
    has_begun = any((run.folder / name).exists() for name in (METRICS_FILE, EVENTS_FOLDER))
    word, tone, text = _state(job, bool(status), judgement, step, steps, has_begun=has_begun)
    return {
        "state": {"word": word, "tone": tone, "text": text},
        "pace": pace or None,
        "step": step,
        "steps": steps,
        "left_s": left_s if tone not in ("bad", "quiet") else None,
        "checkpoint": _checkpoint(run, config, job, now),
        "job": job,
        "incident": job.incidents[-1] if job is not None and job.incidents else None,
        "alarms": job.alarms if job is not None else (),
        "observed": [(status["now_s"] - at_s, text) for at_s, text in status["observed"][-5:]] if status else [],
        "judgement": judgement,
        "record": record,
        "loss": loss_picture(record) if record else None,
        "age_s": now - pace.changed_unix_s if pace else None,
        "missing": [f"{name}: {one.why}" for name, one in read.items() if isinstance(one, Missing) and not one.is_pending],
        "pending": any(isinstance(one, Missing) and one.is_pending for one in read.values()),
    }


def _steps(config: dict[str, Any] | Missing) -> int | None:
    train = config.get("train") if config else None
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if type(steps) is int and steps > 0 else None


def _state(
    job: JobStory | None, is_driven: bool, judgement: Judgement | None, step: int, steps: int | None, *, has_begun: bool
) -> tuple[str, str, str]:
    """A word for what the run does, how urgent it is, and a sentence."""
    if job is not None and job.has_ended:
        return job.phase, _TONES.get(job.phase, "quiet"), job.outcome
    if judgement is not None and judgement.verdict in ("hang", "slow"):
        return judgement.verdict, _TONES[judgement.verdict], judgement.reason
    if job is not None and is_driven:
        tone = "good" if job.phase == "running" else "warn"
        return (
            job.phase,
            tone,
            f"attempt {job.attempt}" if job.phase == "running" else f"the driver overcomes an incident, attempt {job.attempt}",
        )
    if steps is not None and step >= steps:
        return "finished", "good", f"all {steps} steps are done"
    if judgement is not None:
        return judgement.verdict, _TONES.get(judgement.verdict, "quiet"), judgement.reason
    return ("unknown", "warn", "nothing tells what its processes do") if has_begun else ("not begun", "quiet", "no step is done yet")


def _checkpoint(run: RunView, config: dict[str, Any] | Missing, job: JobStory | None, now: float) -> dict[str, Any] | None:
    """The newest checkpoint on storage: its step, and its age in seconds."""
    found = run.known("checkpoint", lambda: newest_checkpoint(run.folder, config), every(10.0, files(CHECKPOINTS)))
    if found:
        return {"step": found[0], "age_s": now - found[1]}
    if job is not None and job.saved_unix_s is not None:
        return {"step": job.saved_step, "age_s": now - job.saved_unix_s}
    return None


def newest_checkpoint(run: Path, config: dict[str, Any] | Missing) -> tuple[int, float] | None:
    """Step of the newest checkpoint in a folder that is this machine's, and when it was published, seconds since 1970.

    One in a remote storage is not looked for: a page must not wait for a network. Raises CheckpointError.
    """
    train = config.get("train") if config else None
    named = (train.get("checkpoint") or {}).get("place") if isinstance(train, dict) else None
    place = str(named or run / CHECKPOINTS)
    if is_remote(place) or not Path(place).is_dir():
        return None
    storage = Storage(place)
    steps = published_steps(storage)
    return (steps[-1], read_manifest(storage, steps[-1]).created_unix_s) if steps else None


def facts_of(found: dict[str, Any]) -> list[dict[str, str]]:
    """The numbers of a summary, with a word beside each."""
    pace, steps, checkpoint = found["pace"], found["steps"], found["checkpoint"]

    def rate(value: float | None, text: str) -> str:
        return "–" if value is None else text.format(value)

    tokens, mfu = (pace.tokens_per_s, pace.mfu) if pace else (None, None)
    age = "no step is done yet" if found["age_s"] is None else f"newest {duration(found['age_s'])} ago"
    step_s = pace.step_s if pace else None
    behind = (
        "none on storage" if checkpoint is None else f"step {checkpoint['step']}, {max(0, found['step'] - checkpoint['step'])} steps behind"
    )
    return [
        {"name": "step", "value": f"{found['step']:,}", "note": f"of {steps:,}; {age}" if steps else age},
        {"name": "loss, nats per token", "value": rate(pace.loss if pace else None, "{:.4f}"), "note": ""},
        {"name": "tokens/s", "value": rate(tokens, "{:,.0f}"), "note": f"{duration(step_s)} a step" if step_s else ""},
        {"name": "MFU", "value": rate(None if mfu is None else 100 * mfu, "{:.1f} %"), "note": "by the newest step"},
        {
            "name": "time left",
            "value": "–" if found["left_s"] is None else duration(found["left_s"]),
            "note": "at the pace of the last steps",
        },
        {"name": "newest checkpoint", "value": "–" if checkpoint is None else f"{duration(checkpoint['age_s'])} old", "note": behind},
    ]


def _context(run: RunView, query: Query) -> dict[str, Any]:
    found = summary(run)
    card = filled("now.html", found=facts_of(found), **{name: found[name] for name in ("state", "step", "steps")})
    newest, booked = found["incident"], booked_time(run, patience_s=0.0)
    trend = booked.found.trend if booked and booked.found.trend.is_alarm else None
    return {**found, "facts_card": card, "incident_card": None if newest is None else incident_card(newest), "decayed": trend}


OVERVIEW = Page("", "Overview", "overview.html", _context, refresh_s=3.0)

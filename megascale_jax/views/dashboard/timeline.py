"""A step of one pipeline: what its stages computed and waited for, beside the ideal schedule; and the same as a file for Perfetto."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from megascale_jax.errors import UsageError
from megascale_jax.views.dashboard.page import Page, Query, whole_number
from megascale_jax.views.dashboard.run_view import EVENTS, Missing, RunView
from megascale_jax.views.step_picture import MOST_UNITS, WAIT_LANES, Stage, StepPicture, picture_svg, read_picture
from megascale_jax.views.trace import trace_bytes

_LISTED = 60
"""Steps with details that a page offers: the newest ones."""


@dataclass(frozen=True)
class Shown:
    """A step as the page has it; ``table``: a row a stage, seconds."""

    picture: StepPicture
    attempt: int
    mesh: tuple[int, int, int]
    detailed: tuple[int, ...]
    has_details: bool
    names: Markup
    shapes: Markup
    table: tuple[dict[str, Any], ...]


def shown_step(run: RunView, step: int | None, data: int, tensor: int) -> Shown | Missing:
    """A step of the pipeline at one place; by default the newest with details."""
    return run.known(("step", step, data, tensor), lambda: read_shown(run.folder, step, data, tensor), EVENTS)


def read_shown(run: Path, step: int | None, data: int, tensor: int, most_units: int = MOST_UNITS) -> Shown:
    """The same read now; ``most_units``: of more there are no boxes. Raises UsageError, RunFolderError."""
    found, timeline, picture = read_picture(run, step, data, tensor)
    names, shapes = picture_svg(picture, most_units)
    table = tuple(_row(stage, picture) for stage in picture.stages)
    return Shown(picture, timeline.attempt, timeline.mesh, found.detailed, timeline.has_details, names, shapes, table)


def _row(stage: Stage, picture: StepPicture) -> dict[str, Any]:
    """What a stage did in the step, seconds: units by pass, waits by axis."""
    device = stage.device
    computed = {of: sum(one.end_ns - one.begin_ns for one in stage.real if one.of == of) / 1e9 for of in picture.passes}
    waited = {lane: sum(end_ns - begin_ns for name, _, begin_ns, end_ns in stage.waits if name == lane) / 1e9 for lane in WAIT_LANES}
    whole = None if device.step is None else device.step.duration_ns / 1e9
    place = {"stage": device.stage, "device": device.number, "rank": device.rank, "host": device.host}
    return {**place, "computed": computed, "waited": waited, "step_s": whole}


def _place(query: Query) -> tuple[int | None, int, int]:
    return whole_number(query, "step"), whole_number(query, "data") or 0, whole_number(query, "tensor") or 0


def _context(run: RunView, query: Query) -> dict[str, Any]:
    step, data, tensor = _place(query)
    shown = shown_step(run, step, data, tensor)
    if not shown:
        return {"shown": shown, "step": step, "data": data, "tensor": tensor, "nearest": None, "listed": ()}
    nearest = min(shown.detailed, key=lambda other: abs(other - shown.picture.step), default=None)
    around = [one for one in shown.detailed if one != shown.picture.step]
    return {
        "shown": shown,
        "step": shown.picture.step,
        "data": data,
        "tensor": tensor,
        "nearest": None if shown.has_details else nearest,
        "listed": shown.detailed[-_LISTED:],
        "before": max((one for one in around if one < shown.picture.step), default=None),
        "after": min((one for one in around if one > shown.picture.step), default=None),
    }


def _trace(run: RunView, query: Query) -> bytes:
    """The step as `megascale trace` writes it. Raises UsageError, RunFolderError."""
    _, timeline, _ = read_picture(run.folder, *_place(query))
    if not timeline.devices:
        raise UsageError("no device of this pipeline has events of that step")
    return trace_bytes(timeline, compressed=True)


TIMELINE = Page("timeline", "Step", "timeline.html", _context, data={"trace.json.gz": _trace}, scripts=("timeline.js",), refresh_s=None)

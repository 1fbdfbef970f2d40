"""Where the time of the job went, and whether its MFU decays: what `megascale goodput` tells, as a page."""

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from megascale_jax.observe.booked import KINDS
from megascale_jax.observe.events import EVENTS_FOLDER
from megascale_jax.observe.metrics import METRICS_FILE
from megascale_jax.views.dashboard.page import Page, Query
from megascale_jax.views.dashboard.run_view import Missing, RunView, files
from megascale_jax.views.figures import Curve, band_svg, curves_svg
from megascale_jax.views.goodput import Goodput, read_goodput
from megascale_jax.views.incidents import Incident

_PIECES = 500
"""Of the band."""
_MOST_INCIDENTS = 100
_LEAST_NS = 1_000_000
"""Of a class of costs that is listed."""


@dataclass(frozen=True)
class Booked:
    """A job's time as its template shows it; seconds. ``kinds``: class, seconds, share, number of its colour."""

    found: Goodput
    kinds: tuple[tuple[str, float, float, int], ...]
    band: Markup
    trend: Markup
    interruptions: tuple[dict[str, Any], ...]


def booked_time(run: RunView, patience_s: float | None = None) -> Booked | Missing:
    """Every second of the run so far. Not of the newest moments: reading takes a while, see `RunView.known`."""
    return run.known("goodput", lambda: shown_goodput(read_goodput(run.folder)), files(EVENTS_FOLDER, METRICS_FILE), patience_s)


def shown_goodput(found: Goodput) -> Booked:
    """Tables and pictures of a job's time."""
    kinds = tuple(
        (kind, found.booked_ns[kind] / 1e9, found.booked_ns[kind] / max(found.wall_ns, 1), number) for number, kind in enumerate(KINDS)
    )
    words = ", ".join(f"{kind} {share:.1%}" for kind, _, share, _ in kinds if share)
    band = band_svg(found.timeline.shares(_PIECES), KINDS, f"the time of the job by class: {words}")
    return Booked(found, kinds, band, _trend(found), tuple(_interruption(one) for one in found.incidents[-_MOST_INCIDENTS:]))


def _trend(found: Goodput) -> Markup:
    trend = found.trend
    levels, unit = (100 * trend.levels, "%") if trend.is_mfu else (trend.levels, "")
    what = "MFU over steps" if trend.is_mfu else "steps a second over steps"
    level = "" if trend.level is None else f": {trend.level:.1%}" if trend.is_mfu else f": {trend.level:.4g}"
    name = "MFU" if trend.is_mfu else "speed"
    return curves_svg([Curve(name, trend.steps.astype(float), levels)], f"{what}, in the last quarter{level}", low=0.0, unit=unit)


def _interruption(one: Incident) -> dict[str, Any]:
    """An interruption with what it cost, most first; seconds."""
    costs = sorted(((kind, cost / 1e9) for kind, cost in one.lost_ns.items() if cost >= _LEAST_NS), key=lambda cost: -cost[1])
    return {
        "number": one.number,
        "step": one.step,
        "resumed_step": one.resumed_step,
        "recomputed_steps": one.recomputed_steps,
        "began": one.begin_ns / 1e9,
        "cause": one.cause,
        "costs": costs,
        "cost_s": sum(cost_s for _, cost_s in costs),
    }


def _context(run: RunView, query: Query) -> dict[str, Any]:
    return {"booked": booked_time(run)}


GOODPUT = Page("goodput", "Goodput", "goodput.html", _context, refresh_s=15.0)

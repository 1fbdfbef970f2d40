"""The heat map: which device takes longer than its peers, in which pass, in which steps, and what that costs."""

import math
from collections.abc import Iterator
from typing import Any

from megascale_jax.errors import UsageError
from megascale_jax.views.dashboard.heat_window import Steps, Window, cells, read_costs, read_window
from megascale_jax.views.dashboard.packed import packed
from megascale_jax.views.dashboard.page import Page, Query, whole_number
from megascale_jax.views.dashboard.run_view import EVENTS, Missing, RunView
from megascale_jax.views.run_heat_map import SPAN
from megascale_jax.views.run_what_if import RunCosts

USUAL_STEPS, _STRIDE = 100, 50
"""Newest steps that are shown unless others are asked for, and by how many at once their begin moves on: every window is a reading."""
WORST = 20
"""Rows of the tables."""


def _context(run: RunView, query: Query) -> dict[str, Any]:
    steps = _steps(run, query)
    window = _window(run, steps)
    shown = {"window": window, "worst": WORST, "span": SPAN, "first": steps[0], "last": None if steps[1] is None else steps[1] - 1}
    if not window:
        return {**shown, "chosen": query.get("pass", ""), "costs": Missing("")}
    costs = run.known(("costs", steps), lambda: read_costs(run.folder, steps), EVENTS)
    return {
        **shown,
        "chosen": _chosen(window, query),
        "costs": costs[0] if costs else costs,
        "notes": (*window.notes, *(costs[1] if costs else ()), *_doubts(costs[0] if costs else None)),
        "is_shared": window.mesh.data * window.mesh.tensor > 1,
    }


def _cells(run: RunView, query: Query) -> bytes:
    window = _window(run, _steps(run, query))
    return cells(window, _chosen(window, query)) if window else packed({"missing": window.why})


def _window(run: RunView, steps: Steps) -> Window | Missing:
    return run.known(("heat", steps), lambda: read_window(run.folder, steps), EVENTS)


def _chosen(window: Window, query: Query) -> str:
    """The pass that is shown step by step: as asked for, else the one that costs most, else the first."""
    if query.get("pass") in window.passes:
        return query["pass"]
    return window.slow.devices[0].optype if window.slow.devices else window.passes[0]


def _steps(run: RunView, query: Query) -> Steps:
    """The steps that are asked for; by default the newest. Raises UsageError."""
    first, last = (whole_number(query, name, most=1 << 30) for name in ("from", "to"))
    if first is not None and last is not None and first > last:
        raise UsageError(f"steps {first} to {last}: expected the first before the last")
    if first is None and last is None:
        record = run.record
        newest = int(record.train.steps[-1]) if record else 0
        return (max((newest - USUAL_STEPS) // _STRIDE * _STRIDE, 0) or None, None)
    return first, None if last is None else last + 1


def _doubts(costs: RunCosts | None) -> Iterator[str]:
    if costs is not None and costs.slowdown is None:
        yield "no whole detailed step among these, so nothing is replayed; train.events.detail_every says how often there is one"
    if costs is not None and costs.gaps is not None and not math.isclose(costs.gaps, 1.0, abs_tol=0.02):
        yield f"the replay takes {1 / costs.gaps:.1%} of the time recorded"


HEAT_MAP = Page(
    "heat-map", "Heat map", "heat.html", _context, data={"cells": _cells}, scripts=("packed.js", "grid.js", "heat.js"), refresh_s=10.0
)

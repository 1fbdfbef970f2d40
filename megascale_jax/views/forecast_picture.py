"""A forecast as a picture: where the time goes in each point, and what the checkpoint interval does to it. Everything is simulated."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from megascale_jax.observe.booked import KINDS
from megascale_jax.sim.faults.closed_forms import expected_ettr
from megascale_jax.sim.forecast import Forecast
from megascale_jax.views.goodput_picture import COLOURS
from megascale_jax.views.style import COLOUR_A, COLOUR_B, MUTED, TEXT, shortened, title

_MOST_BARS = 12
_REACH = 30.0
"""The curve goes from so much below the best interval to so much above it."""


def plot_forecast(found: Sequence[Forecast], path: Path) -> None:
    """Draw to ``path`` (1200 x 800 pixels, the format by its ending). Raises OSError if it cannot be written."""
    figure = Figure(figsize=(12, 8), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.2), facecolor="white")
    FigureCanvasAgg(figure)
    bars, curve = figure.subplots(2, 1, height_ratios=(1.3, 1.6))
    for axes in (bars, curve):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#adb5bd")
        axes.tick_params(colors=TEXT, labelsize=11, length=4)
    shown = list(found[:_MOST_BARS])
    _bars(bars, shown)
    _curve(curve, shown)
    ratios = sorted(one.outcome.mean_goodput for one in found)
    span = f"{ratios[0]:.1%}" if len(found) == 1 else f"{ratios[0]:.1%} to {ratios[-1]:.1%}"
    low, _, high = found[0].outcome.spread(found[0].outcome.goodput)
    line = f"simulated, {found[0].cost.gpus:,} GPUs, failures of {found[0].fleet_name}, {low:.1%} to {high:.1%} in 9 of 10 jobs"
    if len(found) > 1:
        line = f"simulated, {len(found)} points" + (f", the first {len(shown)} of which are shown" if len(found) > len(shown) else "")
    title(bars, f"{shortened(found[0].experiment.name, 40)}: {span} of the time would train", line)
    figure.savefig(path)


def _bars(axes: Axes, found: Sequence[Forecast]) -> None:
    rows = np.arange(len(found))
    left = np.zeros(len(found))
    for kind in KINDS:
        shares = np.array([one.outcome.total_ns()[kind] / int(one.outcome.wall_ns.sum()) for one in found])
        if shares.any():
            axes.barh(rows, shares, left=left, color=COLOURS[kind], label=kind, height=0.7)
            left = left + shares
    axes.set_yticks(rows, [f"{shortened(one.fleet_name, 18)}, {one.case.nodes:,} nodes" for one in found])
    axes.invert_yaxis()
    lowest = min(one.outcome.mean_goodput for one in found)
    axes.set_xlim(max(0.0, lowest - 1.2 * (1 - lowest)), 1.0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("share of the wall time (the axis does not begin at 0)", fontsize=11, color=MUTED)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=7, frameon=False, fontsize=11, labelcolor=TEXT)


def _curve(axes: Axes, found: Sequence[Forecast]) -> None:
    axes.grid(axis="y", color="#e9ecef", linewidth=0.9)
    axes.set_axisbelow(True)
    axes.set_xlabel("training between two saves, minutes", fontsize=12, color=TEXT)
    axes.set_ylabel("expected goodput", fontsize=12, color=TEXT)
    one = next((one for one in found if isfinite(one.intervals.best_s)), None)
    if one is None:
        axes.text(0.5, 0.5, "no failures", transform=axes.transAxes, ha="center", fontsize=12, color=MUTED)
        return
    axes.set_title(f"{shortened(one.fleet_name, 18)}, {one.case.nodes:,} nodes", loc="left", fontsize=12, color=MUTED, parse_math=False)
    intervals, step_s = one.intervals, one.step_s
    grid = np.geomspace(max(step_s, intervals.best_s / _REACH), max(intervals.best_s, intervals.own_s) * _REACH, 300)
    axes.semilogx(grid / 60, [expected_ettr(one.case, float(seconds)) for seconds in grid], color=COLOUR_A, linewidth=1.6)
    for name, seconds, ratio, colour in (
        ("best", intervals.best_s, intervals.best_ettr, COLOUR_A),
        ("this experiment's", intervals.own_s, intervals.own_ettr, COLOUR_B),
    ):
        axes.plot(seconds / 60, ratio, "o", color=colour, label=f"{name}: {seconds / 60:.1f} min, {ratio:.1%}")
    if intervals.daly_s > 0:
        axes.axvline(intervals.daly_s / 60, color=MUTED, linewidth=1, linestyle=":", label=f"Daly: {intervals.daly_s / 60:.1f} min")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(loc="lower right", frameon=False, fontsize=11, labelcolor=TEXT)

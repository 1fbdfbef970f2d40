"""Where the time of a job went, as a picture: its classes over the wall time above, MFU over its steps below."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from megascale_jax.observe.booked import KINDS, Kind
from megascale_jax.views.goodput import Goodput
from megascale_jax.views.mfu_trend import MfuTrend
from megascale_jax.views.style import COLOUR_A, COLOUR_B, MUTED, TEXT, shortened, title

COLOURS: dict[Kind, str] = {
    "training": "#2a6f97",
    "recomputed": "#d1495b",
    "data wait": "#e9c46a",
    "checkpoint": "#7b5ea7",
    "evaluation": "#5a8f5a",
    "compile": "#8d99ae",
    "restart": "#f4a261",
    "diagnosis": "#b56576",
    "idle": "#e9ecef",
}
_PIECES = 1000
"""Of the band: about one a pixel."""


def plot_goodput(found: Goodput, path: Path) -> None:
    """Draw to ``path`` (1200 x 800 pixels, the format by its ending). Raises OSError if it cannot be written."""
    figure = Figure(figsize=(12, 8), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.2), facecolor="white")
    FigureCanvasAgg(figure)
    band, trend = figure.subplots(2, 1, height_ratios=(1, 2.2))
    for axes in (band, trend):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#adb5bd")
        axes.tick_params(colors=TEXT, labelsize=11, length=4)
    _band(band, found)
    _trend(trend, found.trend)
    ratio = "-" if found.effective is None else f"{found.effective:.1%}"
    lost = sorted(((ns, kind) for kind, ns in found.booked_ns.items() if kind != "training" and ns), reverse=True)[:3]
    words = ", ".join(f"{kind} {ns / found.wall_ns:.1%}" for ns, kind in lost)
    title(band, f"{shortened(found.run, 40)}: {ratio} of the time trains", words or "no time lost")
    figure.savefig(path)


def _band(axes: Axes, found: Goodput) -> None:
    shares = found.timeline.shares(_PIECES)
    begin = datetime.fromtimestamp(int(found.timeline.edges_ns[0]) / 1e9, UTC)
    edges = np.linspace(date2num(begin), date2num(begin + timedelta(seconds=found.wall_ns / 1e9)), len(shares) + 1)
    below = np.zeros(len(shares))
    for number, kind in enumerate(KINDS):
        if shares[:, number].any():
            above = below + shares[:, number]
            label = f"{kind} {found.booked_ns[kind] / found.wall_ns:.1%}"
            axes.stairs(above, edges, baseline=below, fill=True, color=COLOURS[kind], label=label)
            below = above
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    locator = AutoDateLocator()
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=5, frameon=False, fontsize=11, labelcolor=TEXT)


def _trend(axes: Axes, trend: MfuTrend) -> None:
    axes.grid(axis="y", color="#e9ecef", linewidth=0.9)
    axes.set_axisbelow(True)
    axes.set_xlabel("step", fontsize=12, color=TEXT)
    axes.set_ylabel("MFU" if trend.is_mfu else "steps/s", fontsize=12, color=TEXT)
    if not trend.levels.size:
        axes.text(0.5, 0.5, "too few steps", transform=axes.transAxes, ha="center", fontsize=12, color=MUTED)
        return
    marker = "o" if trend.levels.size == 1 else ""
    axes.plot(trend.steps, trend.levels, color=COLOUR_A, linewidth=1.4, marker=marker)
    low, high = float(np.quantile(trend.levels, 0.02)), float(trend.levels.max())
    margin = max(0.15 * high, high - low)
    axes.set_ylim(max(low - margin, 0.0), high + 0.3 * margin)
    if trend.is_mfu:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}" if high < 0.01 else f"{value:.1%}")
    for steps, colour in ((trend.best, COLOUR_A), (trend.last, COLOUR_B if trend.is_alarm else COLOUR_A)):
        if steps is not None:
            middle = float(np.median(trend.levels[(trend.steps >= steps[0]) & (trend.steps <= steps[1])]))
            axes.hlines(middle, *steps, color=colour, linewidth=3, alpha=0.6)
    axes.set_title(_words(trend), loc="left", fontsize=12, color=COLOUR_B if trend.is_alarm else MUTED, parse_math=False)


def _words(trend: MfuTrend) -> str:
    if trend.last is None:
        return "too few steps to see a decay"
    if not trend.is_alarm:
        return "no decay beyond the noise"
    grown = f"; {trend.grown[0].segment} takes longer ({trend.grown[0].share:.0%})" if trend.grown else ""
    return shortened(f"decays: {trend.decay:.1%} below steps {trend.best[0]} to {trend.best[1]}{grown}" if trend.best else "", 110)

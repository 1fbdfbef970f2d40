"""The picture of a comparison: both runs' losses over the same axis, and the last quarter, where the verdict falls, beside it.

Failure case: runs that are incomparable are drawn all the same, since the picture often shows why; the title says so.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from megascale_jax.views.compare import Comparison, along, train_curve
from megascale_jax.views.curve import RunRecord, smooth
from megascale_jax.views.style import COLOUR_A, COLOUR_B, MUTED, TEXT, legend, limit_losses, marker_for, new_figure, title

_DRAWN_WINDOW_FRACTION = 0.02


def plot_comparison(comparison: Comparison, a: RunRecord, b: RunRecord, path: Path) -> None:
    """Draw both runs to `path` (1200 x 700 pixels, the format by its ending). Raises OSError if it cannot be written."""
    figure, (whole, tail) = new_figure(width_ratios=(2, 1))
    name_a, name_b = (a.name, b.name) if a.name != b.name else (f"{a.name} (A)", f"{b.name} (B)")
    for axes in (whole, tail):
        _draw_run(axes, comparison, a, COLOUR_A, f"A  {name_a}", with_raw=axes is whole)
        _draw_run(axes, comparison, b, COLOUR_B, f"B  {name_b}", with_raw=axes is whole)
        axes.set_xlabel("consumed tokens" if comparison.against == "tokens" else "step", fontsize=12, color=TEXT)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    losses = np.concatenate([run.train.finite.losses for run in (a, b)] + [run.evaluation.finite.losses for run in (a, b)])
    limit_losses(whole, losses)
    legend(whole)
    _zoom(tail, comparison)
    if comparison.common_range:
        whole.axvspan(comparison.common_range.tail_start, comparison.common_range.end, color="#f1f3f5", zorder=0)
    title(whole, f"B is {comparison.verdict} to A" if comparison.verdict == "equivalent" else _headline(comparison), _numbers(comparison))
    figure.savefig(path)


def _headline(comparison: Comparison) -> str:
    return "A and B are incomparable" if comparison.verdict == "incomparable" else f"B is {comparison.verdict} than A"


def _numbers(comparison: Comparison) -> str:
    measures = [m for m in (comparison.validation, comparison.train) if m.a is not None and m.b is not None and m.difference is not None]
    if comparison.verdict == "incomparable" or not measures:
        return "; ".join(comparison.reasons)[:140]
    parts = [f"{m.name} {m.a:.4f} → {m.b:.4f} ({m.difference:+.2%})" for m in measures]
    return "   ·   ".join([*parts, f"tolerance {comparison.tolerance:.4g}"])


def _draw_run(axes: Axes, comparison: Comparison, run: RunRecord, colour: str, label: str, *, with_raw: bool) -> None:
    train = train_curve(run, comparison.against).finite
    evaluation = along(run, run.evaluation, comparison.against).finite
    if train.steps.size:
        spread = train.steps[-1] - train.steps[0]
        window = comparison.common_range.smoothing_window if comparison.common_range else _DRAWN_WINDOW_FRACTION * spread
        if with_raw:
            axes.plot(train.steps, train.losses, color=colour, alpha=0.22, linewidth=0.8)
        smoothed = smooth(train.steps, train.losses, train.steps, window)
        axes.plot(train.steps, smoothed, color=colour, linewidth=2.0, marker=marker_for(smoothed), label=f"{label}, training")
    if evaluation.steps.size:
        style = {"marker": "o", "markersize": 7, "markeredgecolor": "white", "linestyle": "none"}
        axes.plot(evaluation.steps, evaluation.losses, color=colour, label=f"{label}, held-out", zorder=4, **style)


def _zoom(axes: Axes, comparison: Comparison) -> None:
    """Show the last quarter of the common range only, as high as the smoothed losses and held-out points in it need."""
    common = comparison.common_range
    if common is None:
        axes.set_title("no common range", fontsize=12, color=MUTED)
        return
    axes.set_title("last quarter", fontsize=12, color=MUTED)
    # The last held-out losses lie one step beyond the last training loss.
    margin = max(0.03 * (common.end - common.tail_start), 1.5 * common.spacing)
    axes.set_xlim(common.tail_start - margin, common.end + margin)
    seen: list[float] = []
    for line in axes.lines:
        x, y = np.asarray(line.get_xdata(), np.float64), np.asarray(line.get_ydata(), np.float64)
        seen += y[(x >= common.tail_start) & (x <= common.end + margin)].tolist()
    limit_losses(axes, np.asarray(seen), quantile=1.0, margin_fraction=0.3)

"""The look that all loss pictures share: size, colours, quiet axes, and how high the loss axis goes.

Figures are made without pyplot, so nothing is global and no display is needed. Failure case: an outlier would flatten all else, so
the axis ends above the bulk of the losses and rare spikes run out of the picture.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from megascale_jax.observe.output import printable

COLOUR_A, COLOUR_B = "#2a6f97", "#d1495b"
TRAIN, HELD_OUT, RESUMED, WARNING = "#2a6f97", "#d1495b", "#5a8f5a", "#c77d0a"
MUTED, TEXT = "#6c757d", "#212529"


def new_figure(width_ratios: Sequence[float] = (1,)) -> tuple[Figure, list[Axes]]:
    """An empty figure of 1200 x 700 pixels on the Agg canvas with one row of axes of these relative widths."""
    figure = Figure(figsize=(12, 7), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.2), facecolor="white")
    FigureCanvasAgg(figure)
    row = figure.subplots(1, len(width_ratios), squeeze=False, width_ratios=list(width_ratios))[0]
    for axes in row:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#adb5bd")
        axes.tick_params(colors=TEXT, labelsize=11, length=4)
        axes.grid(axis="y", color="#e9ecef", linewidth=0.9)
        axes.set_axisbelow(True)
    row[0].set_ylabel("loss, nats per token", fontsize=12, color=TEXT)
    return figure, list(row)


def title(axes: Axes, headline: str, line: str) -> None:
    """A bold headline and one line of numbers under it, above `axes` at the left."""
    axes.set_title(headline, loc="left", fontsize=17, fontweight="bold", color=TEXT, pad=32, parse_math=False)
    axes.text(0.0, 1.028, line, transform=axes.transAxes, fontsize=11.5, color=MUTED, parse_math=False).set_in_layout(False)


def shortened(text: str, most: int) -> str:
    """Text on one line of at most ``most`` characters, so that it stays within a picture."""
    text = printable(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def coarse(excess: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Excess float64[row, column] in at most so many cells, each the value farthest from 0 of those in it; NaN where all are.

    A picture has fewer pixels than a large job has devices, and drawing each at its nearest pixel would leave most out, also the slow ones.
    """
    for axis, most in enumerate((rows, columns)):
        size = excess.shape[axis]
        if size > most:
            first = np.linspace(0, size, most, endpoint=False).astype(int)
            low, high = (function.reduceat(excess, first, axis=axis) for function in (np.fmin, np.fmax))
            excess = np.where(high >= -low, high, low)
    return excess


def cell_extent(excess: np.ndarray) -> tuple[float, float, float, float]:
    """Where the image of a coarse excess goes, so that places on the axes are those of the excess itself."""
    return -0.5, excess.shape[1] - 0.5, excess.shape[0] - 0.5, -0.5


def legend(axes: Axes) -> None:
    """A legend at the top right, where a falling loss leaves room; none if nothing has a label."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper right", framealpha=0.92, edgecolor="none", fontsize=11, labelcolor=TEXT)


def marker_for(points: np.ndarray) -> str:
    """A dot for a curve of one point, which would be invisible as a line; nothing for a longer one."""
    return "o" if points.size == 1 else ""


def limit_losses(
    axes: Axes, losses: np.ndarray, *, quantile: float = 0.98, also: Sequence[float] = (), margin_fraction: float = 0.06
) -> None:
    """Set the y range to hold `losses` up to `quantile`, the first one, and every value of `also`, with a margin on both sides."""
    if not losses.size:
        return
    low = min(float(losses.min()), *also, float(losses[0]))
    high = max(float(np.quantile(losses, quantile)), *also, float(losses[0]))
    margin = margin_fraction * max(high - low, 1e-3)
    axes.set_ylim(low - margin, high + margin)

"""What every device of a run takes beyond its peers, as a picture: passes by device above, the mesh of each pass below.

Colour is the excess over the peers of the same stage, from -`SPAN` to `SPAN`; grey is not known, a ring marks a slow device.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from megascale_jax.views.slow_devices import SlowDevices
from megascale_jax.views.step_times import StepTimes
from megascale_jax.views.style import MUTED, TEXT, cell_extent, coarse, shortened

SPAN = 0.3
"""Excess at the ends of the colour scale; what lies beyond has the colour of the end."""
_UNKNOWN = "#adb5bd"


def plot_run(times: StepTimes, slow: SlowDevices, name: str, path: Path) -> None:
    """Draw all devices to `path` (1200 x 900 pixels, the format by its ending). Raises OSError if it cannot be written."""
    figure = Figure(figsize=(12, 9), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1), facecolor="white")
    FigureCanvasAgg(figure)
    optypes = list(slow.excess)
    grid = figure.add_gridspec(2, len(optypes), height_ratios=(1, 2))
    whole = figure.add_subplot(grid[0, :])
    image = _panel(whole, np.array([slow.excess[optype].ravel() for optype in optypes]), _MOST_DEVICES)
    whole.set_yticks(range(len(optypes)), optypes)
    whole.set_xlabel("device", color=TEXT)
    whole.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _ring(whole, [(one.device, optypes.index(one.optype)) for one in slow.devices])
    mesh = times.mesh
    for column, optype in enumerate(optypes):
        axes = figure.add_subplot(grid[1, column])
        _panel(axes, slow.excess[optype].reshape(mesh.pipe, -1).T, _MOST_STAGES)
        axes.set_title(optype, fontsize=11, color=TEXT)
        axes.set_xlabel("pipe", color=TEXT)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        for edge in range(1, mesh.data if mesh.tensor > 1 and mesh.data <= _MOST_LINES else 1):
            axes.axhline(edge * mesh.tensor - 0.5, color="white", linewidth=2)
        if column == 0:
            axes.set_ylabel(f"{mesh.tensor} · data + tensor" if mesh.tensor > 1 else "data", color=TEXT)
        _ring(axes, [(one.pipe, one.data * mesh.tensor + one.tensor) for one in slow.devices if one.optype == optype])
    bar = figure.colorbar(image, ax=figure.axes, extend="both", shrink=0.6)
    bar.set_label("computes longer than its peers of the same stage", fontsize=11, color=MUTED)
    worst = slow.devices[0] if slow.devices else None
    words = "no device stands out" if worst is None else f"{worst.label} takes {worst.excess:.0%} longer in {worst.optype}"
    headline = f"{shortened(name, 40)}, steps {times.steps[0]} to {times.steps[-1]}\n{shortened(words, 90)}"
    figure.suptitle(headline, x=0.02, ha="left", fontsize=15, fontweight="bold", color=TEXT, parse_math=False)
    figure.savefig(path)


_MOST_LINES = 16
"""Places in data up to which lines part them."""


_MOST_DEVICES, _MOST_STAGES = 800, 96
"""Columns of the upper and of a lower panel that have a pixel each; of more, a cell is the worst of several places."""
_MOST_ROWS = 400


def _panel(axes: Axes, excess: np.ndarray, columns: int) -> AxesImage:
    """Excess float64[row, column] as colours."""
    axes.set_facecolor(_UNKNOWN)
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=TEXT, labelsize=10, length=3)
    look = {"vmin": -SPAN, "vmax": SPAN, "cmap": "RdBu_r", "aspect": "auto", "interpolation": "nearest"}
    return axes.imshow(np.ma.masked_invalid(coarse(excess, _MOST_ROWS, columns)), extent=cell_extent(excess), **look)


def _ring(axes: Axes, places: list[tuple[int, int]]) -> None:
    """Rings around cells (column, row)."""
    if places:
        axes.scatter(*zip(*places, strict=True), s=120, facecolors="none", edgecolors="black", linewidths=1.8, clip_on=False)

"""The slowdown of every worker as a picture: replicas to the right, stages downwards, colour from 1.0 to 1.5.

A bright row is a stage, a bright column a replica with long sequences, a bright cell a worker. With tensor parallelism a cell shows
the slowest of its devices.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from megascale_jax.config.layout import MeshShape
from megascale_jax.views.style import MUTED, TEXT, cell_extent, coarse, new_figure, title
from megascale_jax.views.what_if import Worker

COLDEST, HOTTEST = 1.0, 1.5
"""Slowdowns at the ends of the colour scale; what lies beyond has the colour of the end."""
_MOST_CELLS = (400, 800)
"""Rows and columns that have a pixel each; of more, a cell is the worst of several places."""


def worker_grid(workers: Sequence[Worker], mesh: MeshShape) -> np.ndarray:
    """Slowdown of the slowest device at each place, float64[pipe, data]."""
    grid = np.full((mesh.pipe, mesh.data), -np.inf)
    for worker in workers:
        grid[worker.pipe, worker.data] = max(grid[worker.pipe, worker.data], worker.slowdown)
    return grid


def plot_heat_map(workers: Sequence[Worker], mesh: MeshShape, headline: str, line: str, path: Path) -> None:
    """Draw all workers to `path` (1200 x 700 pixels, the format by its ending). Raises OSError if it cannot be written."""
    figure, (axes,) = new_figure()
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    grid = worker_grid(workers, mesh)
    excess = np.ma.masked_invalid(coarse(np.where(np.isfinite(grid), grid - 1, np.nan), *_MOST_CELLS)) + 1
    look = {"vmin": COLDEST, "vmax": HOTTEST, "cmap": "magma", "aspect": "auto", "interpolation": "nearest"}
    image = axes.imshow(excess, extent=cell_extent(grid), **look)
    axes.set_xlabel("data", fontsize=12, color=TEXT)
    axes.set_ylabel("pipeline stage", fontsize=12, color=TEXT)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    bar = figure.colorbar(image, ax=axes, extend="both", shrink=0.9)
    bar.set_label("slowdown with this worker real, all else ideal", fontsize=11, color=MUTED)
    title(axes, headline, line)
    figure.savefig(path)

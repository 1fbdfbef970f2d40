"""All layouts of a search in one picture: seconds of a step over the memory that it takes."""

import math
from pathlib import Path

from megascale_jax.config.memory import GIB
from megascale_jax.sim.search import Candidate, Search
from megascale_jax.views.style import COLOUR_A, COLOUR_B, MUTED, RESUMED, TEXT, WARNING, new_figure, title

_COLOURS = (COLOUR_A, COLOUR_B, RESUMED, WARNING, "#7b5ea7")
_SLOWEST, _LARGEST = 1.5, 3.0
"""Times the quickest layout, and times the limit of memory: beyond that nothing is drawn."""


def plot_layouts(found: Search, own: int | None, path: Path) -> None:
    """A dot a layout, coloured by its pipeline stages; those too large for a device are hollow. ``own``: rank of the one to mark.

    Raises ValueError where no layout fits.
    """
    if not found.ranked:
        raise ValueError(f"no layout on {found.devices:,} devices fits, so there is nothing to draw")
    figure, (axes,) = new_figure()
    slowest = _SLOWEST * found.ranked[0].prediction.iteration_s
    shown = [(one, True) for one in found.ranked] + [(one, False) for one in found.too_large]
    largest = math.inf if found.limit_bytes is None else _LARGEST * found.limit_bytes
    shown = [(one, fits) for one, fits in shown if one.prediction.iteration_s <= slowest and one.needed_bytes <= largest]
    stages = sorted({one.parallel.pipe for one, _ in shown})
    for number, pipe in enumerate(stages):
        colour = _COLOURS[number % len(_COLOURS)]
        marker = "os^Dv"[number // len(_COLOURS) % 5]
        label = f"pipe {pipe}"
        for fits in (True, False):
            points = [_point(one) for one, fit in shown if fit is fits and one.parallel.pipe == pipe]
            if points:
                x, y = zip(*points, strict=True)
                face = colour if fits else "none"
                axes.scatter(x, y, s=34, marker=marker, facecolors=face, edgecolors=colour, linewidths=1.1, label=label)
                label = None
    if found.limit_bytes is not None:
        axes.axvline(found.limit_bytes / GIB, color=MUTED, linestyle="--", linewidth=1.3)
    for rank in dict.fromkeys((1, own)):
        if rank is not None:
            x, y = _point(found.ranked[rank - 1])
            axes.annotate(f"rank {rank}", (x, y), (8, -14), textcoords="offset points", fontsize=11, color=TEXT)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if value in (20, 30, 50, 70) else "")
    axes.set_xlabel("memory of a device, GiB", fontsize=12, color=TEXT)
    axes.set_ylabel("seconds of a step", fontsize=12, color=TEXT)
    axes.legend(loc="upper right", ncols=2, framealpha=1, edgecolor="none", fontsize=11, labelcolor=TEXT)
    line = f"simulated; {len(found.ranked)} layouts fit, {len(found.too_large)} divide but do not (hollow); the dashed line is the limit"
    title(axes, f"Layouts of {found.devices:,} GPUs", line)
    figure.savefig(path)


def _point(one: Candidate) -> tuple[float, float]:
    return one.needed_bytes / GIB, one.prediction.iteration_s

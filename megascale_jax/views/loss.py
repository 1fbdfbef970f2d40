"""`loss.png`: the story of a run in one picture.

Every logged training loss is a thin line, its moving average a thick one; held-out losses are dots; the unigram and bigram
cross-entropies of the held-out text are labelled lines that a model must get below to have learned anything. Resumed and skipped
steps are marked. Failure case: a run without summary (not finished) has no baselines yet, and the title says how far it is.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

from megascale_jax.observe.progress import format_duration, format_rate
from megascale_jax.views.curve import RunRecord, read_run, smooth
from megascale_jax.views.style import HELD_OUT, MUTED, RESUMED, TEXT, TRAIN, WARNING, legend, limit_losses, marker_for, new_figure, title

LOSS_PICTURE = "loss.png"
_SMOOTHING_FRACTION = 0.03
_SMOOTHING_LINES = 5


def plot_loss(run_folder: Path) -> Path:
    """Draw `loss.png` (1200 x 700 pixels) into the run folder and return its path.

    Raises RunFolderError if the folder is no run or has no training step yet, OSError if the picture cannot be written.
    """
    run = read_run(run_folder)
    figure, (axes,) = new_figure()
    draw_loss(axes, run)
    title(axes, run.name, result_line(run))
    path = run_folder / LOSS_PICTURE
    figure.savefig(path)
    return path


def draw_loss(axes: Axes, run: RunRecord) -> None:
    """Draw the curves, baselines and marks of a run into `axes`, steps along x."""
    train, evaluation = run.train.finite, run.evaluation.finite
    first, last = run.train.steps[0], max([run.train.steps[-1], *run.evaluation.steps[-1:]])
    spread = max(last - first, 1)
    axes.set_xlabel("step", fontsize=12, color=TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 5, 10]))
    axes.set_xlim(first - 0.01 * spread, last + 0.012 * spread)
    if train.steps.size:
        window = max(_SMOOTHING_FRACTION * spread, _SMOOTHING_LINES * spread / len(run.train.steps))
        axes.plot(train.steps, train.losses, color=TRAIN, alpha=0.3, linewidth=0.9, label="training, each logged step")
        smoothed = smooth(train.steps, train.losses, train.steps, window)
        label = f"training, mean over {window:.0f} steps"
        axes.plot(train.steps, smoothed, color=TRAIN, linewidth=2.2, marker=marker_for(smoothed), label=label)
    else:
        axes.text(0.5, 0.5, "no logged training loss is finite", transform=axes.transAxes, ha="center", fontsize=14, color=WARNING)
    if evaluation.steps.size:
        style = {"marker": "o", "markersize": 8, "markeredgecolor": "white", "linewidth": 1.2}
        axes.plot(evaluation.steps, evaluation.losses, color=HELD_OUT, label="held-out", zorder=4, **style)
    baselines = _baselines(run)
    limit_losses(axes, np.concatenate([train.losses, evaluation.losses]), also=[value for _, value in baselines])
    for name, value in baselines:
        _draw_baseline(axes, name, value)
    _mark(axes, run.resume_steps, "resumed", "-.", RESUMED)
    _mark(axes, run.skip_steps, "update skipped", ":", WARNING)
    legend(axes)


def result_line(run: RunRecord) -> str:
    """The final numbers of a run in one line; of a run without summary, how far it is."""
    summary = run.summary
    if summary is None:
        train = run.train.finite
        loss = f", last training loss {train.losses[-1]:.3f}" if train.losses.size else ""
        return f"not finished: step {run.train.steps[-1]:.0f}{loss}"
    parts = [
        "held-out loss not known" if summary.validation_loss is None else f"held-out loss {summary.validation_loss:.3f}",
        f"{summary.steps:,} steps in {format_duration(summary.wall_s)}",
        "" if summary.tokens_per_s is None else f"{format_rate(summary.tokens_per_s)} tokens/s",
        "" if summary.mfu is None else f"MFU {summary.mfu:.1%}",
        f"{format_rate(summary.parameters)} parameters",
    ]
    return "   ·   ".join(part for part in parts if part)


def _baselines(run: RunRecord) -> list[tuple[str, float]]:
    if run.summary is None:
        return []
    known = (("unigram", run.summary.unigram_nats), ("bigram", run.summary.bigram_nats))
    return [(name, value) for name, value in known if value is not None]


def _draw_baseline(axes: Axes, name: str, value: float) -> None:
    """A dashed line, its name and value written on its right end, which the falling curve leaves free."""
    axes.axhline(value, color=MUTED, linewidth=1.3, linestyle=(0, (6, 3)), zorder=1.5)
    place = blended_transform_factory(axes.transAxes, axes.transData)
    style = {"ha": "right", "va": "bottom", "fontsize": 11, "color": TEXT}
    axes.annotate(f"{name} {value:.3f}", (0.995, value), (0, 3), xycoords=place, textcoords="offset points", **style)


def _mark(axes: Axes, steps: tuple[int, ...], name: str, style: str, colour: str) -> None:
    """Vertical lines at `steps`, all under one entry of the legend."""
    for index, step in enumerate(steps):
        label = (name if len(steps) == 1 else f"{name}, {len(steps)} times") if index == 0 else "_"
        axes.axvline(step, color=colour, linewidth=1.5, linestyle=style, zorder=1.2, label=label)

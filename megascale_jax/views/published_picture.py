"""Published numbers beside simulated ones, on equal axes: curves over GPUs, bars, steps of an ablation, errors, shares of time.

Every picture says in its line what is published and what is simulated. Errors are those of `sim/validation/score.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from megascale_jax.sim.analytic import Times
from megascale_jax.sim.validation.ladder import Rung
from megascale_jax.sim.validation.runs import REFERENCE_MICRO_BATCH
from megascale_jax.sim.validation.score import Score
from megascale_jax.views.style import COLOUR_A, COLOUR_B, MUTED, RESUMED, TEXT, WARNING, new_figure, title

SYSTEMS: Mapping[str, str] = {"MegaScale": COLOUR_A, "Megatron-LM": COLOUR_B}
_OTHERS = (RESUMED, WARNING, "#7b5ea7")
Points = Sequence[tuple[float, float]]
_PARTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "matrix products": (("gemm_s",), "#2a6f97"),
    "attention, small kernels": (("attention_s", "memory_s"), "#8ab6d6"),
    "tensor communication": (("tensor_s",), "#e9c46a"),
    "pipeline: bubble, messages, head": (("bubble_s", "pipe_s", "head_s"), "#d1495b"),
    "data communication": (("data_s", "embedding_s"), "#7b5ea7"),
    "slow nodes": (("stragglers_s", "contention_s"), "#f4a261"),
    "optimizer, input, host": (("optimizer_s", "input_s", "host_s"), "#8d99ae"),
}
"""Of an iteration, joined to what can be told apart in a picture."""


def plot_scaling(published: Mapping[str, Sequence[Points]], simulated: Mapping[str, Sequence[Points]], note: str, path: Path) -> None:
    """MFU over GPUs, a curve for each system and batch, published at the left. MFU are fractions, GPUs on a log scale."""
    figure, axes = new_figure((1, 1))
    for one, series in zip(axes, (published, simulated), strict=True):
        for system, curves in series.items():
            for number, points in enumerate(curves):
                gpus, mfu = zip(*points, strict=True)
                one.plot(gpus, mfu, "o-", color=SYSTEMS[system], linewidth=1.8, label=None if number else system)
        gpus = sorted({gpus for curves in series.values() for points in curves for gpus, _ in points})
        one.set_xscale("log", base=2)
        one.set_xticks(gpus, [f"{count:,.0f}" for count in gpus], rotation=45)
        one.minorticks_off()
        _named(one, "GPUs", "MFU")
    _same_height([mfu for series in (published, simulated) for curves in series.values() for points in curves for _, mfu in points], axes)
    axes[0].legend(loc="lower left", frameon=False, fontsize=11, labelcolor=TEXT)
    title(axes[0], "The paper", "published")
    title(axes[1], "This simulator", f"simulated; {note}")
    figure.savefig(path)


def plot_weak_scaling(score: Score, note: str, path: Path) -> None:
    """Figure 9 as bars of MFU in per cent; rows are named ``SYSTEM, GPUS GPUs``, published at the left."""
    figure, axes = new_figure((1, 1))
    gpus = list(dict.fromkeys(_gpus(row.name) for row in score.rows))
    for one, field in zip(axes, ("published", "predicted"), strict=True):
        for number, system in enumerate(sorted(SYSTEMS, reverse=True)):
            heights = [getattr(row, field) for row in score.rows if row.name.startswith(system)]
            x = np.arange(len(gpus)) + (number - 0.5) * 0.38
            one.bar_label(one.bar(x, heights, 0.36, color=SYSTEMS[system], label=system), fmt="%.1f", fontsize=11, color=TEXT)
        one.set_xticks(np.arange(len(gpus)), gpus)
        one.set_ylim(0, 70)
        _named(one, "GPUs = rows in a batch", "MFU, %")
    axes[0].legend(loc="upper left", frameon=False, ncols=2, fontsize=11, labelcolor=TEXT)
    title(axes[0], "The paper, Figure 9", "published")
    title(axes[1], "This simulator", f"simulated; {note}")
    figure.savefig(path)


def plot_ablation(start: tuple[float, float], score: Score, path: Path) -> None:
    """MFU as it grows step by step, published at the left. ``start``: the first row, published and simulated, per cent."""
    figure, axes = new_figure((1, 1))
    names = ["Megatron-LM", *(row.name.split(":")[0].replace("sliding-window", "windowed") for row in score.rows)]
    y = np.arange(len(names))
    for one, first, field in zip(axes, start, ("published", "predicted"), strict=True):
        steps = [getattr(row, field) for row in score.rows]
        levels = np.cumsum([first, *steps])
        one.barh(y[0], first, color=MUTED)
        for index, step in enumerate(steps, 1):
            one.barh(y[index], step, left=levels[index - 1], color=COLOUR_A if step > 0 else COLOUR_B)
            one.text(max(levels[index - 1 : index + 1]) + 0.3, y[index], f"{step:+.1f}", va="center", fontsize=11, color=TEXT)
        one.text(first + 0.3, y[0], f"{first:.1f} %", va="center", fontsize=11, color=TEXT)
        one.set_yticks(y, names if one is axes[0] else [""] * len(names))
        one.tick_params(axis="y", length=0)
        one.invert_yaxis()
        one.set_xlim(40, 70)
        one.grid(axis="y", visible=False)
        one.grid(axis="x", color="#e9ecef", linewidth=0.9)
        _named(one, "MFU, % (the axis begins at 40)", "")
    title(axes[0], "The paper, Table 3", "published; points that each step adds")
    title(axes[1], "This simulator", "simulated; the same steps, 256 A100, batch 256, then 768")
    figure.savefig(path)


def plot_errors(score: Score, others: Sequence[str], path: Path) -> None:
    """Error of every row: the reference as bars, the same under ``others`` assumptions as dots; hollow bars were calibrated on."""
    figure, (axes,) = new_figure()
    is_points = score.rows[0].unit in ("MFU %", "points")
    factor, reference = 1 if is_points else 100, f"micro-batch {REFERENCE_MICRO_BATCH}"
    y = np.arange(len(score.rows))
    for index, row in enumerate(score.rows):
        is_held = row.role == "held-out"
        label = f"{reference}, {row.role.replace('-', ' ')} rows"
        colour = COLOUR_A if is_held else "white"
        axes.barh(index, factor * row.error, color=colour, edgecolor=COLOUR_A, height=0.62, label=label)
    for name, colour, marker in zip(others, _OTHERS, "osD", strict=False):
        x = [factor * row.error_of(row.beside[name]) for row in score.rows]
        axes.plot(x, y, marker, color=colour, markersize=7, label=name)
    axes.axvline(0, color=TEXT, linewidth=1)
    axes.set_yticks(y, [row.name for row in score.rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#e9ecef", linewidth=0.9)
    _named(axes, "simulated - published, points" if is_points else "simulated / published - 1, %", "")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(sorted(zip(labels, handles, strict=True), key=lambda one: not one[0].startswith(reference)))
    axes.legend(unique.values(), unique.keys(), loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False, fontsize=11)
    title(axes, "Error, row by row", f"simulated against published; {score.title}")
    figure.savefig(path)


def plot_ladder(rungs: Mapping[str, Sequence[Rung]], path: Path) -> None:
    """Mean error of the held-out rows of each model as bars, its largest as a tick, for each assumption by its name."""
    figure, (axes,) = new_figure()
    names = [f"{rung.name}\n(fitted: {rung.fitted})" for rung in next(iter(rungs.values()))]
    x, width = np.arange(len(names)), 0.8 / len(rungs)
    for number, ((label, found), colour) in enumerate(zip(rungs.items(), (COLOUR_A, *_OTHERS), strict=False)):
        at = x + (number - (len(rungs) - 1) / 2) * width
        bars = axes.bar(at, [100 * rung.mean for rung in found], width * 0.92, color=colour, label=f"{label}: mean")
        axes.bar_label(bars, fmt="%.1f", fontsize=11, color=TEXT)
        axes.plot(at, [100 * rung.worst for rung in found], "_", color=colour, markersize=26, markeredgewidth=3, label=f"{label}: largest")
    axes.set_xticks(x, names, fontsize=10.5)
    _named(axes, "", "error of the iteration's seconds, %")
    axes.legend(loc="upper right", frameon=False, fontsize=11, labelcolor=TEXT)
    title(axes, "What each layer of detail buys", "simulated against Table 2's 12 held-out rows")
    figure.savefig(path)


def plot_shares(iterations: Sequence[tuple[str, Times]], path: Path) -> None:
    """Where the time of each iteration goes, as shares of it, top to bottom."""
    figure, (axes,) = new_figure()
    y, left = np.arange(len(iterations)), np.zeros(len(iterations))
    for name, (fields, colour) in _PARTS.items():
        shares = np.array([sum(asdict(times)[field] for field in fields) / times.iteration_s for _, times in iterations])
        axes.barh(y, shares, left=left, color=colour, label=name, height=0.72)
        left = left + shares
    axes.set_yticks(y, [name for name, _ in iterations])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(axis="y", visible=False)
    _named(axes, "share of the iteration", "")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.09), ncols=4, frameon=False, fontsize=11, labelcolor=TEXT)
    title(axes, "Where the time goes", "simulated")
    figure.savefig(path)


def _gpus(name: str) -> str:
    return name.split(", ")[1].removesuffix(" GPUs")


def _same_height(values: Sequence[float], axes: Sequence[Axes]) -> None:
    for one in axes:
        one.set_ylim(np.floor(20 * min(values)) / 20, np.ceil(20 * max(values)) / 20)
        one.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _named(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=12, color=TEXT)
    axes.set_ylabel(y, fontsize=12, color=TEXT)

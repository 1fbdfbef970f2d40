"""Failures of published fleets and what a checkpoint interval costs: pictures of the notebook on goodput."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from megascale_jax.views.style import COLOUR_A, COLOUR_B, RESUMED, TEXT, WARNING, new_figure, title

_COLOURS = (COLOUR_A, COLOUR_B, RESUMED, WARNING, "#7b5ea7")
_HOURS_A_DAY = 24
_MINUTES = (0.5, 240)
"""Between saves: what is drawn."""


def plot_mtbf(rates: Mapping[str, float], gpus: Sequence[int], per_node: int, path: Path) -> None:
    """Hours between two failures of a job over its GPUs, a line a fleet. ``rates``: failures per 1,000 node-days."""
    figure, (axes,) = new_figure()
    counts = np.array(gpus)
    for (name, rate), colour in zip(rates.items(), _COLOURS, strict=False):
        hours = _HOURS_A_DAY * 1000 / (rate * counts / per_node)
        axes.plot(counts, hours, "o-", color=colour, linewidth=1.8, label=f"{name}: {rate:.3g} a 1,000 node-days")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in gpus])
    axes.minorticks_off()
    axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axes.set_xlabel("GPUs", fontsize=12, color=TEXT)
    axes.set_ylabel("hours between two failures", fontsize=12, color=TEXT)
    axes.legend(loc="upper right", frameon=False, fontsize=11, labelcolor=TEXT)
    title(axes, "A failure every few hours", "derived from published rates and counts")
    figure.savefig(path)


def plot_kinds(fleets: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Failures per 1,000 node-days by kind, the most frequent first, beside each other for some fleets."""
    figure, row = new_figure([1] * len(fleets))
    for axes, (name, kinds), colour in zip(row, fleets.items(), _COLOURS, strict=False):
        ordered = sorted(kinds.items(), key=lambda one: -one[1])
        y = np.arange(len(ordered))
        bars = axes.barh(y, [rate for _, rate in ordered], color=colour, height=0.7)
        axes.bar_label(bars, fmt="%.2f", fontsize=10.5, color=TEXT, padding=3)
        axes.set_yticks(y, [kind.replace("_", " ") for kind, _ in ordered])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("failures per 1,000 node-days", fontsize=12, color=TEXT)
        axes.set_ylabel("")
        title(axes, name, "derived from published counts and shares")
    figure.savefig(path)


def plot_intervals(
    curves: Mapping[str, Callable[[float], float]], published: Mapping[float, float], young_s: Mapping[str, float], path: Path
) -> None:
    """Expected share of the time that trains over minutes between saves, with published points by minutes; Young's intervals as lines."""
    figure, (axes,) = new_figure()
    minutes = np.geomspace(*_MINUTES, 300)
    for (name, ettr), colour in zip(curves.items(), _COLOURS, strict=False):
        axes.plot(minutes, [ettr(60 * float(one)) for one in minutes], color=colour, linewidth=1.8, label=f"{name} (derived)")
        if name in young_s:
            axes.axvline(
                young_s[name] / 60, color=colour, linestyle=":", linewidth=1.4, label=f"{name}: Young, {young_s[name] / 60:.1f} min"
            )
    axes.plot(list(published), list(published.values()), "D", color=TEXT, markersize=9, label="Meta (published)")
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.set_xticks(ticks := [0.5, 1, 2, 5, 10, 20, 60, 120, 240], [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("minutes between two saves", fontsize=12, color=TEXT)
    axes.set_ylabel("expected share of the time that trains", fontsize=12, color=TEXT)
    axes.legend(loc="lower center", framealpha=1, edgecolor="none", fontsize=11, labelcolor=TEXT)
    title(
        axes,
        "Saving too rarely and too often",
        "16,000 GPUs of RSC-1: 13 failures a day, 5 minutes to restart; w: a save holds up the training",
    )
    figure.savefig(path)

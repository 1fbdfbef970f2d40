"""What a larger batch buys a pipeline, and whether the model learns as well with it: pictures of the notebook on LAMB."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megascale_jax.views.style import COLOUR_A, COLOUR_B, MUTED, RESUMED, TEXT, WARNING, new_figure, title

_COLOURS = (COLOUR_A, "#8ab6d6", WARNING, COLOUR_B, RESUMED, "#7b5ea7")


def plot_batches(
    factors: Sequence[int], bubbles: Sequence[float], mfu: Sequence[float], published: Mapping[int, float], path: Path
) -> None:
    """Bubble and MFU (fractions) over the batch as multiples of 256 rows; ``published``: MFU of some multiples."""
    figure, (left, right) = new_figure((1, 1))
    x = np.arange(len(factors))
    left.bar_label(left.bar(x, bubbles, 0.5, color=COLOUR_B), [f"{value:.2%}" for value in bubbles], fontsize=11, color=TEXT)
    right.bar_label(
        right.bar(x, mfu, 0.5, color=COLOUR_A, label="simulated"), [f"{value:.1%}" for value in mfu], fontsize=11, color=TEXT, padding=4
    )
    known = [index for index, factor in enumerate(factors) if factor in published]
    right.plot(known, [published[factors[index]] for index in known], "D", color=TEXT, markersize=8, label="published (Table 3)")
    right.set_ylim(min([*mfu, *published.values()]) - 0.03, max([*mfu, *published.values()]) + 0.02)
    for axes, name in ((left, "bubble, share of the pipeline's busy time"), (right, "MFU (the axis does not begin at 0)")):
        axes.set_xticks(x, [f"x {factor}\n{256 * factor:,} rows" for factor in factors])
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
        axes.set_xlabel("batch", fontsize=12, color=TEXT)
        axes.set_ylabel(name, fontsize=12, color=TEXT)
    right.legend(loc="upper left", frameon=False, fontsize=11, labelcolor=TEXT)
    title(left, "Bubble", "simulated; 175 B on 256 A100, pipe 8, 6 chunks")
    title(right, "MFU", "simulated, and what the paper prints")
    figure.savefig(path)


def plot_convergence(result: Mapping[str, Any], path: Path) -> None:
    """A benchmark's result: training losses over tokens, means over seeds; at the right each seed's held-out loss above the baseline's."""
    figure, (curves, dots) = new_figure((1.25, 1))
    variants = result["variants"]
    for one, colour in zip(variants, _COLOURS, strict=False):
        curves.plot(np.array(one["curve_tokens"]) / 1e6, one["curve"], color=colour, linewidth=1.8, label=one["name"])
    curves.axhline(result["bigram_nats"], color=MUTED, linestyle=":", linewidth=1.4)
    curves.text(0, result["bigram_nats"], "bigram table ", color=MUTED, fontsize=11, va="bottom")
    lowest = min(min(one["curve"]) for one in variants)
    curves.set_ylim(lowest - 0.1, lowest + 1.6)
    curves.set_xlabel("million tokens", fontsize=12, color=TEXT)
    curves.legend(loc="upper right", frameon=False, fontsize=11, labelcolor=TEXT)
    others = [one for one in variants if one["name"] != result["baseline"]]
    for index, (one, colour) in enumerate(zip(others, _COLOURS[1:], strict=False)):
        above = np.array(one["above_baseline"])
        dots.plot(above, np.full(len(above), index), "o", color=colour, markersize=8, alpha=0.7)
        dots.errorbar(above.mean(), index + 0.25, xerr=above.std(ddof=1), fmt="|", color=TEXT, capsize=4, markersize=12)
    dots.axvline(0, color=TEXT, linewidth=1)
    dots.set_yticks(np.arange(len(others)), [one["name"] for one in others])
    dots.set_ylim(len(others) - 0.4, -0.6)
    dots.grid(axis="y", visible=False)
    dots.grid(axis="x", color="#e9ecef", linewidth=0.9)
    dots.set_xlabel("held-out loss above the baseline's, nats", fontsize=12, color=TEXT)
    dots.set_ylabel("")
    seeds = len(variants[0]["held_out"])
    title(curves, "Training loss at equal tokens", f"{result['kind']}; mean of {seeds} seeds, {result['parameters']:,} parameters")
    title(dots, "Seed by seed", f"{result['kind']}; 0 is {result['baseline']}")
    figure.savefig(path)

"""The cube of ranks, pipe x data x tensor, as a small table for a terminal: a letter a rank, or the worst of a group. No JAX."""

from collections.abc import Mapping

import numpy as np
from rich.text import Text

from megascale_jax.views.why import Judgement, State

MOST_LINES, WIDTH = 32, 96
LETTERS: Mapping[State, tuple[str, str]] = {
    "stuck": ("X", "bold red"),
    "silent": ("s", "red"),
    "suspect": ("?", "yellow"),
    "waiting": ("w", "cyan"),
    "running": (".", "green"),
    "ended": ("e", "dim"),
}
"""Letter and style of a state; the worst first, which a group of ranks shows."""
_UNKNOWN = (" ", "")
"""Of a device that no rank says is its own."""


def cube(found: Judgement) -> Text:
    """Stages downwards, data to the right, tensor within a group; groups of neighbours share a letter where there are too many."""
    pipe, data, tensor = found.mesh or (1, 1, max((one.rank for one in found.ranks), default=0) + 1)
    worst = np.full((pipe, data, tensor), len(LETTERS))
    for one in found.ranks:
        places = one.coordinates if found.mesh else ((0, 0, one.rank),)
        for place in places:
            worst[place] = min(worst[place], list(LETTERS).index(one.state))
    per_line, per_letter = -(-pipe // MOST_LINES), 1
    if data * (tensor + 1) > WIDTH:
        worst, per_letter = worst.min(axis=2, keepdims=True), -(-data // WIDTH)
    lines = [_head(found.mesh, per_line, per_letter, tensor if worst.shape[2] < tensor else 1)]
    looks = [*LETTERS.values(), _UNKNOWN]
    for first in range(0, pipe, per_line):
        rows = worst[first : first + per_line].min(axis=0)
        label = f"pipe {first}" if per_line == 1 else f"pipe {first}-{min(first + per_line, pipe) - 1}"
        groups = [rows[begin : begin + per_letter].min(axis=0) for begin in range(0, data, per_letter)]
        line = Text(f"{label:<14}" if found.mesh else "")
        for number, group in enumerate(groups):
            line.append(" " if number and len(group) > 1 else "")
            for state in group:
                letter, style = looks[state]
                line.append(letter, style)
        lines.append(line)
    legend = Text("  ".join(f"{letter} {state}" for state, (letter, _) in LETTERS.items()), style="dim")
    return Text("\n").join([*lines, legend])


def _head(mesh: tuple[int, int, int] | None, per_line: int, per_letter: int, tensor: int) -> Text:
    if mesh is None:
        return Text("ranks in their order", style="dim")
    size = per_line * per_letter * tensor
    shown = "a letter a device" if size == 1 else f"a letter the worst of up to {size} devices"
    return Text(f"pipe {mesh[0]} x data {mesh[1]} x tensor {mesh[2]}: stages downwards, data to the right; {shown}", style="dim")

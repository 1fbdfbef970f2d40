"""Which checkpoints a run still goes on from after it was rewound. Pure.

A *rewind* ``(step, first, end)`` gives up what was trained after ``step``; samples ``first`` to ``end - 1`` are never trained on again.
Every checkpoint says which rewinds its training knew, so one of the same step number from before is told from the one that replaces
it, whenever it turns up: a state that knows all rewinds, or is not newer than those it does not know, is of the run's present *line*.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Rewind = tuple[int, int, int]
REWINDS = "rewinds"
"""Key of a checkpoint's description."""


def joined(*lists: Iterable[Sequence[int]]) -> tuple[Rewind, ...]:
    """All rewinds of several lists, each once, in order of appearance."""
    return tuple(dict.fromkeys((step, first, end) for rewinds in lists for step, first, end in rewinds))


def given_up(step: int, description: Mapping[str, Any], rewinds: Iterable[Sequence[int]]) -> str | None:
    """Why a run with these ``rewinds`` does not go on from a state; ``None``: it may."""
    known = set(joined(description.get(REWINDS, ())))
    for rewind in joined(rewinds):
        if rewind not in known and step > rewind[0]:
            return f"given up when the run was rewound to step {rewind[0]}"
    return None

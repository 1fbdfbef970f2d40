"""One flipped bit in the state of a living process, for drills of silent corruption; nothing else asks for it.

Only a process that was started with ``MEGASCALE_DRILL=1`` looks, once a step, for a file beside its marks: ``rank-N.flip`` next to
``rank-N.marks`` (`observe/marks.py`). When it is there it is removed, and one bit of one device's copy of an array is another. The file
is empty, or one JSON object: ``{"array": "params.position", "element": 0, "bit": 12}``, any of which may be left out. By
default it is the parameter that most devices hold alike, or the rng where that has more copies: what no other device has too
cannot be compared, and more than two copies tell which one is wrong.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megascale_jax.errors import UsageError
from megascale_jax.observe.marks import DRILL, FLIP, MARKS
from megascale_jax.train.saved import named_arrays
from megascale_jax.train.state import TrainState

_BIT = 12
"""Of the 23 bits of a fraction: the number stays a plausible one, and no loss shows it."""


class BitFlip:
    """Flips a bit whenever ``file`` appears."""

    def __init__(self, file: Path):
        self._file = file

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "BitFlip | None":
        """``None`` unless this is a drill. Raises UsageError in a drill without marks, where nobody could ask for a flip."""
        if environment.get(DRILL) != "1":
            return None
        if not environment.get(MARKS):
            raise UsageError(f"{DRILL}=1 is for processes that `megascale drive` starts; {MARKS} is not set")
        return cls(Path(environment[MARKS]).with_suffix(FLIP))

    def apply(self, state: TrainState) -> TrainState:
        """The state as it is, or with one bit flipped if that was asked for. Raises UsageError for a file that asks for something else."""
        try:
            text = self._file.read_text()
            self._file.unlink()
        except FileNotFoundError:
            return state
        named = named_arrays(state)
        try:
            asked: dict[str, Any] = json.loads(text) if text.strip() else {}
            name, element, bit = asked.get("array", most_shared(named)), int(asked.get("element", 0)), int(asked.get("bit", _BIT))
            device = named[name].addressable_shards[0].device
            return flipped(state, name, device, element, bit)
        except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
            raise UsageError(f"{self._file}: got {text[:200]!r}, expected nothing or an array, an element and a bit of 0 to 31") from error


def most_shared(named: Mapping[str, jax.Array]) -> str:
    """The array of which most devices hold the same part: a parameter if there is one among them, else the rng."""

    def copies(name: str) -> int:
        parts = [str(part) for part in named[name].sharding.devices_indices_map(named[name].shape).values()]
        return max(map(parts.count, parts))

    return max([*(name for name in named if name.startswith("params.")), "rng"], key=copies)


def flipped(state: TrainState, name: str, device: Any, element: int, bit: int) -> TrainState:
    """A state in which one device's copy of an array of 4-byte elements differs in one bit; the arrays given stay as they are."""
    array = named_arrays(state)[name]
    shards = []
    for shard in array.addressable_shards:
        data = shard.data
        if shard.device == device:
            raw = np.array(data)
            raw.reshape(-1).view(np.uint32)[element : element + 1] ^= np.uint32(1 << bit)
            data = jax.device_put(raw, device)
        shards.append(data)
    changed = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    leaves, tree = jax.tree.flatten(state)
    assert any(leaf is array for leaf in leaves), "the arrays of a state are its leaves"
    return jax.tree.unflatten(tree, [changed if leaf is array else leaf for leaf in leaves])

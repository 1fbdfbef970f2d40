"""Slots: the newest states of a rank in host memory, in a form that outlives the rank.

A slot is a `memfd`: memory with a descriptor that can be handed to another process and dies with its last holder, so nothing
is ever left behind, and the size of ``/dev/shm`` does not matter. A rank fills its two slots in turn; the keeper holds them
too, and gives them to the rank that comes after a crash. What a slot holds is said by its `SlotIndex`, which the rank gives
away once the copy is complete; the keeper then adds a checksum of every block, without which a slot is never trusted.
"""

import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from megascale_jax.checkpoint.stored import Index, StoredArray
from megascale_jax.comm.memory_file import make_memory_file
from megascale_jax.errors import CheckpointError

SLOTS = 2
ALIGNMENT = 64


@dataclass(frozen=True)
class SlotBlock:
    """One block in a slot: ``offset`` and ``num_bytes`` in the slot. ``is_owned``: stage 2 writes this copy."""

    array: str
    index: Index
    offset: int
    num_bytes: int
    is_owned: bool


@dataclass(frozen=True)
class SlotIndex:
    """What a filled slot holds."""

    step: int
    launch: str
    rank: int
    arrays: Mapping[str, StoredArray]
    blocks: Sequence[SlotBlock]
    fingerprint: str
    """Of model, mesh and number of processes: only a rank with the same one can load the slot as it lies."""
    description: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "step": self.step,
            "launch": self.launch,
            "rank": self.rank,
            "fingerprint": self.fingerprint,
            "description": self.description,
            "arrays": {name: [array.shape, array.chunk, array.dtype] for name, array in self.arrays.items()},
            "blocks": [[b.array, b.index, b.offset, b.num_bytes, b.is_owned] for b in self.blocks],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "SlotIndex":
        """The inverse of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        arrays = {name: StoredArray(name, tuple(shape), tuple(chunk), dtype) for name, (shape, chunk, dtype) in document["arrays"].items()}
        blocks = [SlotBlock(array, tuple(index), offset, size, owned) for array, index, offset, size, owned in document["blocks"]]
        scalars = {key: document[key] for key in ("step", "launch", "rank", "fingerprint", "description")}
        return cls(arrays=arrays, blocks=blocks, **scalars)


class Slot:
    """Memory of ``num_bytes``, new or by its descriptor; mapped until `close`."""

    def __init__(self, num_bytes: int, descriptor: int | None = None, *, prefault: bool = False):
        """``prefault``: take the pages now, so that the first save does not. Raises OSError when there is not enough memory."""
        self.descriptor = make_memory_file("megascale-slot", num_bytes) if descriptor is None else descriptor
        self.num_bytes = num_bytes
        if os.fstat(self.descriptor).st_size != num_bytes:
            raise OSError(f"a slot of {os.fstat(self.descriptor).st_size} bytes arrived, expected {num_bytes}")
        self._end = weakref.finalize(self, os.close, self.descriptor)
        self._map = mmap.mmap(self.descriptor, num_bytes)
        self.data = np.frombuffer(self._map, np.uint8)
        if prefault:
            self.data[:: mmap.PAGESIZE] = 0

    def close(self) -> None:
        """Give the memory back, unless somebody else holds it."""
        self._end()
        self.data = np.empty(0, np.uint8)
        with suppress(BufferError):  # a view is still out; the memory goes with it
            self._map.close()

    @property
    def identity(self) -> int:
        """The same for all who hold this very memory."""
        return os.fstat(self.descriptor).st_ino

    def block(self, block: SlotBlock) -> np.ndarray:
        """The bytes of a block, a view."""
        return self.data[block.offset : block.offset + block.num_bytes]


def checksums(slot: Slot, index: SlotIndex) -> list[int]:
    """XXH3 of every block, in order."""
    return [xxhash.xxh3_64_intdigest(slot.block(block)) for block in index.blocks]


class SlotReader:
    """Blocks of a slot, each verified when it is read."""

    def __init__(self, slot: Slot, index: SlotIndex, sums: Sequence[int], tier: str):
        self._slot, self._tier, self._index = slot, tier, index
        self._blocks = {(block.array, block.index): (block, total) for block, total in zip(index.blocks, sums, strict=True)}

    @property
    def description(self) -> Mapping[str, Any]:
        """What the state belongs to."""
        return self._index.description

    def read(self, name: str, index: Index) -> np.ndarray:
        """A block with its grid's shape, a view. Raises CheckpointError when it is damaged or not there."""
        if (found := self._blocks.get((name, index))) is None:
            raise CheckpointError(f"{self._tier} memory of step {self._index.step} lacks block {list(index)} of {name}")
        block, total = found
        raw = self._slot.block(block)
        if xxhash.xxh3_64_intdigest(raw) != total:
            raise CheckpointError(f"{self._tier} memory of step {self._index.step}: block {list(index)} of {name} has a wrong checksum")
        array = self._index.arrays[name]
        return raw.view(array.dtype).reshape(array.chunk)


def owned_blocks(slot: Slot, index: SlotIndex) -> Iterator[tuple[str, Index, np.ndarray]]:
    """What stage 2 writes of a slot."""
    return ((block.array, block.index, slot.block(block)) for block in index.blocks if block.is_owned)

"""Stored arrays and their grid of chunks, without JAX: what a manifest lists and what every reader computes with."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

Index = tuple[int, ...]
ITEM_BYTES = {"float32": 4, "int32": 4, "uint32": 4}


@dataclass(frozen=True)
class StoredArray:
    """A logical array and its grid; ``dtype`` is a NumPy name of a little-endian type of four bytes."""

    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: str

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each dim."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one block, pads included."""
        return prod(self.chunk) * ITEM_BYTES[self.dtype]

    def indices(self) -> Iterator[Index]:
        """Every chunk's place in the grid."""
        return product(*map(range, self.grid))


@dataclass(frozen=True)
class Region:
    """A part of a stored array, ``start`` and ``stop`` of every dim in logical numbers, and where it lies in a shard.

    ``place`` is the start of the region in the shard's own dims, ``[stage, chunk, layer, ...]`` for a layer parameter.
    """

    start: Index
    stop: Index
    place: Index


def needed_chunks(stored: StoredArray, region: Region) -> Iterator[Index]:
    """Places in ``stored``'s grid that a region overlaps."""
    spans = [range(a // step, -(-b // step)) for a, b, step in zip(region.start, region.stop, stored.chunk, strict=True)]
    return product(*spans)


def overlap(stored: StoredArray, index: Index, region: Region) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where a chunk and a region share elements: slices of the chunk, and of the region."""
    of_chunk, of_region = [], []
    for place, step, start, stop in zip(index, stored.chunk, region.start, region.stop, strict=True):
        first, last = max(place * step, start), min((place + 1) * step, stop)
        of_chunk.append(slice(first - place * step, last - place * step))
        of_region.append(slice(first - start, last - start))
    return tuple(of_chunk), tuple(of_region)

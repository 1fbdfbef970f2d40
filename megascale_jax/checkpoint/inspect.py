"""Checkpoints looked at from outside a run: listed, verified, compared, cut for another mesh. Nothing here needs a device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megascale_jax.checkpoint.arrays import BlockReader
from megascale_jax.checkpoint.manifest import DAMAGED, MANIFEST, Manifest, read_manifest
from megascale_jax.checkpoint.stored import Index, Region, StoredArray, needed_chunks, overlap
from megascale_jax.comm.storage import Storage
from megascale_jax.errors import CheckpointError, DamagedCheckpointError

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""
At = tuple[Storage, int]
"""A checkpoint: where, and its step."""


def _silent(done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Listed:
    """One folder of a storage of checkpoints. ``state``: ``good``, ``damaged`` or ``incomplete``, as far as its manifest says."""

    step: int
    state: str
    manifest: Manifest | None
    problem: str = ""


def list_checkpoints(storage: Storage) -> list[Listed]:
    """Every folder with a step's number, ascending. Raises OSError."""
    listed = []
    for step in sorted(int(name) for name in storage.folders() if name.isdecimal()):
        if not storage.has(f"{step}/{MANIFEST}"):
            listed.append(Listed(step, "incomplete", None, "it was never published, or is being written"))
            continue
        try:
            manifest = read_manifest(storage, step)
        except CheckpointError as error:
            listed.append(Listed(step, "damaged", None, str(error)))
            continue
        marked = storage.has(f"{step}/{DAMAGED}")
        listed.append(Listed(step, "damaged" if marked else "good", manifest, "a reader found it so; see damaged.json" if marked else ""))
    return listed


@dataclass
class Verdict:
    """What reading a whole checkpoint found."""

    step: int
    num_blocks: int = 0
    num_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def verify(storage: Storage, step: int, progress: Progress = _silent) -> Verdict:
    """Read every block. Raises CheckpointError when there is no manifest, another key is needed, or the storage cannot be asked."""
    verdict, done = Verdict(step), 0
    try:
        manifest = read_manifest(storage, step)
        reader = BlockReader(storage, manifest)
    except DamagedCheckpointError as error:
        return Verdict(step, problems=[str(error)])
    for name, array in manifest.arrays.items():
        for index in array.indices():
            try:
                reader.read(name, index)
                verdict.num_blocks += 1
                verdict.num_bytes += array.chunk_bytes
            except DamagedCheckpointError as error:
                verdict.problems.append(str(error))
            done += array.chunk_bytes
            progress(done, manifest.num_bytes)
    return verdict


@dataclass(frozen=True)
class ArrayDifference:
    """How one array differs. ``elements``: those whose bits differ; ``largest``: greatest absolute difference of values."""

    name: str
    elements: int = 0
    of: int = 0
    largest: float = 0.0
    note: str = ""


def difference(one: tuple[Storage, int], other: tuple[Storage, int], progress: Progress = _silent) -> list[ArrayDifference]:
    """Arrays that are not the same bits in both, whatever meshes they were saved on. Raises CheckpointError."""
    first, second = read_manifest(*one), read_manifest(*other)
    readers = BlockReader(one[0], first), BlockReader(other[0], second)
    found, done = [], 0
    for name in sorted(first.arrays.keys() | second.arrays.keys()):
        a, b = first.arrays.get(name), second.arrays.get(name)
        if a is None or b is None:
            found.append(ArrayDifference(name, note=f"only in {'the second' if a is None else 'the first'}"))
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            found.append(ArrayDifference(name, note=f"{list(a.shape)} {a.dtype} and {list(b.shape)} {b.dtype}"))
        else:
            elements, largest, count = 0, 0.0, 0
            for index in a.indices():
                mine = readers[0].read(name, index)
                theirs = assemble(readers[1], b, chunk_region(a, index))
                differs = mine.view(np.uint32) != theirs.view(np.uint32)
                elements, count, done = elements + int(differs.sum()), count + mine.size, done + a.chunk_bytes
                if differs.any():
                    largest = max(largest, float(np.max(np.abs(mine.astype(np.float64) - theirs.astype(np.float64)))))
                progress(done, first.num_bytes)
            if elements:
                found.append(ArrayDifference(name, elements, count, largest))
    return found


def chunk_region(array: StoredArray, index: Index) -> Region:
    """The part of an array that one chunk of it holds."""
    start = tuple(place * step for place, step in zip(index, array.chunk, strict=True))
    stop = tuple(min(begin + step, size) for begin, step, size in zip(start, array.chunk, array.shape, strict=True))
    return Region(start, stop, start)


def assemble(reader: BlockReader, stored: StoredArray, region: Region) -> np.ndarray:
    """A region of an array from the blocks that it overlaps."""
    result = np.zeros([stop - start for start, stop in zip(region.start, region.stop, strict=True)], stored.dtype)
    for index in needed_chunks(stored, region):
        of_block, of_region = overlap(stored, index, region)
        result[of_region] = reader.read(stored.name, index)[of_block]
    return result


def whole_arrays(storage: Storage, step: int, prefix: str) -> Iterator[tuple[str, np.ndarray]]:
    """Arrays whose name begins with ``prefix``, whole, one at a time, without the prefix. Raises CheckpointError."""
    manifest = read_manifest(storage, step)
    reader = BlockReader(storage, manifest)
    for name, array in manifest.arrays.items():
        if name.startswith(prefix):
            everything = Region((0,) * len(array.shape), array.shape, (0,) * len(array.shape))
            yield name.removeprefix(prefix), assemble(reader, array, everything)


def summary_of(manifest: Manifest) -> dict[str, Any]:
    """What a list shows of a checkpoint."""
    description = manifest.description
    return {
        "step": manifest.step,
        "created_unix_s": manifest.created_unix_s,
        "num_bytes": manifest.num_bytes,
        "ranks": manifest.ranks,
        "format": manifest.format,
        "compression": manifest.compression,
        "samples": (description.get("data") or {}).get("samples"),
        "commit": description.get("commit"),
    }

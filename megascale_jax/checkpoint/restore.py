"""From blocks to the arrays of a mesh: any checkpoint on any mesh, every element once, bit for bit.

The wanted shards say which elements they hold (`StateGrid.regions`), the stored arrays say in which blocks those lie
(`stored.needed_chunks`), and a source gives blocks: a published checkpoint, this host's memory, another host's. What a
source gives is verified by the source. Nothing is placed on a device before all of it has arrived.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from megascale_jax.checkpoint.arrays import BlockReader
from megascale_jax.checkpoint.grid import COUNTERS, STACK, StateGrid
from megascale_jax.checkpoint.line import joined
from megascale_jax.checkpoint.manifest import read_manifest
from megascale_jax.checkpoint.stored import Index, Region, StoredArray, needed_chunks, overlap
from megascale_jax.comm.storage import Storage
from megascale_jax.errors import CheckpointError
from megascale_jax.parallel.plan import Plan

READ_AHEAD_BYTES = 32 << 20
Key = tuple[str, Index]
"""A block: array and place in its grid."""


class BlockSource(Protocol):
    """Where blocks come from."""

    def read(self, name: str, index: Index, /) -> np.ndarray:
        """A verified block. Raises CheckpointError."""
        ...


def grid_of(plan: Plan) -> StateGrid:
    """How the state of a plan is cut."""
    return StateGrid(plan.zero.specs, plan.layout, plan.experiment.model.num_layers)


def local_ranks(plan: Plan) -> dict[Any, int]:
    """This process's devices and their numbers on the mesh."""
    return {device: rank for rank, device in enumerate(plan.mesh.devices.flat) if device.process_index == jax.process_index()}


def fingerprint(plan: Plan, rewinds: Sequence[Sequence[int]] = ()) -> str:
    """The same for two processes that hold the same part of the same model's state, laid out alike, on one line of training (`line.py`)."""
    experiment = plan.experiment
    ranks = sorted(local_ranks(plan).values())
    text = f"{experiment.model.model_dump_json()} {experiment.parallel.model_dump_json()} {jax.process_count()} {ranks}"
    if rewinds:
        text += f" {sorted(joined(rewinds))}"
    return hashlib.sha256(text.encode()).hexdigest()


class Shards:
    """The shards of this process while they are filled, in host memory; devices that hold the same elements share one."""

    def __init__(self, plan: Plan, grid: StateGrid, stored: Mapping[str, StoredArray], names: Iterable[str]):
        """``stored``: the arrays of the source. Raises CheckpointError, naming arrays, when they are not those of the plan's model."""
        self.plan, self.grid, self.stored, self.names = plan, grid, stored, list(names)
        _refuse_other_model(stored, {name: grid.stored[name] for name in self.names})
        self._shards: dict[tuple[str, tuple[Region, ...]], np.ndarray] = {}
        self._of_device: dict[tuple[str, Any], np.ndarray] = {}
        self.needed: dict[Key, list[tuple[np.ndarray, Region]]] = {}
        for name in self.names:
            for device, rank in local_ranks(plan).items():
                regions = tuple(grid.regions(name, rank))
                if (name, regions) not in self._shards:
                    shard = np.zeros(grid.local_shape(name), grid.stored[name].dtype)
                    self._shards[name, regions] = shard
                    for region in regions:
                        for index in needed_chunks(stored[name], region):
                            self.needed.setdefault((name, index), []).append((shard, region))
                self._of_device[name, device] = self._shards[name, regions]

    def place(self, name: str, index: Index, block: np.ndarray) -> None:
        """Copy what the shards need of a block."""
        for shard, region in self.needed.get((name, index), ()):
            of_block, of_region = overlap(self.stored[name], index, region)
            if name in COUNTERS or not self.grid.specs[name.split(".", 1)[1]].per_layer:
                shard[of_region] = block[of_block]
            else:
                shard[region.place[:STACK]][None][of_region] = block[of_block]

    def arrays(self) -> dict[str, jax.Array]:
        """The filled shards as global arrays on the plan's mesh, as a step takes them."""
        result = {}
        for name in self.names:
            if name in COUNTERS:
                partition, shape = jax.sharding.PartitionSpec(), COUNTERS[name][0]
            else:
                array = self.plan.zero.arrays[name.split(".", 1)[1]]
                partition, shape = array.partition, array.shape
            sharding = self.plan.sharding(partition)
            pieces = [jax.device_put(self._of_device[name, device], device) for device in local_ranks(self.plan)]
            result[name] = jax.make_array_from_single_device_arrays(shape, sharding, pieces)
        return result


def read_plain(shards: Shards, source: BlockSource) -> None:
    """Fill the shards with what this process reads itself. Raises CheckpointError."""
    for name, index, block in in_order(source, shards.needed):
        shards.place(name, index, block)


def in_order(source: BlockSource, keys: Iterable[Key]) -> Iterator[tuple[str, Index, np.ndarray]]:
    """Blocks of a source in the order of ``keys``; those of a storage are read ahead."""
    if not isinstance(source, BlockReader):
        yield from ((name, index, source.read(name, index)) for name, index in keys)
        return
    waiting: deque[tuple[str, Index, Any]] = deque()
    ahead = 0
    for name, index in keys:
        waiting.append((name, index, source.start(name, index)))
        ahead += source.size(name)
        while ahead > READ_AHEAD_BYTES:
            ready = waiting.popleft()
            ahead -= source.size(ready[0])
            yield ready[0], ready[1], source.finish(*ready)
    while waiting:
        ready = waiting.popleft()
        yield ready[0], ready[1], source.finish(*ready)


def load_arrays(storage: Storage, step: int, plan: Plan, names: Iterable[str] | None = None) -> dict[str, jax.Array]:
    """Arrays of one published checkpoint, all or the named ones, on a plan of one process. Raises CheckpointError, OSError."""
    manifest, grid = read_manifest(storage, step), grid_of(plan)
    shards = Shards(plan, grid, manifest.arrays, grid.stored if names is None else names)
    read_plain(shards, BlockReader(storage, manifest))
    return shards.arrays()


def _refuse_other_model(have: Mapping[str, StoredArray], want: Mapping[str, StoredArray]) -> None:
    problems = []
    for name, array in want.items():
        if name not in have:
            problems.append(f"{name}: the checkpoint lacks it, expected {list(array.shape)}")
        elif (have[name].shape, have[name].dtype) != (array.shape, array.dtype):
            problems.append(f"{name}: checkpoint {list(have[name].shape)}, expected {list(array.shape)}")
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"the checkpoint is of another model: {shown}")

"""Stage 1: the shards of this process copied to host memory, as they lie. What a rank has twice is copied once."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from megascale_jax.checkpoint.grid import StateGrid
from megascale_jax.checkpoint.restore import local_ranks
from megascale_jax.checkpoint.slot import ALIGNMENT, Slot, SlotBlock
from megascale_jax.checkpoint.stored import ITEM_BYTES
from megascale_jax.config.layout import round_up
from megascale_jax.parallel.plan import Plan

_COPY_THREADS = 4


class SlotLayout:
    """Where every shard of a process lies in a slot, and which blocks those are."""

    def __init__(self, plan: Plan, grid: StateGrid):
        ranks = local_ranks(plan)
        self._offsets: dict[tuple[str, Any], int] = {}
        self._pinned = plan.experiment.system.platform == "gpu"
        self.num_bytes = 0
        owned = {(b.array, b.index) for name in grid.stored for rank in ranks.values() for b in grid.blocks(name, rank) if b.is_owned}
        blocks: dict[tuple[str, tuple[int, ...]], SlotBlock] = {}
        for name, array in grid.stored.items():
            for device, rank in ranks.items():
                new = [block for block in grid.blocks(name, rank) if (name, block.index) not in blocks]
                if new:
                    self._offsets[name, device] = start = self.num_bytes
                    self.num_bytes += round_up(prod(grid.local_shape(name)) * ITEM_BYTES[array.dtype], ALIGNMENT)
                    for b in new:
                        key = (name, b.index)
                        blocks[key] = SlotBlock(name, b.index, start + b.offset, b.num_bytes, key in owned)
        self.blocks = tuple(blocks.values())

    def copy(self, state: Mapping[str, jax.Array], slot: Slot) -> None:
        """Fill a slot; when this returns the arrays may be donated."""
        shards = [
            (self._offsets[name, shard.device], shard.data)
            for name, array in state.items()
            for shard in array.addressable_shards
            if (name, shard.device) in self._offsets
        ]
        if self._pinned:  # all transfers are on their way before the first is waited for
            shards = [(offset, _to_pinned(data)) for offset, data in shards]

        def move(item: tuple[int, jax.Array]) -> None:
            offset, data = item
            raw = np.asarray(data).reshape(-1).view(np.uint8)
            np.copyto(slot.data[offset : offset + raw.size], raw)

        with ThreadPoolExecutor(_COPY_THREADS) as threads:
            list(threads.map(move, shards))


def _to_pinned(data: jax.Array) -> jax.Array:
    (device,) = data.devices()
    return jax.device_put(data, SingleDeviceSharding(device, memory_kind="pinned_host"))

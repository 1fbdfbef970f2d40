"""The batches of one host, written into a ring: each row is read and decoded once, whichever ranks share it."""

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megascale_jax.data.batch import Batch, BatchLayout, begin_batch
from megascale_jax.data.manifest import read_manifest
from megascale_jax.data.mixture import join_rows, make_order
from megascale_jax.data.order import Phase, SkippingOrder
from megascale_jax.data.prepared import stored_rows
from megascale_jax.data.shared_memory import Ring, RingShape, make_ring_file
from megascale_jax.errors import DataError

_BATCHES_BEGUN = 4
"""Batches whose rows an object store has been asked for, the one that is written included; disks are asked when it is their turn."""


class HostBatches:
    """Fills the slots of a ring; one block for each of ``blocks``, the distinct sets of data indices of the ranks."""

    def __init__(self, request: Mapping[str, Any], blocks: Sequence[tuple[int, ...]], slots: int):
        """``request`` is what `HostIterator` asks for.

        Raises ``DataError`` when the data is not what it was when it was asked for, or when memory for the ring is short.
        """
        manifests = []
        for name, digest in zip(request["folders"], request["digests"], strict=True):
            manifests.append(manifest := read_manifest(name))
            if manifest.digest != digest:
                raise DataError(f"{name} has changed since this run opened it: digest {manifest.digest}, then {digest}.")
        self._rows = join_rows([stored_rows(name, m, "train") for name, m in zip(request["folders"], manifests, strict=True)])
        sizes = [(name, manifest.train.rows) for name, manifest in zip(request["names"], manifests, strict=True)]
        phases = None if request["phases"] is None else [Phase(begin, tuple(weights)) for begin, weights in request["phases"]]
        order = make_order(sizes, phases, request["seed"], request["shuffle"])
        self._order = SkippingOrder(order, [(begin, end) for begin, end in request["skip"]])
        self._manifest = manifests[0]
        self._begun: deque[tuple[int, Callable[[], Batch]]] = deque()
        self.global_batch_size: int = request["global_batch_size"]
        indices = tuple(sorted({index for block in blocks for index in block}))
        size = request["micro_batch_size"]
        layout = BatchLayout(self.global_batch_size, request["data_size"], indices, size)
        self._offsets = layout.offsets()
        self._columns = [np.concatenate([indices.index(index) * size + np.arange(size) for index in block]) for block in blocks]
        shape = RingShape(slots, layout.num_micro_batches, tuple(len(columns) for columns in self._columns), self._manifest.sequence_length)
        try:
            self.descriptor = make_ring_file(shape)
            self.ring = Ring(self.descriptor, shape, writable=True)
        except OSError as error:
            raise DataError(
                f"No memory for {slots} batches of this host, {shape.num_bytes / 2**20:.0f} MiB ({error}). "
                "Free shared memory, or set train.data.loader=thread."
            ) from error

    def fill(self, slot: int, samples: int) -> None:
        """Write the batch that starts at kept sample ``samples``; the next ones are asked for. Raises ``DataError`` for a damaged row."""
        if self._begun and self._begun[0][0] != samples:
            self._begun.clear()
        while len(self._begun) < _BATCHES_BEGUN:
            start = samples + len(self._begun) * self.global_batch_size
            ids = self._order.ids(start + self._offsets)
            manifest = self._manifest
            self._begun.append((start, begin_batch(self._rows, ids, manifest.sequence_length, manifest.end_of_document)))
        batch = self._begun.popleft()[1]()
        for block, columns in enumerate(self._columns):
            for key, array in self.ring.block(slot, block).items():
                np.take(batch[key], columns, axis=1, out=array)

    def close_descriptor(self) -> None:
        """The ring stays mapped; only its descriptor is given back."""
        os.close(self.descriptor)

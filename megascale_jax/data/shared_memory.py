"""A ring of batches in memory that the processes of a host share.

One file without a name holds all slots; a slot is one batch of the host. The loader makes the file, and a process gets it
as a descriptor over a socket. So there is nothing that could be left behind: the kernel frees the memory with the last process
that maps it, however that one ended. ``multiprocessing.SharedMemory`` has names, and a tracker that removes what it never made.

A slot has one block for each distinct set of data indices, and a block one array for each key, 64-byte aligned: whatever
indices a rank serves, its rows are C-contiguous and used where they are. Ranks cannot write. Who may write when is not
decided here (`loader.py`). When memory is short, making the ring is an ``OSError``
(or the kernel ends the loader, where a container has less than the machine), never a SIGBUS later.
"""

import math
import mmap
from dataclasses import dataclass

import numpy as np

from megascale_jax.comm.memory_file import make_memory_file
from megascale_jax.data.batch import BATCH_KEYS, Batch

_ALIGNMENT = 64


@dataclass(frozen=True)
class RingShape:
    """Sizes of a ring: block p of a slot has arrays int32 [num_micro_batches, rows[p], sequence_length]."""

    slots: int
    num_micro_batches: int
    rows: tuple[int, ...]
    sequence_length: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, padding included."""
        return self._offset(len(self.rows))

    @property
    def num_bytes(self) -> int:
        """Bytes of the ring: whole pages."""
        return math.ceil(self.slots * self.slot_bytes / mmap.PAGESIZE) * mmap.PAGESIZE

    def array_shape(self, block: int) -> tuple[int, int, int]:
        """Shape of each array of a block."""
        return self.num_micro_batches, self.rows[block], self.sequence_length

    def place(self, slot: int, block: int, key: str) -> int:
        """Byte at which an array starts."""
        return slot * self.slot_bytes + self._offset(block) + BATCH_KEYS.index(key) * self._array_bytes(block)

    def _array_bytes(self, block: int) -> int:
        return math.ceil(4 * math.prod(self.array_shape(block)) / _ALIGNMENT) * _ALIGNMENT

    def _offset(self, block: int) -> int:
        return sum(len(BATCH_KEYS) * self._array_bytes(before) for before in range(block))


class Ring:
    """A mapped ring. Arrays taken from it keep the memory alive, also after the ring and all other processes have gone."""

    def __init__(self, descriptor: int, shape: RingShape, *, writable: bool):
        """Map the file behind ``descriptor``, which may be closed afterwards. Raises ``OSError`` when that fails."""
        self.shape = shape
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # Populated at once: otherwise each first look at a page of a batch would cost a fault in the training process.
        self._memory = mmap.mmap(descriptor, shape.num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)

    def block(self, slot: int, block: int) -> Batch:
        """The arrays of a block, without a copy; read-only unless the ring is writable."""
        shape = self.shape.array_shape(block)
        places = {key: self.shape.place(slot, block, key) for key in BATCH_KEYS}
        return {key: np.frombuffer(self._memory, np.int32, math.prod(shape), place).reshape(shape) for key, place in places.items()}


def make_ring_file(shape: RingShape) -> int:
    """Descriptor of a new file of zeros for ``shape``, owned by this process alone. Raises ``OSError`` when memory is short."""
    return make_memory_file("megascale-data", shape.num_bytes)

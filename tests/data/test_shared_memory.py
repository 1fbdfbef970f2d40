"""The ring of batches: where arrays lie, who sees them, what stays."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.data.batch import BATCH_KEYS
from megascale_jax.data.shared_memory import Ring, RingShape, make_ring_file


def entries(folder: str) -> set[Path]:
    return set(Path(folder).iterdir())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 17))
def test_arrays_of_a_ring_are_apart_aligned_and_the_same_for_all_who_map_it(slots, micro_batches, rows, sequence_length):
    shape = RingShape(slots, micro_batches, tuple(rows), sequence_length)
    descriptor = make_ring_file(shape)
    writer, reader = Ring(descriptor, shape, writable=True), Ring(descriptor, shape, writable=False)
    os.close(descriptor)
    places = [(slot, block, key) for slot in range(slots) for block in range(len(rows)) for key in BATCH_KEYS]
    for number, (slot, block, key) in enumerate(places):
        writer.block(slot, block)[key][...] = number
    for number, (slot, block, key) in enumerate(places):
        array = reader.block(slot, block)[key]
        assert array.shape == (micro_batches, rows[block], sequence_length) and array.dtype == np.int32
        assert (array == number).all()
        assert array.flags.c_contiguous and array.ctypes.data % 64 == 0


def test_readers_cannot_write():
    shape = RingShape(1, 1, (1,), 4)
    descriptor = make_ring_file(shape)
    tokens = Ring(descriptor, shape, writable=False).block(0, 0)["tokens"]
    os.close(descriptor)
    with pytest.raises(ValueError, match="read-only"):
        tokens[...] = 1


def test_arrays_outlive_the_ring_they_came_from():
    shape = RingShape(1, 1, (2,), 1024)
    descriptor = make_ring_file(shape)
    ring = Ring(descriptor, shape, writable=True)
    os.close(descriptor)
    tokens = ring.block(0, 0)["tokens"]
    tokens[...] = 7
    del ring
    assert (tokens == 7).all()


def test_ring_has_no_name_also_where_python_has_no_memory_files(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    before = entries("/dev/shm")
    shape = RingShape(2, 1, (2,), 1024)
    descriptor = make_ring_file(shape)
    assert entries("/dev/shm") == before
    status = os.fstat(descriptor)
    assert (status.st_nlink, status.st_size, status.st_mode & 0o077) == (0, shape.num_bytes, 0)
    os.close(descriptor)


def test_ring_without_memory_is_an_error_at_once():
    descriptors = len(entries("/proc/self/fd"))
    with pytest.raises(OSError, match="do not fit into the memory of this host"):
        make_ring_file(RingShape(1 << 20, 1 << 10, (1 << 10,), 1 << 12))
    assert len(entries("/proc/self/fd")) == descriptors

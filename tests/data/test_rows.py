"""Cutting a stream into stored rows and reading them back."""

import hashlib
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale_jax.data import rows
from megascale_jax.data.rows import RowSource, RowWriter, count_rows, token_dtype
from megascale_jax.errors import DataError


def write(path: Path, pieces: list[np.ndarray], sequence_length: int, dtype: np.dtype) -> tuple[int, str]:
    digest = hashlib.sha256()
    writer = RowWriter(path, sequence_length, dtype, digest)
    for piece in pieces:
        writer.add(piece.astype(dtype))
    writer.close()
    return writer.num_rows, digest.hexdigest()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 40), max_size=6),
    sequence_length=st.integers(1, 17),
    vocab_size=st.sampled_from([257, 65_536, 65_537]),
)
def test_every_token_but_the_first_is_a_target_once_when_rows_are_read_in_order(tmp_path, sizes, sequence_length, vocab_size):
    stream = np.random.default_rng(len(sizes)).integers(0, vocab_size, sum(sizes))
    dtype = token_dtype(vocab_size)
    path = tmp_path / "rows"
    written, _ = write(path, np.split(stream, np.cumsum(sizes)[:-1]) if sizes else [], sequence_length, dtype)
    assert written == count_rows(len(stream), sequence_length)
    source = RowSource(path, written, dtype)
    read = [source[index] for index in range(written)]
    assert all(len(row) == sequence_length + 1 for row in read[:-1])
    assert all(1 < len(row) <= sequence_length + 1 for row in read[-1:])
    targets = np.concatenate([row[1:] for row in read]) if read else np.empty(0)
    inputs = np.concatenate([row[:-1] for row in read]) if read else np.empty(0)
    assert np.array_equal(targets, stream[1:])
    assert np.array_equal(inputs, stream[:-1])


def test_digest_depends_on_the_tokens_and_not_on_the_pieces(tmp_path):
    stream = np.arange(100)
    _, whole = write(tmp_path / "a", [stream], 8, token_dtype(257))
    _, pieces = write(tmp_path / "b", [stream[:1], stream[1:50], stream[50:]], 8, token_dtype(257))
    stream[40] += 1
    _, changed = write(tmp_path / "c", [stream], 8, token_dtype(257))
    assert whole == pieces != changed


def test_token_type_is_the_smallest_that_holds_the_last_id():
    assert [token_dtype(size).str for size in (257, 65_536, 65_537)] == ["<u2", "<u2", "<u4"]


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "other count"])
def test_file_is_refused_at_opening_when_its_rows_are_not_all_there(tmp_path, damage):
    path = tmp_path / "rows"
    written, _ = write(path, [np.arange(200)], 8, token_dtype(257))
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage != "other count":
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    with pytest.raises(DataError, match=r"missing|damaged|cannot be opened"):
        RowSource(path, written + (damage == "other count"), token_dtype(257))


def test_flipped_bit_is_refused_when_its_row_is_read(tmp_path):
    path = tmp_path / "rows"
    stream = np.random.default_rng(0).integers(0, 257, 200_000)
    written, _ = write(path, [stream], 128, token_dtype(257))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    source = RowSource(path, written, token_dtype(257))
    with pytest.raises(DataError, match="damaged"):
        for index in range(written):
            assert np.array_equal(source[index], stream[index * 128 : index * 128 + 129])


def test_failed_write_is_an_os_error(tmp_path, monkeypatch):
    class FailingWriter:
        def __init__(self, *_: str): ...

        def write(self, record: bytes) -> None:
            raise RuntimeError("write() failed: No space left on device")

    monkeypatch.setattr(rows, "ArrayRecordWriter", FailingWriter)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "rows", [np.arange(20)], 8, token_dtype(257))


def test_full_disk_is_an_os_error_when_the_file_is_closed(tmp_path):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, old[1]))  # below the first block of an ArrayRecord file
    try:
        with pytest.raises(OSError, match="rows"):
            write(tmp_path / "rows", [np.arange(500) % 257], 128, token_dtype(257))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("index", [-1, 25])
def test_row_outside_the_file_is_an_index_error(tmp_path, index):
    written, _ = write(tmp_path / "rows", [np.arange(200)], 8, token_dtype(257))
    assert written == 25
    with pytest.raises(IndexError):
        RowSource(tmp_path / "rows", written, token_dtype(257))[index]

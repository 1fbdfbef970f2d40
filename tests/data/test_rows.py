"""Cutting a stream into stored rows and reading them back."""

import hashlib
import resource
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale_jax.data import files
from megascale_jax.data.files import open_files
from megascale_jax.data.rows import JoinedRows, RowLayout, RowSource, RowWriter, count_rows, in_order, token_dtype
from megascale_jax.errors import DataError

PER_FILE = 7


def write(folder: Path, pieces: list[np.ndarray], sequence_length: int, dtype: np.dtype, per_file: int = PER_FILE) -> tuple[RowLayout, str]:
    digest = hashlib.sha256()
    layout = RowLayout(sum(len(piece) for piece in pieces), sequence_length, dtype, per_file)
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    writer = RowWriter(folder / "rows", "train", layout, digest)
    for piece in pieces:
        writer.add(piece.astype(dtype))
    writer.close()
    assert writer.num_rows == layout.num_rows
    return layout, digest.hexdigest()


def source_of(folder: Path, layout: RowLayout) -> RowSource:
    return RowSource(open_files(folder), "rows", "train", layout)


def rows_of(source: RowSource) -> list[np.ndarray]:
    return source.begin(range(len(source)))()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 40), max_size=6),
    sequence_length=st.integers(1, 17),
    vocab_size=st.sampled_from([257, 65_536, 65_537]),
)
def test_every_token_but_the_first_is_a_target_once_when_rows_are_read_in_order(tmp_path, sizes, sequence_length, vocab_size):
    stream = np.random.default_rng(len(sizes)).integers(0, vocab_size, sum(sizes))
    dtype = token_dtype(vocab_size)
    folder = tmp_path / secrets.token_hex(8)
    layout, _ = write(folder, np.split(stream, np.cumsum(sizes)[:-1]) if sizes else [], sequence_length, dtype)
    assert layout.num_rows == count_rows(len(stream), sequence_length)
    files = sorted((folder / "rows").iterdir())
    assert [file.name for file in files] == [f"train-{number:05}.rows" for number in range(-(-layout.num_rows // PER_FILE))]
    source = source_of(folder, layout)
    read = rows_of(source)
    assert all(np.array_equal(source[index], row) for index, row in enumerate(read))
    assert all(np.array_equal(one, row) for one, row in zip(in_order(source, len(source)), read, strict=True))
    assert all(len(row) == sequence_length + 1 for row in read[:-1])
    assert all(1 < len(row) <= sequence_length + 1 for row in read[-1:])
    targets = np.concatenate([row[1:] for row in read]) if read else np.empty(0)
    inputs = np.concatenate([row[:-1] for row in read]) if read else np.empty(0)
    assert np.array_equal(targets, stream[1:])
    assert np.array_equal(inputs, stream[:-1])


@given(chosen=st.lists(st.integers(0, 59), max_size=30), first=st.integers(0, 59))
def test_rows_come_in_the_order_that_they_are_asked_for(two_sources, chosen, first):
    parts, joined = two_sources
    alone = [row for part in parts for row in rows_of(part)]
    wanted = [*chosen, *range(first, 60)]
    for row, index in zip(joined.begin(wanted)(), wanted, strict=True):
        assert np.array_equal(row, alone[index])


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory):
    """Rows of 40 and of 20, and both as one."""
    parts = []
    for number, rows in enumerate((40, 20)):
        folder = tmp_path_factory.mktemp("rows")
        layout, _ = write(folder, [1000 * number + np.arange(8 * rows + 1)], 8, token_dtype(9999))
        parts.append(source_of(folder, layout))
    return parts, JoinedRows(parts)


def test_rows_that_follow_each_other_are_one_request_up_to_the_end_of_a_file():
    layout = RowLayout(8 * 40 + 1, 8, token_dtype(257), 10)
    assert list(layout.runs([3, 4, 5, 5, 9, 10, 11, 30, 2])) == [(3, 3), (5, 1), (9, 1), (10, 2), (30, 1), (2, 1)]
    assert list(layout.runs([])) == []


def test_digest_depends_on_the_tokens_and_not_on_the_pieces(tmp_path):
    stream = np.arange(100)
    _, whole = write(tmp_path / "a", [stream], 8, token_dtype(257))
    _, pieces = write(tmp_path / "b", [stream[:1], stream[1:50], stream[50:]], 8, token_dtype(257))
    stream[40] += 1
    _, changed = write(tmp_path / "c", [stream], 8, token_dtype(257))
    assert whole == pieces != changed


def test_token_type_is_the_smallest_that_holds_the_last_id():
    assert [token_dtype(size).str for size in (257, 65_536, 65_537)] == ["<u2", "<u2", "<u4"]


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "longer"])
def test_file_is_refused_at_opening_when_its_rows_are_not_all_there(tmp_path, damage):
    layout, _ = write(tmp_path, [np.arange(200)], 8, token_dtype(257))
    path = tmp_path / "rows" / "train-00001.rows"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": content[:-1], "longer": content + b"x"}[damage])
    with pytest.raises(DataError, match=r"train-00001.rows (is missing|has .* bytes, expected)"):
        source_of(tmp_path, layout)


def test_file_that_is_cut_or_gone_later_is_a_data_error(tmp_path):
    layout, _ = write(tmp_path, [np.arange(200)], 8, token_dtype(257))
    source = source_of(tmp_path, layout)
    (tmp_path / "rows" / "train-00000.rows").unlink()
    path = tmp_path / "rows" / "train-00001.rows"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train-00000\.rows is missing"):
        source[0]
    assert np.array_equal(source[7], np.arange(56, 65))
    with pytest.raises(DataError, match=r"train-00001\.rows ends before byte"):
        source[13]


def test_flipped_bit_is_refused_when_its_row_is_read_and_no_other(tmp_path):
    stream = np.random.default_rng(0).integers(0, 257, 20_000)
    layout, _ = write(tmp_path, [stream], 128, token_dtype(257), per_file=10**6)
    path = tmp_path / "rows" / "train-00000.rows"
    content = path.read_bytes()
    record = 129 * 2 + 8
    for place in (0, 50 * record + 5, 51 * record - 1, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        source = source_of(tmp_path, layout)
        for index in range(layout.num_rows):
            if index == place // record:
                with pytest.raises(DataError, match=rf"Row {index} of .*train-00000.rows is damaged"):
                    source[index]
            else:
                assert np.array_equal(source[index], stream[index * 128 : index * 128 + 129])


def test_exchanged_files_are_refused(tmp_path):
    layout, _ = write(tmp_path, [np.arange(200)], 8, token_dtype(257))
    first, second, other = (tmp_path / "rows" / f"train-{name}.rows" for name in ("00000", "00001", "other"))
    first.rename(other)
    second.rename(first)
    other.rename(second)
    with pytest.raises(DataError, match=r"Row 7 of .*train-00001\.rows is damaged"):
        source_of(tmp_path, layout)[7]


def test_full_disk_is_an_os_error(tmp_path):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, old[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write(tmp_path, [np.arange(500) % 257], 128, token_dtype(257))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("index", [-1, 25])
def test_row_outside_the_file_is_an_index_error(tmp_path, index):
    layout, _ = write(tmp_path, [np.arange(200)], 8, token_dtype(257))
    source = source_of(tmp_path, layout)
    assert len(source) == 25
    for rows in (source, JoinedRows([source])):
        with pytest.raises(IndexError):
            rows[index]


def test_more_files_than_stay_open_are_read_by_several_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_OPEN_FILES", 2)
    layout, _ = write(tmp_path, [np.arange(4001) % 257], 8, token_dtype(257), per_file=10)
    source = source_of(tmp_path, layout)
    with ThreadPoolExecutor(8) as pool:
        for index, row in enumerate(pool.map(source.__getitem__, [37 * number % 500 for number in range(2000)])):
            assert np.array_equal(row, (37 * index % 500 * 8 + np.arange(9)) % 257)

"""Fixed-length rows of a token stream, in files of records that all have one size.

A stream of T tokens becomes rows of S + 1 tokens with stride S: a row's last token is the next row's first, so each token
but the very first is the target of exactly one position. The last row may be short; it is stored as it is and padded when
it is loaded. A record is the row's tokens, little-endian, and the XXH3-64 of these bytes, seeded by the row's number: a flipped bit,
another row in its place or the wrong file is a ``DataError`` when the row is read.

Where a row lies is arithmetic. So a row of an object store is one request of just its bytes, without an index that would have to be
fetched and kept, and a row on a disk is one ``pread``. Rows that follow each other are asked for together. A split has several files,
because object stores take an object of this size in one request, and tools copy several at once.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from megascale_jax.data.batch import Rows
from megascale_jax.data.files import Files
from megascale_jax.errors import DataError

FILE_BYTES = 1 << 28
"""Size of a file, about."""

_CHECKSUM_BYTES = 8
_REQUEST_BYTES = 1 << 22
"""Rows that follow each other are asked for in pieces of this size at most."""
_ROWS_IN_ORDER = 1024


class Hash(Protocol):
    """The part of a ``hashlib`` object that the writer uses."""

    def update(self, data: bytes, /) -> None:
        """Take in ``data``."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest stored type of a token id: ``uint16`` or ``uint32``, little-endian."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def count_rows(num_tokens: int, sequence_length: int) -> int:
    """Rows that a stream of ``num_tokens`` gives, the short last one included."""
    return -(-max(0, num_tokens - 1) // sequence_length)


@dataclass(frozen=True)
class RowLayout:
    """Where the rows of a stream lie."""

    num_tokens: int
    sequence_length: int
    dtype: np.dtype
    rows_per_file: int

    @staticmethod
    def default_rows_per_file(sequence_length: int, dtype: np.dtype) -> int:
        """Rows of a file of about ``FILE_BYTES``."""
        return max(1, FILE_BYTES // _record_bytes(sequence_length + 1, dtype))

    @cached_property
    def num_rows(self) -> int:
        """Rows of the stream."""
        return count_rows(self.num_tokens, self.sequence_length)

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of a row but the last."""
        return _record_bytes(self.sequence_length + 1, self.dtype)

    @cached_property
    def last_bytes(self) -> int:
        """Bytes of the last row, which may be short."""
        return _record_bytes(self.num_tokens - (self.num_rows - 1) * self.sequence_length, self.dtype)

    def place(self, first: int, count: int) -> tuple[int, int, int]:
        """File, begin and end in bytes of ``count`` rows of one file from row ``first`` on."""
        file, row = divmod(first, self.rows_per_file)
        begin, size = row * self.record_bytes, count * self.record_bytes
        if first + count == self.num_rows:
            size += self.last_bytes - self.record_bytes
        return file, begin, begin + size

    def sizes(self) -> list[int]:
        """Bytes of each file."""
        starts = range(0, self.num_rows, self.rows_per_file)
        return [self.place(start, min(self.rows_per_file, self.num_rows - start))[2] for start in starts]

    def runs(self, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
        """``rows``, in their order, as (first, count) of rows that follow each other in one file, of ``_REQUEST_BYTES`` at most."""
        longest = max(1, _REQUEST_BYTES // self.record_bytes)
        first, count = -1, 0
        for row in rows:
            if row == first + count and 0 < count < longest and row % self.rows_per_file:
                count += 1
                continue
            if count:
                yield first, count
            first, count = row, 1
        if count:
            yield first, count


def file_name(folder: str, split: str, number: int) -> str:
    """Name of file ``number`` of a split, in the folder of the rows."""
    return f"{folder}/{split}-{number:05}.rows"


class RowWriter:
    """Cuts a stream, given piece by piece, into rows in the files ``SPLIT-00000.rows``, ... of a folder."""

    def __init__(self, folder: Path, split: str, layout: RowLayout, digest: Hash):
        """Every token of the stream also goes into ``digest``, in stored form."""
        self._folder, self._split, self._layout, self._digest = folder, split, layout, digest
        self._rest = np.empty(0, layout.dtype)
        self._file = None
        self.num_rows = 0

    def add(self, tokens: np.ndarray) -> None:
        """Append ``tokens`` (1-D, of the layout's dtype) to the stream; full rows are written. Raises ``OSError`` when that fails."""
        self._digest.update(tokens.tobytes())
        stream, length = np.concatenate([self._rest, tokens]), self._layout.sequence_length
        rows = max(0, len(stream) - 1) // length
        for begin in range(0, rows * length, length):
            self._write(stream[begin : begin + length + 1])
        self._rest = stream[rows * length :]

    def close(self) -> None:
        """Write the short last row, if there is one, and flush the file to the disk. Raises ``OSError`` when that fails."""
        if len(self._rest) > 1:
            self._write(self._rest)
        self._rest = self._rest[:0]
        self._close_file()

    def _write(self, row: np.ndarray) -> None:
        if self.num_rows % self._layout.rows_per_file == 0:
            self._close_file()
            name = file_name(self._folder.name, self._split, self.num_rows // self._layout.rows_per_file)
            self._file = (self._folder.parent / name).open("wb")
        assert self._file is not None
        content = row.tobytes()
        self._file.write(content)
        self._file.write(_checksum(content, self.num_rows))
        self.num_rows += 1

    def _close_file(self) -> None:
        if self._file is not None:
            with self._file as file:
                file.flush()
                os.fsync(file.fileno())
            self._file = None


class RowSource:
    """Random access to the rows of one split; safe to read from several threads."""

    def __init__(self, files: Files, folder: str, split: str, layout: RowLayout):
        """``folder``: that of the rows, in ``files``. Raises ``DataError`` when a file is missing or has another size."""
        self._files, self._layout = files, layout
        sizes = layout.sizes()
        self._names = [file_name(folder, split, number) for number in range(len(sizes))]
        files.check(dict(zip(self._names, sizes, strict=True)))

    def __len__(self) -> int:
        return self._layout.num_rows

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of row ``index``. Raises ``DataError`` for a damaged row."""
        return self.begin([index])()[0]

    def begin(self, rows: Sequence[int]) -> Callable[[], list[np.ndarray]]:
        """See `Rows.begin`; the tokens are in the stored dtype."""
        if len(rows) and not 0 <= min(rows) <= max(rows) < len(self):
            raise IndexError(f"rows {min(rows)} to {max(rows)} of {len(self)}")
        firsts, ranges = [], []
        for first, count in self._layout.runs(rows):
            file, begin, end = self._layout.place(first, count)
            firsts.append(first)
            ranges.append((self._names[file], begin, end))
        contents = self._files.begin(ranges)
        return lambda: [row for first, content in zip(firsts, contents(), strict=True) for row in self._rows(first, content)]

    def _rows(self, first: int, content: bytes) -> list[np.ndarray]:
        """The rows of a read from row ``first`` on, their checksums compared."""
        found, step, dtype = [], self._layout.record_bytes, self._layout.dtype
        for row, begin in enumerate(range(0, len(content), step), first):
            record = content[begin : begin + step]
            tokens = record[:-_CHECKSUM_BYTES]
            if record[-_CHECKSUM_BYTES:] != _checksum(tokens, row):
                address = self._files.address(self._names[row // self._layout.rows_per_file])
                raise DataError(
                    f"Row {row} of {address} is damaged (its checksum is wrong). "
                    "Copy the file again, or prepare the data again with --force."
                )
            found.append(np.frombuffer(tokens, dtype))
        return found


class JoinedRows:
    """Rows of several sources as one, counted through in their order."""

    def __init__(self, parts: Sequence[Rows]):
        self._parts = parts
        self._begins = np.array([0, *accumulate(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of row ``index``. Raises ``DataError`` for a damaged row."""
        return self.begin([index])()[0]

    def begin(self, rows: Sequence[int]) -> Callable[[], list[np.ndarray]]:
        """See `Rows.begin`."""
        wanted = np.asarray(rows, np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} of {len(self)}")
        part_of = np.searchsorted(self._begins, wanted, side="right") - 1
        asked = []
        for part in np.unique(part_of):
            places = np.flatnonzero(part_of == part)
            asked.append((places.tolist(), self._parts[part].begin((wanted[places] - self._begins[part]).tolist())))

        def read() -> list[np.ndarray]:
            found = {place: row for places, finish in asked for place, row in zip(places, finish(), strict=True)}
            return [found[place] for place in range(len(wanted))]

        return read


def in_order(rows: Rows, count: int) -> Iterator[np.ndarray]:
    """The first ``count`` rows, read some hundred at a time, one piece ahead. Raises ``DataError`` for a damaged row."""
    pieces = [range(begin, min(begin + _ROWS_IN_ORDER, count)) for begin in range(0, count, _ROWS_IN_ORDER)]
    begun = [rows.begin(piece) for piece in pieces[:1]]
    for after in [*pieces[1:], None]:
        if after is not None:
            begun.append(rows.begin(after))
        if begun:
            yield from begun.pop(0)()


def _record_bytes(tokens: int, dtype: np.dtype) -> int:
    return tokens * dtype.itemsize + _CHECKSUM_BYTES


def _checksum(content: bytes, row: int) -> bytes:
    return xxhash.xxh3_64_digest(content, seed=row)

"""Fixed-length rows of a token stream in ArrayRecord files.

A stream of T tokens becomes rows of S + 1 tokens with stride S: a row's last token is the next row's first, so each token
but the very first is the target of exactly one position. The last row may be short; it is stored as it is and padded when
it is loaded. A record is the row's tokens, little-endian, nothing else.

Reading is by range, never by list of indices: the reader's cost of a list grows with the number of record groups in the
file (0.4 ms a row at 100,000 groups), that of a range does not. A file whose record count or bytes are not as the manifest
says is a ``DataError`` at opening or at the first damaged row.
"""

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from megascale_jax.data.batch import Rows
from megascale_jax.errors import DataError

_GROUP_BYTES = 16 * 1024
"""One disk read fetches a group of rows of about this size; larger groups would read more than a random row needs."""


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


class RowWriter:
    """Cuts a stream, given piece by piece, into rows of one ArrayRecord file."""

    def __init__(self, path: Path, sequence_length: int, dtype: np.dtype, digest: Hash):
        """Every token of the stream also goes into ``digest``, in stored form."""
        row_bytes = (sequence_length + 1) * dtype.itemsize
        self._writer = ArrayRecordWriter(str(path), f"group_size:{max(1, _GROUP_BYTES // row_bytes)},uncompressed")
        self._path = path
        self._sequence_length = sequence_length
        self._digest = digest
        self._rest = np.empty(0, dtype)
        self.num_rows = 0

    def add(self, tokens: np.ndarray) -> None:
        """Append ``tokens`` (1-D, of the writer's dtype) to the stream; full rows are written. Raises ``OSError`` when that fails."""
        self._digest.update(tokens.tobytes())
        stream = np.concatenate([self._rest, tokens])
        rows = max(0, len(stream) - 1) // self._sequence_length
        if rows:
            taken = stream[: rows * self._sequence_length + 1]
            windows = np.lib.stride_tricks.sliding_window_view(taken, self._sequence_length + 1)
            for row in windows[:: self._sequence_length]:
                self._write(row)
        self._rest = stream[rows * self._sequence_length :]

    def close(self) -> None:
        """Write the short last row, if there is one, and flush the file to the disk. Raises ``OSError`` when that fails."""
        if len(self._rest) > 1:
            self._write(self._rest)
        try:
            self._writer.close()
        except RuntimeError as error:
            raise OSError(str(error)) from error
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _write(self, row: np.ndarray) -> None:
        try:
            self._writer.write(row.tobytes())
        except RuntimeError as error:  # the library's word for a full disk, among others
            raise OSError(str(error)) from error
        self.num_rows += 1


class RowSource:
    """Random access to the rows of one file; safe to read from several threads."""

    def __init__(self, path: Path, num_rows: int, dtype: np.dtype):
        """Raises ``DataError`` when the file is missing, damaged, or has another number of rows."""
        self._path = path
        self._dtype = dtype
        if not path.is_file():
            raise DataError(f"{path} is missing. Prepare the data again with --force.")
        try:
            self._reader = ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")
            found = self._reader.num_records()
        except (ValueError, RuntimeError) as error:
            raise DataError(f"{path} cannot be opened ({error}). Prepare the data again with --force.") from error
        if found != num_rows:
            raise DataError(f"{path} has {found} rows, its manifest says {num_rows}: it is damaged. Prepare the data again with --force.")
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of row ``index``: 1-D, at most S + 1, in the stored dtype. Raises ``DataError`` for a damaged row."""
        if not 0 <= index < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        try:
            record = self._reader.read(index, index + 1)[0]
        except (ValueError, RuntimeError, IndexError) as error:
            raise DataError(f"Row {index} of {self._path} is damaged ({error}). Prepare the data again with --force.") from error
        return np.frombuffer(record, self._dtype)


class JoinedRows:
    """Rows of several sources as one, counted through in their order."""

    def __init__(self, parts: Sequence[Rows]):
        self._parts = parts
        self._begins = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of row ``index``. Raises ``DataError`` for a damaged row."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = bisect_right(self._begins, index) - 1
        return self._parts[part][index - self._begins[part]]

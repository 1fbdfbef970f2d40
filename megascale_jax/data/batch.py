"""What a batch is: which rows a process assembles, and how stored rows become arrays.

Row ``(micro * data_size + index) * micro_batch_size + i`` of a global batch is row ``i`` of that micro-batch on that data
index, so the list of rows does not change with the data-parallel size. A batch that does not divide is a ``DataError``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megascale_jax.errors import DataError

Batch = dict[str, np.ndarray]
"""``tokens``, ``targets``, ``segment_ids``, ``positions``: int32 arrays of one shape that ends in S."""

BATCH_KEYS = ("tokens", "targets", "segment_ids", "positions")

NO_TARGET = -1
"""Target of a position that has no loss."""


class Rows(Protocol):
    """Random access to stored rows: 1-D arrays of at most S + 1 tokens."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def begin(self, rows: Sequence[int]) -> Callable[[], list[np.ndarray]]:
        """Ask for rows, all at once; the call waits for them and gives their tokens in this order.

        Raises ``IndexError`` for a row that is not there; the call raises ``DataError`` for a damaged one.
        """
        ...


@dataclass(frozen=True)
class BatchLayout:
    """Which rows of a global batch a process assembles: those of ``data_indices``, in this order.

    Raises ``DataError`` when the batch does not divide or an index is out of range.
    """

    global_batch_size: int
    data_size: int
    data_indices: tuple[int, ...]
    micro_batch_size: int

    def __post_init__(self) -> None:
        unit = self.data_size * self.micro_batch_size
        if unit < 1 or self.global_batch_size < 1 or self.global_batch_size % unit:
            raise DataError(
                f"A global batch of {self.global_batch_size} rows is not divisible by data size x micro-batch size = "
                f"{self.data_size} x {self.micro_batch_size} = {unit}. Give a multiple of {unit}."
            )
        if not self.data_indices or not set(self.data_indices) <= set(range(self.data_size)):
            raise DataError(f"Data indices {list(self.data_indices)} must be some of 0..{self.data_size - 1}.")

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step (m)."""
        return self.global_batch_size // (self.data_size * self.micro_batch_size)

    @property
    def num_rows(self) -> int:
        """Rows of one micro-batch that are assembled here (R)."""
        return len(self.data_indices) * self.micro_batch_size

    def offsets(self) -> np.ndarray:
        """int64 [m, R]: places in the global batch of the assembled rows."""
        whole = np.arange(self.global_batch_size).reshape(self.num_micro_batches, self.data_size, self.micro_batch_size)
        return whole[:, list(self.data_indices)].reshape(self.num_micro_batches, -1)


def decode_row(tokens: np.ndarray, sequence_length: int, end_of_document: int) -> Batch:
    """One stored row (at most S + 1 tokens, 1-D) as arrays [S]; see ``decode_rows``."""
    return {name: array[0] for name, array in decode_rows([tokens], sequence_length, end_of_document).items()}


def decode_rows(stored: Sequence[np.ndarray], sequence_length: int, end_of_document: int) -> Batch:
    """Stored rows as int32 arrays [len(stored), S].

    ``tokens``: the inputs, 0 in padding. ``targets``: the next token; -1 in padding and where the input is
    ``end_of_document``, since the next token belongs to another document. ``segment_ids``: 1, 2, ... per document in the
    row, 0 in padding. ``positions``: from 0 at each segment's start, 0 in padding. A row without tokens is all padding.
    """
    padded = np.zeros((len(stored), sequence_length + 1), np.int32)
    num_inputs = np.zeros((len(stored), 1), np.int32)
    for index, row in enumerate(stored):
        padded[index, : len(row)] = row
        num_inputs[index] = max(0, len(row) - 1)
    place = np.arange(sequence_length, dtype=np.int32)
    is_input = place < num_inputs
    ends = (padded[:, :-1] == end_of_document) & is_input
    begins = np.zeros_like(ends)
    begins[:, 1:] = ends[:, :-1]
    starts = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    return {
        "tokens": np.where(is_input, padded[:, :-1], 0),
        "targets": np.where(is_input & ~ends, padded[:, 1:], NO_TARGET),
        "segment_ids": np.where(is_input, 1 + np.cumsum(begins, axis=1, dtype=np.int32), 0),
        "positions": np.where(is_input, place - starts, 0),
    }


def assemble(source: Rows, ids: np.ndarray, sequence_length: int, end_of_document: int) -> Batch:
    """Rows ``ids`` [m, R] of ``source`` as arrays [m, R, S]; an id past the end is a row of padding."""
    return begin_batch(source, ids, sequence_length, end_of_document)()


def begin_batch(source: Rows, ids: np.ndarray, sequence_length: int, end_of_document: int) -> Callable[[], Batch]:
    """Ask for the rows of `assemble`; the call waits for them."""
    flat = ids.reshape(-1).tolist()
    finish = source.begin([row for row in flat if row < len(source)])

    def batch() -> Batch:
        nothing, rows = np.empty(0, np.int32), iter(finish())
        decoded = decode_rows([next(rows) if row < len(source) else nothing for row in flat], sequence_length, end_of_document)
        return {name: array.reshape(*ids.shape, -1) for name, array in decoded.items()}

    return batch

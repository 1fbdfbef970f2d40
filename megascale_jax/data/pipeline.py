"""Prepared rows as batches for the step: packed, shuffled, sharded by data-parallel index, resumable to the sample.

One endless global order of row ids, a function of the seed alone, is fresh in every epoch; batch k takes the next
``global_batch_size`` ids. Written as an array [micro-batch, data index x row], that list is the global batch, and a
process assembles the columns of the data indices it serves. So all tensor and pipeline ranks of one index see the same
rows, and the list does not change with the data-parallel size: a run may stop on 4 and go on with 2.

The position is one number, samples consumed. Threads read ahead, but only a batch that was handed out counts, so a
restored iterator goes on with exactly the next one. Restoring the state of other data, of another seed, or under a
shuffle that orders rows differently than the one that wrote it is a ``DataError``, never a silent reshuffle.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grain
import numpy as np

from megascale_jax.data.manifest import Manifest, Split, read_manifest, record_file
from megascale_jax.data.rows import RowSource
from megascale_jax.data.tokenizer import Tokenizer, load_tokenizer
from megascale_jax.errors import DataError

Batch = dict[str, np.ndarray]
"""``tokens``, ``targets``, ``segment_ids``, ``positions``: int32 arrays of one shape that ends in S."""

NO_TARGET = -1
"""Target of a position that has no loss."""

UNTOUCHED: Mapping[str, Any] = {"samples": 0}
"""State of a run that has taken no row yet, of whatever data."""

_READ_THREADS = 1
"""Assembling holds the interpreter lock most of the time: a second thread costs CPU time and brings none."""

_BATCHES_AHEAD = 3
_PROBED_IDS = 4
_ENDLESS = 1 << 62


@dataclass(frozen=True)
class Prepared:
    """A complete prepared folder."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer


@dataclass(frozen=True)
class BatchLayout:
    """Which rows of a global batch a process assembles: those of ``data_indices``, in this order.

    Row ``(micro * data_size + index) * micro_batch_size + i`` of the global batch is row ``i`` of that micro-batch on
    that data index. Raises ``DataError`` when the batch does not divide or an index is out of range.
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

    def offsets(self) -> np.ndarray:
        """int64 [m, len(data_indices) * micro_batch_size]: places in the global batch of the assembled rows."""
        whole = np.arange(self.global_batch_size).reshape(self.num_micro_batches, self.data_size, self.micro_batch_size)
        return whole[:, list(self.data_indices)].reshape(self.num_micro_batches, -1)


def open_prepared(folder: Path, *, sequence_length: int | None = None, vocab_size: int | None = None) -> Prepared:
    """Open a prepared folder, for a model of this sequence length and vocabulary if they are given.

    Raises ``DataError`` when the folder is missing, incomplete, of another version, damaged, or does not fit the model.
    """
    manifest = read_manifest(folder)
    if sequence_length is not None and manifest.sequence_length != sequence_length:
        raise DataError(
            f"{folder} has rows of {manifest.sequence_length} tokens, the model expects {sequence_length}. "
            f"Set model.sequence_length={manifest.sequence_length}, or prepare the data with --sequence-length {sequence_length}."
        )
    if vocab_size is not None and manifest.vocab_size > vocab_size:
        raise DataError(
            f"{folder} has {manifest.vocab_size} token ids, the model knows {vocab_size}. Set model.vocab_size={manifest.vocab_size}."
        )
    tokenizer = load_tokenizer(manifest.tokenizer, folder)
    if tokenizer.digest != manifest.tokenizer_digest:
        raise DataError(f"The tokenizer in {folder} is not the one its rows were made with. Prepare the data again with --force.")
    return Prepared(folder, manifest, tokenizer)


def rows(prepared: Prepared, split: Split) -> RowSource:
    """Random access to the stored rows of a split. Raises ``DataError`` when its file is missing or damaged."""
    return RowSource(record_file(prepared.folder, split), prepared.manifest.split(split).rows, np.dtype(prepared.manifest.dtype))


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


class TrainIterator:
    """Endless global batches of the train split, the part of ``data_indices``.

    Each batch is a dict of int32 arrays [m, len(data_indices) * micro_batch_size, S] (``Batch``). Close it, or use it as
    a context manager, to stop the reading threads.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        global_batch_size: int,
        data_size: int,
        data_indices: Sequence[int],
        micro_batch_size: int,
        seed: int,
        shuffle: bool = True,
    ):
        self._prepared = prepared
        self._layout = BatchLayout(global_batch_size, data_size, tuple(data_indices), micro_batch_size)
        self._offsets = self._layout.offsets()
        self._rows = rows(prepared, "train")
        self._seed = seed
        self._shuffle = shuffle
        order = grain.MapDataset.range(len(self._rows)).seed(seed % (1 << 32))
        self._order = (order.shuffle() if shuffle else order).repeat()
        self._samples = 0
        self._batches: grain.DatasetIterator | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next batch. Raises ``DataError`` for a damaged row."""
        if self._batches is None:
            self._batches = self._read_ahead(self._samples)
        batch = next(self._batches)
        self._samples += self._layout.global_batch_size
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead; the position stays, and the next ``next`` starts again from it."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def sample_ids(self, step: int) -> np.ndarray:
        """int64 [global_batch_size]: train row ids of global batch ``step``, counted from the start of the order."""
        return self._ids(step * self._layout.global_batch_size + np.arange(self._layout.global_batch_size))

    def state(self) -> dict[str, Any]:
        """The position after the last batch handed out, as a small JSON value; the same for every process."""
        return {
            "samples": self._samples,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "digest": self._prepared.manifest.digest,
            "next_ids": self._ids(self._samples + np.arange(_PROBED_IDS)).tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch that ``state`` was taken at; batch and data-parallel sizes may have changed.

        Raises ``DataError`` when the state is of other data, of another seed or order, or is none. The iterator is then unchanged.
        """
        if dict(state) == UNTOUCHED:
            self.close()
            self._samples = 0
            return
        own = self.state()
        if set(state) != set(own):
            raise DataError(f"A data state has the keys {sorted(own)}, this one has {sorted(state)}: it is of another version.")
        causes = {"digest": "other prepared data", "seed": "another train.seed", "shuffle": "another train.data.shuffle"}
        for key, cause in causes.items():
            if state[key] != own[key]:
                raise DataError(
                    f"The checkpoint was trained on {cause} ({key} {state[key]}, now {own[key]}). "
                    "Resume with the same one, or start a new run."
                )
        samples = state["samples"]
        if not isinstance(samples, int) or samples < 0:
            raise DataError(f"A data state counts samples from 0, this one has {samples!r}: it is damaged.")
        if self._ids(samples + np.arange(_PROBED_IDS)).tolist() != list(state["next_ids"]):
            raise DataError(
                "The installed grain shuffles in another order than the one this checkpoint was trained with. Install that version."
            )
        self.close()
        self._samples = samples

    def _ids(self, samples: np.ndarray) -> np.ndarray:
        return np.array([self._order[int(sample)] for sample in samples.reshape(-1)], np.int64).reshape(samples.shape)

    def _read_ahead(self, start: int) -> grain.DatasetIterator:
        """Local batches from sample ``start`` on, assembled by threads in order."""

        def assemble(step: int) -> Batch:
            ids = self._ids(start + step * self._layout.global_batch_size + self._offsets)
            return _assemble(self._prepared, self._rows, ids)

        options = grain.ReadOptions(num_threads=_READ_THREADS, prefetch_buffer_size=_BATCHES_AHEAD)
        return iter(grain.MapDataset.range(_ENDLESS).map(assemble).to_iter_dataset(options))


def held_out_batches(
    prepared: Prepared,
    *,
    global_batch_size: int,
    data_size: int,
    data_indices: Sequence[int],
    micro_batch_size: int,
    batches: int | None = None,
) -> Iterator[Batch]:
    """The held-out split in order, in batches of the train shapes: all of it, or the first ``batches`` global batches.

    Every process gets the same number of batches; the last one is filled up with rows of padding (no target, segment 0).
    Raises ``DataError`` at once for a bad layout or a damaged file.
    """
    offsets = BatchLayout(global_batch_size, data_size, tuple(data_indices), micro_batch_size).offsets()
    source = rows(prepared, "held_out")
    total = -(-len(source) // global_batch_size)
    steps: Iterable[int] = range(total if batches is None else min(batches, total))
    return (_assemble(prepared, source, step * global_batch_size + offsets) for step in steps)


def _assemble(prepared: Prepared, source: RowSource, ids: np.ndarray) -> Batch:
    """Rows ``ids`` [m, R] as arrays [m, R, S]; an id past the end is a row of padding."""
    nothing = np.empty(0, np.int32)
    stored = [source[int(i)] if i < len(source) else nothing for i in ids.reshape(-1)]
    decoded = decode_rows(stored, prepared.manifest.sequence_length, prepared.manifest.end_of_document)
    return {name: array.reshape(*ids.shape, -1) for name, array in decoded.items()}

"""Prepared rows as batches for the step: packed, shuffled, sharded by data-parallel index, resumable to the sample.

One endless global order of row ids, a function of the seed alone, is fresh in every epoch; batch k takes the next
``global_batch_size`` ids. Written as an array [micro-batch, data index x row], that list is the global batch, and a
process assembles the columns of the data indices it serves. So all tensor and pipeline ranks of one index see the same
rows, and the list does not change with the data-parallel size: a run may stop on 4 and go on with 2.

The position is one number, samples consumed. Threads read ahead, but only a batch that was handed out counts, so a
restored iterator goes on with exactly the next one. Samples that are left out (``skip``) count as consumed once the next one is
handed out, so a position means the same whatever is skipped before or after it, and that may change at every start. Restoring the
state of other data, of another seed, or under a shuffle that orders rows differently than the one that wrote it is a ``DataError``,
never a silent reshuffle.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import grain
import numpy as np

from megascale_jax.data.batch import Batch, BatchLayout, assemble
from megascale_jax.data.mixture import TrainingData, as_training_data
from megascale_jax.data.order import SkippingOrder, past_phases
from megascale_jax.data.prepared import Prepared
from megascale_jax.errors import DataError

UNTOUCHED: Mapping[str, Any] = {"samples": 0}
"""State of a run that has taken no row yet, of whatever data."""

_READ_THREADS = 1
"""Assembling holds the interpreter lock most of the time: a second thread costs CPU time and brings none, unless it waits for a network."""

_BATCHES_AHEAD = 3
_PROBED_IDS = 4
_ENDLESS = 1 << 62
_CAUSES = {
    "digest": "other prepared data",
    "seed": "another train.seed",
    "shuffle": "another train.data.shuffle",
    "mixture": "other weights before this step, as [from sample, weight] of each source; only those of later steps may change",
}
"""What it means when a key of the state differs."""


class BatchIterator(ABC):
    """Endless global batches of the train split, the part of ``data_indices``, from a position that can be saved.

    Each batch is a dict of int32 arrays [m, len(data_indices) * micro_batch_size, S] (``Batch``). Close it, or use it as
    a context manager, to stop what reads ahead.
    """

    def __init__(
        self,
        data: TrainingData | Prepared,
        *,
        global_batch_size: int,
        data_size: int,
        data_indices: Sequence[int],
        micro_batch_size: int,
        seed: int,
        shuffle: bool = True,
        skip: Iterable[tuple[int, int]] = (),
    ):
        self._data = as_training_data(data)
        self._layout = BatchLayout(global_batch_size, data_size, tuple(data_indices), micro_batch_size)
        self._seed = seed
        self._shuffle = shuffle
        self._order = self._data.train_order(seed, shuffle)
        self._skip = tuple(skip)
        self._kept = SkippingOrder(self._order, self._skip)
        self._samples = 0
        """Kept ones before the next batch."""
        self._position = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next batch. Raises ``DataError`` for a damaged row."""
        batch = self._next()
        self._samples += self._layout.global_batch_size
        self._position = int(self._kept.samples(np.array([self._samples - 1]))[0]) + 1
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _next(self) -> Batch:
        """The batch at ``self._samples``, which is that of the last call and one batch, unless closed since."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading ahead; the position stays, and the next ``next`` starts again from it."""

    @property
    def position(self) -> int:
        """Samples of the whole order that are consumed, those that were left out among them."""
        return self._position

    def sample_ids(self, step: int) -> np.ndarray:
        """int64 [global_batch_size]: train row ids of global batch ``step``, counted from the start of the order."""
        return self._kept.ids(step * self._layout.global_batch_size + np.arange(self._layout.global_batch_size))

    def state(self) -> dict[str, Any]:
        """The position after the last batch handed out, as a small JSON value; the same for every process."""
        return self._state_at(self._position)

    def _state_at(self, samples: int) -> dict[str, Any]:
        """Nothing here depends on what a change of weights does from ``samples`` on: that may be changed before it comes."""
        next_ids = self._order.before(samples).ids(samples + np.arange(_PROBED_IDS)).tolist()
        state = {"samples": samples, "seed": self._seed, "shuffle": self._shuffle, "digest": self._data.digest, "next_ids": next_ids}
        if self._data.phases is not None:
            past = past_phases(self._data.phases, samples)
            state["mixture"] = {name: [[p.begin, p.weights[index]] for p in past] for index, name in enumerate(self._data.sources)}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch that ``state`` was taken at; batch and data-parallel sizes may have changed.

        Raises ``DataError`` when the state is of other data, of another seed or order, or is none. The iterator is then unchanged.
        """
        if dict(state) == UNTOUCHED:
            self._go_to(0)
            return
        samples = state.get("samples")
        if not isinstance(samples, int) or samples < 0:
            raise DataError(f"A data state counts samples from 0, this one has {samples!r}: it is damaged.")
        own = self._state_at(samples)
        if ("mixture" in state) != ("mixture" in own):
            before, now = ("a mixture", "a single source") if "mixture" in state else ("a single source", "a mixture")
            raise DataError(f"The checkpoint was trained on {before}, this run has {now}. Resume with the same data, or start a new run.")
        if set(state) != set(own):
            raise DataError(f"A data state has the keys {sorted(own)}, this one has {sorted(state)}: it is of another version.")
        for key, cause in _CAUSES.items():
            if state.get(key) != own.get(key):
                raise DataError(
                    f"The checkpoint was trained on {cause} ({key} {state[key]}, now {own[key]}). "
                    "Resume with the same one, or start a new run."
                )
        if own["next_ids"] != list(state["next_ids"]):
            raise DataError(
                "The installed grain shuffles in another order than the one this checkpoint was trained with. Install that version."
            )
        self._go_to(samples)

    def _go_to(self, position: int) -> None:
        self.close()
        self._samples, self._position = self._kept.num_kept(position), position

    def _request(self) -> dict[str, Any]:
        """What decides the global batches, as a JSON value."""
        return {
            **self._data.request(),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "skip": self._skip,
            "global_batch_size": self._layout.global_batch_size,
            "data_size": self._layout.data_size,
            "micro_batch_size": self._layout.micro_batch_size,
        }


class TrainIterator(BatchIterator):
    """Batches assembled by a thread of this process. Of the processes of a host, each reads its own rows."""

    def __init__(self, data: TrainingData | Prepared, **layout: Any):
        """``layout`` is that of ``BatchIterator``."""
        super().__init__(data, **layout)
        self._rows = self._data.rows("train")
        self._offsets = self._layout.offsets()
        self._batches: grain.DatasetIterator | None = None

    def _next(self) -> Batch:
        if self._batches is None:
            self._batches = self._read_ahead(self._samples)
        return next(self._batches)

    def close(self) -> None:
        """Stop reading ahead; the position stays, and the next ``next`` starts again from it."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _read_ahead(self, start: int) -> grain.DatasetIterator:
        """Local batches from sample ``start`` on, assembled by threads in order."""

        def assemble_step(step: int) -> Batch:
            ids = self._kept.ids(start + step * self._layout.global_batch_size + self._offsets)
            return assemble(self._rows, ids, self._data.sequence_length, self._data.end_of_document)

        threads = _BATCHES_AHEAD if self._data.is_remote else _READ_THREADS
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=_BATCHES_AHEAD)
        return iter(grain.MapDataset.range(_ENDLESS).map(assemble_step).to_iter_dataset(options))


def held_out_batches(
    data: TrainingData | Prepared,
    *,
    global_batch_size: int,
    data_size: int,
    data_indices: Sequence[int],
    micro_batch_size: int,
    batches: int | None = None,
) -> Iterator[Batch]:
    """The held-out split in order, in batches of the train shapes: all of it, or the first ``batches`` global batches.

    Of a mixture, all its held-out rows, whatever the weights. Every process gets the same number of batches; the last one is
    filled up with rows of padding (no target, segment 0). Raises ``DataError`` at once for a bad layout or a damaged file.
    """
    offsets = BatchLayout(global_batch_size, data_size, tuple(data_indices), micro_batch_size).offsets()
    data = as_training_data(data)
    source, order = data.rows("held_out"), data.held_out_order()
    total = -(-len(source) // global_batch_size)
    padded = np.append(order, np.full(total * global_batch_size - len(order), len(order)))
    steps: Iterable[int] = range(total if batches is None else min(batches, total))
    return (assemble(source, padded[step * global_batch_size + offsets], data.sequence_length, data.end_of_document) for step in steps)

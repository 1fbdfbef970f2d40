"""The endless order of the training rows: which row sample i is, for any i, as a function of the seed alone.

Sample i of a source is row ``shuffle(epoch)(i mod rows)``, fresh in every epoch, computed at once for any i: nothing is
replayed at resume, and nothing depends on the number of hosts or the batch.
"""

from typing import Any, Protocol

import numpy as np


class SampleOrder(Protocol):
    """Maps samples, counted from the start of training, to row ids."""

    def ids(self, samples: np.ndarray) -> np.ndarray:
        """int64 row ids of ``samples`` (any shape)."""
        ...


class RowOrder:
    """One source: every row once an epoch, shuffled by ``seed`` (any whole number from 0) or as stored."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool):
        self._num_rows = num_rows
        self._shuffled: Any = None  # a grain.MapDataset
        if shuffle:
            import grain  # a second of start-up, for which a stored order has no use

            self._shuffled = grain.MapDataset.range(num_rows).seed(seed % (1 << 32)).shuffle().repeat()

    def ids(self, samples: np.ndarray) -> np.ndarray:
        """int64 row ids of ``samples``."""
        if self._shuffled is None:
            return samples.astype(np.int64) % self._num_rows
        return np.array([self._shuffled[int(sample)] for sample in samples.reshape(-1)], np.int64).reshape(samples.shape)

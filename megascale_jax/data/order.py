"""The endless order of the training rows: which row sample i is, for any i, as a function of the seed and the weights alone.

Sample i of one source is row ``shuffle(epoch)(i mod rows)``, fresh in every epoch, computed at once for any i. A mixture
is a list of phases with constant weights. Which source a sample of a phase is from repeats with the smallest period that has
every source exactly by its weight, in an order that keeps every source within one sample of its share at every point
(`fair_period`). So the place of a sample within its source is a division and a table look-up, and a source goes on over changes
of the weights, without a row skipped or repeated. Nothing is replayed at resume, and nothing depends on the number of hosts
or the batch. Ranges of samples may be left out (`SkippingOrder`), as those around a loss spike: the samples after them keep their numbers.
"""

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Phase:
    """From sample ``begin`` on, sources are drawn by these whole-number weights without a common divisor."""

    begin: int
    weights: tuple[int, ...]


class SampleOrder(Protocol):
    """Maps samples, counted from the start of training, to row ids."""

    def ids(self, samples: np.ndarray) -> np.ndarray:
        """int64 row ids of ``samples`` (any shape)."""
        ...

    def before(self, samples: int) -> "SampleOrder":
        """The order that follows from what was known before ``samples``: later changes never happen."""
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

    def before(self, samples: int) -> "RowOrder":
        """This order: nothing changes it."""
        return self


class MixtureOrder:
    """Several sources; row ids count through them in order. ``phases`` begin at 0 and in ascending order."""

    def __init__(self, orders: Sequence[RowOrder], num_rows: Sequence[int], phases: Sequence[Phase]):
        self._orders, self._num_rows, self._phases = orders, num_rows, phases
        self._first_ids = np.cumsum([0, *num_rows])
        self._begins = [phase.begin for phase in phases]
        self._periods = [fair_period(phase.weights) for phase in phases]
        self._ranks = [_ranks(period, len(orders)) for period in self._periods]
        self._drawn = [np.zeros(len(orders), np.int64)]
        """Samples that each source has given before each phase."""
        for index, phase in enumerate(phases[:-1]):
            periods, rest = divmod(phases[index + 1].begin - phase.begin, len(self._periods[index]))
            counts = periods * np.array(phase.weights) + np.bincount(self._periods[index][:rest], minlength=len(orders))
            self._drawn.append(self._drawn[-1] + counts)

    def ids(self, samples: np.ndarray) -> np.ndarray:
        """int64 row ids of ``samples``."""
        sources, places = self.places(samples)
        ids = np.empty(samples.shape, np.int64)
        for source, order in enumerate(self._orders):
            chosen = sources == source
            ids[chosen] = self._first_ids[source] + order.ids(places[chosen])
        return ids

    def places(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source of each sample, and which sample of that source it is."""
        in_phase = np.searchsorted(self._begins, samples, side="right") - 1
        sources, places = np.empty(samples.shape, np.int64), np.empty(samples.shape, np.int64)
        for index in np.unique(in_phase):
            chosen = in_phase == index
            periods, rest = np.divmod(samples[chosen] - self._begins[index], len(self._periods[index]))
            drawn_from = self._periods[index][rest]
            sources[chosen] = drawn_from
            weights = np.array(self._phases[index].weights)
            places[chosen] = self._drawn[index][drawn_from] + periods * weights[drawn_from] + self._ranks[index][rest]
        return sources, places

    def before(self, samples: int) -> "MixtureOrder":
        """The order as it was before ``samples``: phases that begin there or later left out, except for the first."""
        return MixtureOrder(self._orders, self._num_rows, past_phases(self._phases, samples))


class SkippingOrder:
    """An order without some ranges of its samples. What is left is *kept*, and counted anew from 0 in the same order."""

    def __init__(self, order: SampleOrder, ranges: Iterable[tuple[int, int]]):
        """``ranges``: from the first sample left out to the first one after it; in any order, they may overlap."""
        self._order = order
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(pair for pair in ranges if pair[0] < pair[1]):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((begin, end))
        self._begins = np.array([begin for begin, _ in merged], np.int64)
        self._ends = np.array([end for _, end in merged], np.int64)
        self._left_out = np.concatenate([[0], np.cumsum(self._ends - self._begins)]).astype(np.int64)
        """Samples left out before each range, and in all."""

    def samples(self, kept: np.ndarray) -> np.ndarray:
        """Which samples of the whole order the ``kept`` ones are, int64."""
        return kept + self._left_out[np.searchsorted(self._begins - self._left_out[:-1], kept, side="right")]

    def num_kept(self, samples: int) -> int:
        """How many of the first ``samples`` of the whole order are kept."""
        index = int(np.searchsorted(self._begins, samples, side="right"))
        inside = max(0, int(self._ends[index - 1]) - samples) if index else 0
        return samples - int(self._left_out[index]) + inside

    def ids(self, kept: np.ndarray) -> np.ndarray:
        """int64 row ids of ``kept`` samples (any shape)."""
        return self._order.ids(self.samples(kept))


def past_phases(phases: Sequence[Phase], samples: int) -> Sequence[Phase]:
    """Those ``phases`` that some sample before ``samples`` was drawn in, at least the first."""
    return phases[: max(1, bisect_right([phase.begin for phase in phases], samples - 1))]


@lru_cache(maxsize=64)
def fair_period(weights: tuple[int, ...]) -> np.ndarray:
    """int64 [sum of weights], read-only: which source each sample of a period is from; source j occurs ``weights[j]`` times.

    After any n samples, of this period or of several, source j has given fewer than one more or less than its share
    n w_j / sum(w). Each occurrence has the window of places in which it keeps that bound; the one whose window ends first
    goes first, which fits all in (Steiner and Yeomans, 1993). Equal ends: the source that is listed first.
    """
    total = sum(weights)
    waiting = [(0, -(-total // weight), source, 0) for source, weight in enumerate(weights) if weight]  # begin, end, source, number
    heapq.heapify(waiting)
    open_windows: list[tuple[int, int, int]] = []
    period = np.empty(total, np.int64)
    for place in range(total):
        while waiting and waiting[0][0] <= place:
            _, end, source, number = heapq.heappop(waiting)
            heapq.heappush(open_windows, (end, source, number))
        _, source, number = heapq.heappop(open_windows)
        period[place] = source
        if (following := number + 1) < (weight := weights[source]):
            heapq.heappush(waiting, (following * total // weight, -(-(following + 1) * total // weight), source, following))
    period.flags.writeable = False
    return period


def _ranks(period: np.ndarray, num_sources: int) -> np.ndarray:
    """How often the source of each place occurs before it in the period."""
    ranks = np.empty(len(period), np.int64)
    for source in range(num_sources):
        chosen = period == source
        ranks[chosen] = np.arange(chosen.sum())
    return ranks

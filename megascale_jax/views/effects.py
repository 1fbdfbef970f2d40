"""What made passes of one kind take different times: the worker, the stage, or the sequences of the micro-batch.

The model is a product. A pass of type ``o`` on worker ``w`` of stage ``p`` in chunk ``c``, of micro-batch ``i``, takes

    typical[o, p, c] * own[o, w] * sequence[o, p, i] * noise

``typical``: the (lower) median over the stage's workers of their medians, so that one slow worker does not move it. ``own``: the
median of a worker's passes over ``typical``, divided by the lower median of the same over the stages at its place in ``data`` and
``tensor``: what is slow on every stage is data, not a worker. ``sequence``: what the types and stages agree on, of one micro-batch
against the others of its step, each with its own slope, since longer sequences lengthen some stages more than others.

Failure case: few or noisy passes. A worker stands out only where it has `FEWEST_PASSES`, and its excess is `SIGMAS` standard errors and
`LEAST_EXCESS`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megascale_jax.views.operations import CODES, MODEL_WORK, Operations

LEAST_EXCESS = 0.05
"""Excess of a worker over its peers, or of a stage over the mean, below which nothing is said of it."""

SIGMAS = 5.0
"""Standard errors of an excess that must stand out from noise; thousands of workers are compared at once."""

AGREEMENT = 0.8
"""Least mean correlation, over stages, of the times of micro-batches that is taken for uneven sequences."""

VARIATION = 0.05
"""Least relative standard deviation of micro-batches that is taken for uneven sequences."""

FEWEST_PASSES = 16
"""Passes of a type that a worker must have in the window to be compared: of fewer, noise cannot be told."""

_FEWEST_MICROBATCHES = 8
_MEDIAN_ERROR = 1.2533 * 2**0.5
"""Standard error of the quotient of two medians of n samples, over ``sigma / sqrt(n)``."""
_MAD = 1.4826


@dataclass(frozen=True)
class SlowWorker:
    """A worker (its number, `Operations.worker`, and its rank) that takes ``excess`` longer (0.15: 15 %) than peers for a type of pass."""

    worker: int
    rank: int
    optype: str
    excess: float


@dataclass(frozen=True)
class Sequences:
    """How well stages agree on which micro-batches are long, in [-1, 1], and how much these vary (relative standard deviation)."""

    agreement: float
    variation: float

    @property
    def uneven(self) -> bool:
        """Whether that is what uneven sequences look like."""
        return self.agreement >= AGREEMENT and self.variation >= VARIATION


@dataclass(frozen=True)
class Effects:
    """What was found, and by what each operation was longer for it: factors float64[n], 1 where a cause does not reach.

    ``stage_work``: {optype: float64[pipe]}, work of a stage over the mean of all stages; ``stage_excess``: float64[pipe], the
    same of all passes together, less 1, and 0 where it does not stand out.
    """

    sequences: Sequences
    sequence_factor: np.ndarray
    stage_work: dict[str, np.ndarray]
    stage_excess: np.ndarray
    stage_factor: np.ndarray
    slow_workers: tuple[SlowWorker, ...]


def find_effects(operations: Operations, durations: np.ndarray) -> Effects:
    """The effects in durations (seconds, float64[n], without waiting) of a table's operations."""
    kinds = _Kinds(operations)
    sequences, factor = _sequences(kinds, kinds.noise(durations))
    factor = factor if sequences.uneven else np.ones_like(durations)
    even = durations / factor
    stage_work, stage_excess, stage_factor = _stages(kinds, even)
    return Effects(sequences, factor, stage_work, stage_excess, stage_factor, tuple(_slow_workers(kinds, even)))


class _Kinds:
    """The passes of a table by type."""

    def __init__(self, table: Operations) -> None:
        self.table, self.worker, self.mesh = table, table.worker, table.layout.mesh
        rows = {name: np.flatnonzero(table.optype == CODES[name]) for name in MODEL_WORK}
        self.rows = {name: found for name, found in rows.items() if found.size}

    def microbatches(self) -> tuple[np.ndarray, np.ndarray]:
        """Micro-batches of all steps and data ranks: the step's place of each, and for each row which one it is of."""
        table = self.table
        of_step = np.unique(table.step, return_inverse=True)[1] * self.mesh.data + table.data
        key = of_step * (table.microbatch.max() + 2) + table.microbatch + 1
        _, first, cells = np.unique(key, return_index=True, return_inverse=True)
        return np.unique(table.step[first], return_inverse=True)[1], cells

    def over_typical(self, durations: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Passes of one type over what is typical of their stage and chunk, and that, both float64[rows]."""
        chunks, chunk = self.table.layout.chunks, self.table.chunk[rows]
        keys, medians, _ = lower_medians(self.worker[rows] * chunks + chunk, durations[rows])
        pipe = keys // chunks // (self.mesh.data * self.mesh.tensor)
        cells, typical, _ = lower_medians(pipe * chunks + keys % chunks, medians)
        typical = typical[np.searchsorted(cells, self.table.pipe[rows] * chunks + chunk)]
        return np.divide(durations[rows], typical, out=np.ones(rows.size), where=typical > 0), typical

    def own(self, relative: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Workers that have passes of a type, what each takes over its peers, and for each row the place of its worker among them."""
        workers, medians, place = lower_medians(self.worker[rows], relative)
        if self.mesh.pipe > 1:
            column = workers % (self.mesh.data * self.mesh.tensor)
            columns, common, _ = lower_medians(column, medians)
            medians = medians / common[np.searchsorted(columns, column)]
        return workers, medians, place

    def noise(self, durations: np.ndarray) -> np.ndarray:
        """All passes over what is typical of stage, chunk and worker, float64[n]; other rows are 1."""
        left = np.ones_like(durations)
        for rows in self.rows.values():
            relative, _ = self.over_typical(durations, rows)
            _, own, place = self.own(relative, rows)
            left[rows] = relative / own[place]
        return left


def _sequences(kinds: _Kinds, left: np.ndarray) -> tuple[Sequences, np.ndarray]:
    """Whether stages agree on the micro-batches, and the factor of each pass if they do."""
    factor = np.ones_like(left)
    columns = [(pipe, rows[kinds.table.pipe[rows] == pipe]) for rows in kinds.rows.values() for pipe in range(kinds.mesh.pipe)]
    columns = [(pipe, rows) for pipe, rows in columns if rows.size]
    if len(columns) < 2:
        return Sequences(0.0, 0.0), factor
    steps, cells = kinds.microbatches()
    matrix = np.array([_by_cell(steps, cells[rows], left[rows]) for _, rows in columns])
    known = ~np.isnan(matrix).any(axis=0)
    seen = matrix[:, known]
    if seen.shape[1] < _FEWEST_MICROBATCHES or (seen.std(axis=1) == 0).any():
        return Sequences(0.0, 0.0), factor
    common = np.where(known, matrix.mean(axis=0), 0.0)
    for (_, rows), row in zip(columns, seen, strict=True):
        slope = float(row @ common[known]) / float(common @ common)
        factor[rows] = np.maximum(1 + slope * common[cells[rows]], LEAST_EXCESS)
    return Sequences(_agreement(seen, [pipe for pipe, _ in columns]), float(seen.std(axis=1).mean())), factor


def _by_cell(steps: np.ndarray, cells: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Mean of each micro-batch over the mean of its step, less 1, float64[cells]; NaN for those that are not there."""
    counts = np.bincount(cells, minlength=steps.size)
    mean = np.bincount(cells, left, minlength=steps.size) / np.where(counts, counts, np.nan)
    there, count = counts > 0, int(steps.max()) + 1
    sums, of_step = np.bincount(steps[there], mean[there], minlength=count), np.bincount(steps[there], minlength=count)
    return mean / (sums / np.maximum(of_step, 1))[steps] - 1


def _agreement(columns: np.ndarray, pipes: list[int]) -> float:
    """Mean correlation of columns of different stages; of all where there is one stage."""
    if len(columns) < 2:
        return 0.0
    matrix, place = np.corrcoef(columns), np.array(pipes)
    differ = place[:, None] != place[None, :]
    return float(matrix[differ if differ.any() else ~np.eye(len(pipes), dtype=bool)].mean())


def _stages(kinds: _Kinds, durations: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Work of the stages by type, their excess, and the factor of each pass."""
    pipes, factor = kinds.mesh.pipe, np.ones_like(durations)
    work, total, variance = {}, np.zeros(pipes), np.zeros(pipes)
    for name, rows in kinds.rows.items():
        relative, typical = kinds.over_typical(durations, rows)
        pipe = kinds.table.pipe[rows]
        count = np.maximum(np.bincount(pipe, minlength=pipes), 1)
        mean = np.bincount(pipe, typical, minlength=pipes) / count
        if not mean.sum():
            continue
        work[name] = mean / mean.mean()
        factor[rows] = np.where(work[name][pipe] > 0, work[name][pipe], 1.0)
        sigma = _MAD * float(np.median(np.abs(relative - 1)))
        total += mean
        variance += (mean * _MEDIAN_ERROR * sigma) ** 2 / count
    if not total.sum():
        return work, np.zeros(pipes), factor
    excess = total / total.mean() - 1
    least = np.maximum(LEAST_EXCESS, SIGMAS * np.sqrt(variance) / total.mean())
    return work, np.where(excess >= least, excess, 0.0), factor


def _slow_workers(kinds: _Kinds, durations: np.ndarray) -> Iterator[SlowWorker]:
    for name, rows in kinds.rows.items():
        relative, _ = kinds.over_typical(durations, rows)
        workers, own, place = kinds.own(relative, rows)
        _, spread, _ = lower_medians(place, np.abs(relative / own[place] - 1))
        counts = np.bincount(place)
        within = _MEDIAN_ERROR * _MAD * float(np.median(spread)) / np.sqrt(counts)
        between = _MAD * float(lower_medians(np.zeros(own.size, np.int64), np.abs(own - 1))[1][0])
        least = 1 + np.maximum(LEAST_EXCESS, SIGMAS * np.maximum(within, between))
        for found in np.flatnonzero((own >= least) & (counts >= FEWEST_PASSES)):
            rank = int(kinds.table.rank[rows[(place == found).argmax()]])
            yield SlowWorker(int(workers[found]), rank, name, float(own[found]) - 1)


def lower_medians(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct keys, the lower median of each one's values (of two the lesser), and for each value the place of its key."""
    found, place, counts = np.unique(keys, return_inverse=True, return_counts=True)
    order = np.lexsort((values, place))
    first = np.cumsum(counts) - counts
    return found, values[order[first + (counts - 1) // 2]], place

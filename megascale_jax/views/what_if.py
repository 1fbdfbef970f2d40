"""What would the step take if this rank, stage or operation type were normal? The graph, replayed with other durations.

Every operation has its *real* duration (`transfer_durations`: without waiting for peers) and its *ideal* one, which is the same for
all operations of a type: the mean for computation, so that all the work is still done, evenly; the median for
communication, which now and then takes very long. Sums are over the steps of the window:

    T        replayed with real durations
    T_ideal  replayed with ideal durations
    slowdown                = T / T_ideal
    slowdown of a part X    = T(real in X, ideal elsewhere) / T_ideal        what X alone would cost
    explained by a part X   = (T - T(ideal in X, real elsewhere)) / (T - T_ideal)   what making X normal would win back
    gaps                    = T_recorded / T             launch delays and data loading, which no replay has

Parts overlap, so what they explain need not add up to 1; `causes` has shares that do. The method is that of Lin et al., "Understanding
Stragglers in Large Model Training Using What-if Analysis", OSDI '25.

Failure case: with thousands of workers two replays for each would take hours; beyond `EXACT_WORKERS` the slowdown of a worker is
the lesser of that of its stage and that of its place in ``data`` and ``tensor``, as in the paper, and nothing is said of what it explains.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from megascale_jax.errors import TraceError
from megascale_jax.views.dependencies import build_graph, transfer_durations
from megascale_jax.views.operations import COMPUTE, OPTYPES, Operations
from megascale_jax.views.replay import Replay

EXACT_WORKERS = 512
"""Workers up to which each is replayed by itself."""

MEASURABLE = 1e-3
"""Slowdowns below this fraction are nothing to explain: shares of them would be noise."""


@dataclass(frozen=True)
class Part:
    """A stage, a worker or an operation type: its slowdown alone, and the share of all slowdown that it explains (None: not known)."""

    slowdown: float
    explained: float | None


@dataclass(frozen=True)
class Worker(Part):
    """A worker, by the number of its first device and its place."""

    rank: int
    pipe: int
    data: int
    tensor: int


class WhatIf:
    """The replays of one window of steps. Raises TraceError where the table's operations do not fit together."""

    def __init__(self, operations: Operations) -> None:
        self._replay = Replay(build_graph(operations))
        self._set(transfer_durations(self._replay.graph))

    def _set(self, real: np.ndarray) -> None:
        self.operations, self.steps = self._replay.graph.operations, self._replay.steps
        self.real, self.ideal = real, ideal_durations(self.operations, real)

    def with_durations(self, real: np.ndarray) -> Self:
        """The same graph with other real durations, float64[n] in the order of `operations`."""
        other = object.__new__(type(self))
        other._replay = self._replay
        other._set(real)
        return other

    def step_times(self, durations: np.ndarray) -> np.ndarray:
        """Seconds of every step with these durations, float64[steps]."""
        return self._replay.times(durations)

    def total(self, durations: np.ndarray) -> float:
        """Seconds of all steps together."""
        return float(self.step_times(durations).sum())

    @cached_property
    def real_s(self) -> np.ndarray:
        """Seconds of every step with real durations, float64[steps]."""
        return self.step_times(self.real)

    @cached_property
    def ideal_s(self) -> np.ndarray:
        """Seconds of every step with ideal durations, float64[steps]. Raises TraceError if a step takes no time at all."""
        times = self.step_times(self.ideal)
        if not times.all():
            raise TraceError(f"step {self.steps[times == 0][0]}: all operations take no time; expected durations in seconds")
        return times

    @cached_property
    def recorded_s(self) -> np.ndarray:
        """Seconds of every step from its first start to its last end, as recorded, float64[steps]."""
        table = self.operations
        first = np.searchsorted(table.step, self.steps)
        return np.maximum.reduceat(table.end_s, first) - np.minimum.reduceat(table.start_s, first)

    @property
    def slowdown(self) -> float:
        """``T / T_ideal``."""
        return float(self.real_s.sum() / self.ideal_s.sum())

    @property
    def gaps(self) -> float:
        """``T_recorded / T``."""
        return float(self.recorded_s.sum() / self.real_s.sum())

    def alone(self, part: np.ndarray) -> float:
        """Slowdown of a part (rows of `operations`, bool[n]): it is real, all else ideal."""
        return self.total(np.where(part, self.real, self.ideal)) / float(self.ideal_s.sum())

    def explained(self, part: np.ndarray) -> float:
        """Share of the slowdown that making a part normal would win back; 0 where there is next to none."""
        lost = float(self.real_s.sum() - self.ideal_s.sum())
        if lost < MEASURABLE * self.ideal_s.sum():
            return 0.0
        return float((self.real_s.sum() - self.total(np.where(part, self.ideal, self.real))) / lost)

    def part(self, rows: np.ndarray) -> Part:
        """Both numbers of a part."""
        return Part(self.alone(rows), self.explained(rows))

    @cached_property
    def stages(self) -> dict[int, Part]:
        """By place in ``pipe``."""
        return {pipe: self.part(self.operations.pipe == pipe) for pipe in range(self.operations.layout.mesh.pipe)}

    @cached_property
    def optypes(self) -> dict[str, Part]:
        """By operation type, those that the trace has."""
        return {OPTYPES[code]: self.part(self.operations.optype == code) for code in np.unique(self.operations.optype)}

    @cached_property
    def workers(self) -> list[Worker]:
        """All workers that the trace has, the slowest first."""
        table = self.operations
        places, first = np.unique(table.worker, return_index=True)
        exact = places.size <= EXACT_WORKERS
        replicas = {} if exact else self._replicas()
        found = []
        for place, row in zip(places, first, strict=True):
            pipe, data, tensor = table.layout.mesh.coordinates(int(place))
            part = self.part(table.worker == place) if exact else Part(min(self.stages[pipe].slowdown, replicas[data, tensor]), None)
            found.append(Worker(part.slowdown, part.explained, int(table.rank[row]), pipe, data, tensor))
        return sorted(found, key=lambda worker: (-worker.slowdown, worker.rank))

    def _replicas(self) -> dict[tuple[int, int], float]:
        """Slowdown alone of the workers at each place in ``data`` and ``tensor``."""
        table, mesh = self.operations, self.operations.layout.mesh
        places = [(data, tensor) for data in range(mesh.data) for tensor in range(mesh.tensor)]
        return {place: self.alone((table.data == place[0]) & (table.tensor == place[1])) for place in places}


def ideal_durations(operations: Operations, real: np.ndarray) -> np.ndarray:
    """The duration that each operation would have were all of its type alike, float64[n]: the mean (computation) or median."""
    ideal = np.empty_like(real)
    for code in np.unique(operations.optype):
        rows = operations.optype == code
        ideal[rows] = np.mean(real[rows]) if OPTYPES[code] in COMPUTE else np.median(real[rows])
    return ideal

"""Why a job is slower than it could be: causes with shares that add up, by one rule.

Causes are taken away one after the other, each from what the former has left, and the graph is replayed; what a cause's
removal wins, over all that is lost (``T - T_ideal``), is its share:

1. ``sequence``: stages agree on which micro-batches are long. Each gets the mean length of its step.
2. ``stage``: a stage has more work than the mean. Work is spread evenly. Whether it is so by design or by accident, no worker of it is at fault.
3. ``worker``: a worker takes longer than its peers of the same stage, whatever the micro-batch. It becomes as fast as they are.
4. ``optype``: operations of one type vary, and none of the above explains it: pauses, a network that flaps. Each takes its ideal time.

Sequences come first because they lengthen the passes of a stage with more work by more, and stages before workers because a
worker is compared with its own stage. A cause is named from `LEAST_LOSS` of the ideal step time on. What is left is in no share: noise.

Failure case: a job without enough passes to tell noise from a cause names fewer causes, not more (`effects`).
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megascale_jax.views.effects import Effects, Sequences, SlowWorker, find_effects
from megascale_jax.views.operations import CODES, MODEL_WORK, OPTYPES
from megascale_jax.views.what_if import MEASURABLE, WhatIf

Kind = Literal["sequence", "stage", "worker", "optype"]

LEAST_LOSS = 0.02
"""Time that a cause must cost, over the ideal step time, to be named."""

IRREGULAR = 0.1
"""Relative standard deviation of an operation type from which its variation is a cause and not noise."""


@dataclass(frozen=True)
class Cause:
    """A cause: what it is in words, its share of the slowdown, and where it sits (`None`: everywhere).

    ``loss``: seconds a step over the ideal step time. ``excess``: by operation type, how much longer than normal (0.15: 15 %).
    """

    kind: Kind
    name: str
    share: float
    loss: float
    pipe: int | None = None
    data: int | None = None
    ranks: tuple[int, ...] = ()
    excess: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """Causes, the largest share first, the share that none has, and the measures that the rule looked at."""

    causes: tuple[Cause, ...]
    unexplained: float
    sequences: Sequences
    stage_work: dict[str, list[float]]
    slow_workers: tuple[SlowWorker, ...]


def find_causes(what_if: WhatIf) -> Findings:
    """The causes of a window's slowdown."""
    effects = find_effects(what_if.operations, what_if.real)
    removal = _Removal(what_if, effects)
    removal.run()
    causes = sorted(removal.causes, key=lambda cause: -cause.share)
    work = {name: values.tolist() for name, values in effects.stage_work.items()}
    unexplained = 1 - sum(cause.share for cause in causes) if removal.lost else 0.0
    return Findings(tuple(causes), unexplained, effects.sequences, work, effects.slow_workers)


class _Removal:
    """Takes causes away, one after the other."""

    def __init__(self, what_if: WhatIf, effects: Effects) -> None:
        self._what_if, self._effects = what_if, effects
        self._table = what_if.operations
        self._ideal_s = float(what_if.ideal_s.sum())
        self._left, self._left_s = what_if.real, float(what_if.real_s.sum())
        lost = self._left_s - self._ideal_s
        self.lost = lost if lost >= MEASURABLE * self._ideal_s else 0.0
        self.causes: list[Cause] = []

    def run(self) -> None:
        """Find all causes."""
        if not self.lost:
            return
        self._sequence()
        self._stage()
        self._workers()
        self._optypes()

    def _take(self, durations: np.ndarray) -> float | None:
        """Go on with these durations, and return the loss that is gone; None, and nothing changes, where it is too small."""
        total = self._what_if.total(durations)
        loss = (self._left_s - total) / self._ideal_s
        if loss < LEAST_LOSS:
            return None
        self._left, self._left_s = durations, total
        return loss

    def _name(self, kind: Kind, name: str, loss: float, **place: object) -> None:
        self.causes.append(Cause(kind, name, loss * self._ideal_s / self.lost, loss, **place))  # pyright: ignore[reportArgumentType]

    def _sequence(self) -> None:
        found = self._effects.sequences
        if not found.uneven:
            return
        loss = self._take(self._left / self._effects.sequence_factor)
        if loss is not None:
            self._name("sequence", f"micro-batches vary by {found.variation:.0%}, and all stages agree on which are long", loss)

    def _stage(self) -> None:
        excess = self._effects.stage_excess
        if not excess.any():
            return
        loss = self._take(self._left / self._effects.stage_factor)
        if loss is not None:
            pipe = int(excess.argmax())
            place = "the last stage" if pipe == excess.size - 1 else f"stage {pipe}"
            by_type = {name: float(work[pipe] - 1) for name, work in self._effects.stage_work.items()}
            self._name("stage", f"{place} has {excess[pipe]:.0%} more work than the mean", loss, pipe=pipe, excess=by_type)

    def _workers(self) -> None:
        """By place in ``pipe`` and ``data``: tensor peers run in lock-step, so all of them seem slow where one is."""
        groups: dict[tuple[int, int], list[SlowWorker]] = defaultdict(list)
        for slow in self._effects.slow_workers:
            pipe, data, _ = self._table.layout.mesh.coordinates(slow.worker)
            groups[pipe, data].append(slow)
        for (pipe, data), found in sorted(groups.items(), key=lambda item: -max(slow.excess for slow in item[1])):
            durations, ranks, excess = self._left.copy(), set(), {}
            for slow in found:
                rows = self._table.worker == slow.worker
                ranks.add(int(self._table.rank[rows.argmax()]))
                durations[rows & (self._table.optype == CODES[slow.optype])] /= 1 + slow.excess
                excess[slow.optype] = max(slow.excess, excess.get(slow.optype, 0.0))
            loss = self._take(durations)
            if loss is not None:
                words = ", ".join(f"{value:.0%} in {name}" for name, value in excess.items())
                numbers = ", ".join(map(str, sorted(ranks)))
                name = f"rank{'s' if len(ranks) > 1 else ''} {numbers} slower than peers: {words}"
                self._name("worker", name, loss, pipe=pipe, data=data, ranks=tuple(sorted(ranks)), excess=excess)

    def _optypes(self) -> None:
        """The one that costs most first."""
        waiting = {OPTYPES[code]: self._table.optype == code for code in np.unique(self._table.optype)}
        waiting = {name: rows for name, rows in waiting.items() if self._irregular(name, rows)}
        while waiting:
            tries = {name: self._what_if.total(np.where(rows, self._what_if.ideal, self._left)) for name, rows in waiting.items()}
            name = min(tries, key=tries.__getitem__)
            rows = waiting.pop(name)
            loss = self._take(np.where(rows, self._what_if.ideal, self._left))
            if loss is None:
                return
            self._name("optype", f"{name} varies, and no worker, stage or sequence explains it", loss)

    def _irregular(self, name: str, rows: np.ndarray) -> bool:
        """Whether a type varies by more than noise; passes against what is normal for their worker."""
        left = self._left[rows]
        if name in MODEL_WORK:
            place = np.unique(self._table.worker[rows] * self._table.layout.chunks + self._table.chunk[rows], return_inverse=True)[1]
            means = np.bincount(place, left) / np.bincount(place)
            left = np.divide(left, means[place], out=np.ones_like(left), where=means[place] > 0)
        mean = float(left.mean())
        return mean > 0 and float(left.std()) >= IRREGULAR * mean

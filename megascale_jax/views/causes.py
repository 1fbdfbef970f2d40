"""Why a job is slower than it could be: causes with shares that add up, by one rule.

Causes are taken away one after the other, each from what the former has left, and the graph is replayed; what a cause's
removal wins, over all that is lost, is its share. Lost is ``T`` less the ideal time of what is left in the end: a slow worker
is not work that others should share.

1. ``sequence``: stages agree on which micro-batches are long. Each gets the mean length of its step.
2. ``stage``: a stage has more work than the mean. Work is spread evenly. Whether by design or by accident, no worker is at fault.
3. ``worker``: a worker takes longer than its peers of the same stage, whatever the micro-batch. It becomes as fast as they are.
   Slow workers hide each other, so all are taken away together, and share what that wins by what each costs alone (`split_loss`).
4. ``optype``: operations of one type vary, and none of the above explains it: pauses, a network that flaps. Each takes its ideal time.

Sequences come first because they lengthen the passes of a stage with more work by more, and stages before workers because a
worker is compared with its own stage. A cause is named from `LEAST_LOSS` of the ideal step time on. What is left is in no share: noise.

Failure case: a job without enough passes to tell noise from a cause names fewer causes, not more (`effects`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from megascale_jax.views.effects import Effects, Sequences, SlowWorker, find_effects
from megascale_jax.views.operations import CODES, MODEL_WORK, OPTYPES
from megascale_jax.views.what_if import MEASURABLE, WhatIf, ideal_durations

Kind = Literal["sequence", "stage", "worker", "optype"]

LEAST_LOSS = 0.01
"""Time that a cause must cost, over the ideal step time, to be named."""

IRREGULAR = 0.1
"""Relative standard deviation of an operation type from which its variation is a cause and not noise."""


@dataclass(frozen=True)
class Cause:
    """A cause: what it is in words, its share of the slowdown, and where it sits (None: everywhere).

    ``ranks``: of a trace those of workers, of a run those of processes, whose ``devices`` have these numbers in the mesh.
    ``loss``: the time that it costs over the ideal step time. ``excess``: by operation type, how much longer than normal (0.15: 15 %).
    """

    kind: Kind
    name: str
    share: float = 0.0
    loss: float = 0.0
    optype: str | None = None
    pipe: int | None = None
    data: int | None = None
    ranks: tuple[int, ...] = ()
    excess: dict[str, float] = field(default_factory=dict)
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Findings:
    """Causes, the largest share first, the share that none has, and the measures that the rule looked at.

    ``slow_workers``: all that stand out, also those that cost nothing because the pipeline waits for something else.
    """

    causes: tuple[Cause, ...]
    unexplained: float
    sequences: Sequences
    stage_work: dict[str, list[float]]
    slow_workers: tuple[SlowWorker, ...]

    @property
    def hidden_workers(self) -> list[SlowWorker]:
        """Slow workers that are in no cause."""
        named = {rank for cause in self.causes for rank in cause.ranks}
        return [slow for slow in self.slow_workers if slow.rank not in named]


def find_causes(what_if: WhatIf) -> Findings:
    """The causes of a window's slowdown."""
    effects = find_effects(what_if.operations, what_if.real)
    causes, unexplained = _Removal(what_if, effects).run()
    work = {name: values.tolist() for name, values in effects.stage_work.items()}
    return Findings(tuple(causes), unexplained, effects.sequences, work, effects.slow_workers)


def split_loss(joint: float, alone: Sequence[float]) -> list[float]:
    """What causes that were taken away together lose each, of ``joint``: in proportion to what each costs alone, all others away.

    One that costs less than `LEAST_LOSS` alone has none, 0.0, unless all are like that. All losses are over the ideal step time.
    """
    costs = np.maximum(np.asarray(alone, float), 0.0)
    if not costs.any():
        return [joint / costs.size] * costs.size
    losses = joint * costs / costs.sum()
    named = costs >= LEAST_LOSS
    return np.where(named if named.any() else True, losses, 0.0).tolist()


class _Removal:
    """Takes causes away, one after the other."""

    def __init__(self, what_if: WhatIf, effects: Effects) -> None:
        self._what_if, self._effects = what_if, effects
        self._table = what_if.operations
        self._real_s, self._ideal_s = float(what_if.real_s.sum()), float(what_if.ideal_s.sum())
        self._left, self._left_s = what_if.real, self._real_s
        self._causes: list[Cause] = []

    def run(self) -> tuple[list[Cause], float]:
        """All causes, the largest first, and the share of none."""
        if self._real_s - self._ideal_s < MEASURABLE * self._ideal_s:
            return [], 0.0
        self._sequence()
        self._stage()
        self._workers()
        self._optypes()
        lost = self._real_s - self._what_if.total(ideal_durations(self._table, self._left))
        causes = [replace(cause, share=cause.loss * self._ideal_s / lost) for cause in self._causes]
        return sorted(causes, key=lambda cause: -cause.share), 1 - sum(cause.share for cause in causes)

    def _loss(self, durations: np.ndarray) -> float:
        """What going on with these durations wins, over the ideal step time."""
        return (self._left_s - self._what_if.total(durations)) / self._ideal_s

    def _take(self, cause: Cause, durations: np.ndarray) -> bool:
        """Go on with durations that lack a cause, and note it with its loss; False, and nothing changes, where that is too small."""
        total = self._what_if.total(durations)
        loss = (self._left_s - total) / self._ideal_s
        if loss < LEAST_LOSS:
            return False
        self._left, self._left_s = durations, total
        self._causes.append(replace(cause, loss=loss))
        return True

    def _sequence(self) -> None:
        found = self._effects.sequences
        if found.uneven:
            name = f"micro-batches vary by {found.variation:.0%}, and all stages agree on which are long"
            self._take(Cause("sequence", name), self._left / self._effects.sequence_factor)

    def _stage(self) -> None:
        excess = self._effects.stage_excess
        if not excess.any():
            return
        pipe = int(excess.argmax())
        place = "the last stage" if pipe == excess.size - 1 else f"stage {pipe}"
        by_type = {name: float(work[pipe] - 1) for name, work in self._effects.stage_work.items()}
        cause = Cause("stage", f"{place} has {excess[pipe]:.0%} more work than the mean", pipe=pipe, excess=by_type)
        self._take(cause, self._left / self._effects.stage_factor)

    def _workers(self) -> None:
        """By place in ``pipe`` and ``data``: tensor peers run in lock-step, so all of them seem slow where one is."""
        groups: dict[tuple[int, int], list[SlowWorker]] = defaultdict(list)
        for slow in self._effects.slow_workers:
            pipe, data, _ = self._table.layout.mesh.coordinates(slow.worker)
            groups[pipe, data].append(slow)
        ordered = sorted(groups.items(), key=lambda item: -max(slow.excess for slow in item[1]))
        removed, causes = self._left.copy(), []
        for (pipe, data), found in ordered:
            excess: dict[str, float] = {}
            for slow in found:
                removed[self._rows(slow)] /= 1 + slow.excess
                excess[slow.optype] = max(slow.excess, excess.get(slow.optype, 0.0))
            ranks = tuple(sorted({slow.rank for slow in found}))
            words = ", ".join(f"{value:.0%} in {name}" for name, value in excess.items())
            name = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} slower than peers: {words}"
            causes.append(Cause("worker", name, pipe=pipe, data=data, ranks=ranks, excess=excess))
        joint = self._loss(removed)
        if joint < LEAST_LOSS:
            return
        alone = []
        for _, found in ordered:
            back = removed.copy()
            for slow in found:
                own = self._rows(slow)
                back[own] = self._left[own]
            alone.append(joint - self._loss(back))
        self._left, self._left_s = removed, self._what_if.total(removed)
        self._causes += [replace(cause, loss=loss) for cause, loss in zip(causes, split_loss(joint, alone), strict=True) if loss]

    def _rows(self, slow: SlowWorker) -> np.ndarray:
        return (self._table.worker == slow.worker) & (self._table.optype == CODES[slow.optype])

    def _optypes(self) -> None:
        """The one that costs most first."""
        waiting = {OPTYPES[code]: self._table.optype == code for code in np.unique(self._table.optype)}
        waiting = {name: rows for name, rows in waiting.items() if self._irregular(name, rows)}
        ideal = ideal_durations(self._table, self._left)
        while waiting:
            tries = {name: self._what_if.total(np.where(rows, ideal, self._left)) for name, rows in waiting.items()}
            name = min(tries, key=tries.__getitem__)
            cause = Cause("optype", f"{name} varies, and no worker, stage or sequence explains it", optype=name)
            if not self._take(cause, np.where(waiting.pop(name), ideal, self._left)):
                return

    def _irregular(self, name: str, rows: np.ndarray) -> bool:
        """Whether a type varies by more than noise; passes against what is normal for their worker."""
        left = self._left[rows]
        if name in MODEL_WORK:
            place = np.unique(self._table.worker[rows] * self._table.layout.chunks + self._table.chunk[rows], return_inverse=True)[1]
            means = np.bincount(place, left) / np.bincount(place)
            left = np.divide(left, means[place], out=np.ones_like(left), where=means[place] > 0)
        mean = float(left.mean())
        return mean > 0 and float(left.std()) >= IRREGULAR * mean

"""The ticks of a schedule as loops of few kinds, so that few bodies are compiled. No JAX."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby

from megascale_jax.parallel.pipeline.schedule import Schedule, TickKind


@dataclass(frozen=True)
class Run:
    """``repeats`` times ``length`` ticks of one kind; with ``closes`` each of them ends a window of the schedule."""

    kind: TickKind
    length: int
    closes: bool = False
    repeats: int = 1

    @property
    def ticks(self) -> int:
        """Ticks of all repetitions."""
        return self.length * self.repeats


@dataclass(frozen=True)
class Loop:
    """Runs in order, all of them repeated."""

    start: int
    runs: tuple[Run, ...]
    repeats: int

    @property
    def period(self) -> int:
        """Ticks of one repetition."""
        return sum(run.ticks for run in self.runs)


def training_loops(schedule: Schedule) -> tuple[Loop, ...]:
    """All ticks of a step as loops: warm-up, steady, cool-down, cut where windows end.

    The ticks of a window of weight gradients are of one kind, and so are all ticks of a phase of the schedule with work at
    the vocabulary: the union of what they do, so that few bodies are compiled. What a tick has no micro-batch for, it does
    on nothing.
    """
    ticks = range(schedule.length)
    kinds = [schedule.kind(tick) for tick in ticks]
    p, first = schedule.pipe, schedule.backward_offset + schedule.weight_delay
    for start in range(first, len(kinds), p):
        kinds[start : start + p] = [reduce(TickKind.union, kinds[start : start + p])] * p
    return _fold(kinds, [schedule.closes_window(tick) for tick in ticks])


def forward_loops(schedule: Schedule) -> tuple[Loop, ...]:
    """The ticks of a forward pass alone, for evaluation: the head in the tick of its forward slot."""
    assert schedule.backward_delay == 0, "an evaluation has no backward slot to delay"
    ticks = range(schedule.units + schedule.pipe - 1)
    kinds = [TickKind(True, False, schedule.entering(tick) is not None, schedule.at_head(tick) is not None) for tick in ticks]
    return _fold(kinds, [False for _ in ticks])


def _fold(kinds: Sequence[TickKind], closes: Sequence[bool]) -> tuple[Loop, ...]:
    unions: dict[TickKind, TickKind] = {}
    for kind in kinds:
        if kind.ends:
            unions[kind.without_ends] = kind.union(unions.get(kind.without_ends, kind))
    segments: list[Run] = []
    for kind, closing in zip(kinds, closes, strict=True):
        whole = unions[kind.without_ends] if kind.ends else kind
        if segments and segments[-1].kind == whole and not segments[-1].closes:
            segments[-1] = Run(whole, segments[-1].length + 1, closing)
        else:
            segments.append(Run(whole, 1, closing))
    return _loops([_repeated(list(equal)) for _, equal in groupby(segments)])


def _repeated(equal: Sequence[Run]) -> Run:
    return replace(equal[0], repeats=len(equal))


def _loops(runs: list[Run]) -> tuple[Loop, ...]:
    loops: list[Loop] = []
    tick = 0
    while runs:
        repeats = 1
        while len(runs) >= 2 * (repeats + 1) and runs[2 * repeats : 2 * repeats + 2] == runs[:2]:
            repeats += 1
        size = 2 if repeats > 1 else 1
        loops.append(Loop(tick, tuple(runs[:size]), repeats))
        tick += loops[-1].period * repeats
        runs = runs[size * repeats :]
    return tuple(loops)

"""The ticks of a schedule as loops of few kinds, so that few bodies are compiled. No JAX."""

from collections.abc import Sequence
from dataclasses import dataclass

from megascale_jax.parallel.pipeline.schedule import Schedule, TickKind


@dataclass(frozen=True)
class Run:
    """Consecutive ticks of one kind."""

    kind: TickKind
    length: int


@dataclass(frozen=True)
class Loop:
    """Runs in order, all of them repeated."""

    start: int
    runs: tuple[Run, ...]
    repeats: int

    @property
    def period(self) -> int:
        """Ticks of one repetition."""
        return sum(run.length for run in self.runs)


def training_loops(schedule: Schedule) -> tuple[Loop, ...]:
    """All ticks of a step as loops: warm-up, steady, cool-down, each cut where the vocabulary has work.

    Within a phase of the schedule all ticks with such work are of one kind, their union, so that few bodies are compiled;
    what a tick has no micro-batch for, it does on nothing.
    """
    return _fold([schedule.kind(tick) for tick in range(schedule.ticks)])


def forward_loops(schedule: Schedule) -> tuple[Loop, ...]:
    """The ticks of a forward pass alone, for evaluation: the head in the tick of its forward slot."""
    assert schedule.backward_delay == 0, "an evaluation has no backward slot to delay"
    ticks = range(schedule.units + schedule.pipe - 1)
    return _fold([TickKind(True, False, schedule.entering(tick) is not None, schedule.at_head(tick) is not None) for tick in ticks])


def _fold(kinds: Sequence[TickKind]) -> tuple[Loop, ...]:
    unions: dict[tuple[bool, bool], TickKind] = {}
    for kind in kinds:
        if kind.ends:
            slots = (kind.forward, kind.backward)
            unions[slots] = kind.union(unions.get(slots, kind))
    runs: list[Run] = []
    for kind in kinds:
        whole = unions[kind.forward, kind.backward] if kind.ends else kind
        if runs and runs[-1].kind == whole:
            runs[-1] = Run(whole, runs[-1].length + 1)
        else:
            runs.append(Run(whole, 1))
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

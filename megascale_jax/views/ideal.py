"""The pipeline schedule in time, had every unit taken the fleet's median and no message any time. No JAX.

A stage does what the schedule gives it, in that order and tick by tick (forward slot, head, backward slot, weight gradients), each as
soon as it is free and what it needs is there. Idle slots take no time. So what a real step takes longer is waiting, or a slow device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megascale_jax.observe.step_sums import Pass
from megascale_jax.parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class IdealUnit:
    """A unit on a stage; times are nanoseconds since the begin of the first one."""

    stage: int
    of: Pass
    tick: int
    micro_batch: int
    chunk: int
    begin_ns: int
    end_ns: int


def ideal_units(schedule: Schedule, lasts_ns: Mapping[Pass, int]) -> tuple[IdealUnit, ...]:
    """Every unit of forward, backward and weight gradients, and every stage's part of the head of a micro-batch, tick by tick.

    ``lasts_ns``: nanoseconds of a unit by pass; a pass that is not in it takes none.
    """
    plan = _Ideal(schedule, lasts_ns, [0] * schedule.pipe)
    for tick in range(schedule.length):
        plan.add(tick)
    return tuple(plan.units)


@dataclass
class _Ideal:
    schedule: Schedule
    lasts_ns: Mapping[Pass, int]
    free_ns: list[int]
    """When each stage has done all so far."""
    units: list[IdealUnit] = field(default_factory=list)
    _done_ns: dict[tuple[Pass, int, int], int] = field(default_factory=dict)
    """By pass, virtual stage (of the head: -1) and micro-batch."""

    def add(self, tick: int) -> None:
        """All stages' slots of a tick."""
        schedule, pipe = self.schedule, self.schedule.pipe
        last = schedule.virtual_stages * pipe - 1
        for stage in range(pipe):
            if unit := schedule.forward(tick, stage):
                place = unit.chunk * pipe + stage
                self._run(stage, "forward", tick, unit.micro_batch, unit.chunk, ("forward", place - 1, unit.micro_batch))
        if (micro_batch := schedule.at_head(tick)) is not None:
            for stage in range(pipe):
                self._run(stage, "head", tick, micro_batch, schedule.virtual_stages - 1, ("forward", last, micro_batch))
        for stage in range(pipe):
            if unit := schedule.backward(tick, stage):
                place = unit.chunk * pipe + stage
                needed = ("head", -1, unit.micro_batch) if place == last else ("backward", place + 1, unit.micro_batch)
                self._run(stage, "backward", tick, unit.micro_batch, unit.chunk, needed)
        if (number := schedule.weight_unit(tick)) is not None:
            micro_batch, rank = schedule.decode(number)
            chunk = schedule.virtual_stages - 1 - rank
            for stage in range(pipe):
                self._run(stage, "weight", tick, micro_batch, chunk, ("backward", chunk * pipe + stage, micro_batch))

    def _run(self, stage: int, of: Pass, tick: int, micro_batch: int, chunk: int, needed: tuple[Pass, int, int]) -> None:
        begin_ns = max(self.free_ns[stage], self._done_ns.get(needed, 0))
        end_ns = self.free_ns[stage] = begin_ns + self.lasts_ns.get(of, 0)
        key = (of, -1 if of == "head" else chunk * self.schedule.pipe + stage, micro_batch)
        self._done_ns[key] = max(end_ns, self._done_ns.get(key, 0))
        self.units.append(IdealUnit(stage, of, tick, micro_batch, chunk, begin_ns, end_ns))

"""The event simulation of one step: every unit of the run's own schedule on every stage of many pipelines at once. No JAX.

A stage runs its units in the order of the schedule's ticks, a tick's forward slot first, and starts one when it is free and the unit's
input has come. Whatever a unit waits for ran one tick before, on the neighbour, so a tick of all stages and all pipelines is one step of
array arithmetic, and nothing has to be sorted. Ticks do not wait for each other otherwise: a slow stage delays those who need it.

Blocking messages lengthen a unit; asynchronous ones only delay the unit that needs them. Slow nodes lengthen all that a stage computes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megascale_jax.config.software import SoftwareConfig
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.sim.costs import Costs
from megascale_jax.sim.work import Work

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]
FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True)
class Durations:
    """Seconds of a unit, ``[pass, chunk, stage]``; what the head adds on the last stage, ``[pass]``; of a message; whether it blocks."""

    unit_s: Array
    head_s: Array
    message_s: float
    is_blocking: bool


@dataclass(frozen=True)
class Units:
    """When units ran, ``[pass, tick, stage]``, seconds since the begin of the step; NaN where a slot is idle."""

    begin_s: Array
    end_s: Array


def schedule_of(work: Work) -> Schedule:
    """The schedule of a step."""
    return Schedule(work.pipe, work.virtual_stages, work.micro_batches, work.backward_delay)


def durations_of(work: Work, costs: Costs, software: SoftwareConfig) -> Durations:
    """Durations by the costs of a layer and of the head."""
    layers = np.array(work.layers, float).T
    return Durations(
        unit_s=np.stack([layers * costs.layer_forward.total, layers * costs.layer_backward.total]),
        head_s=np.array([costs.head_forward.total, costs.head_backward.total]),
        message_s=costs.message_s,
        is_blocking=software.pipe_sends == "blocking",
    )


def replay(schedule: Schedule, durations: Durations, slowdowns: Array, jitter: float = 0.0, seed: int = 0) -> Array:
    """Seconds until the last unit of each pipeline has ended, ``[pipelines]``.

    ``slowdowns`` float64[pipelines, stages]: factors on all that a stage computes. ``jitter``: standard deviation of a factor on every
    single unit, independent and log-normal with mean 1.
    """
    ends, _ = _run(schedule, durations, slowdowns, jitter, seed, keeps=False)
    return ends


def record(schedule: Schedule, durations: Durations, slowdowns: Array, jitter: float = 0.0, seed: int = 0) -> Units:
    """Every unit of one pipeline; ``slowdowns`` float64[stages]."""
    _, units = _run(schedule, durations, slowdowns[np.newaxis], jitter, seed, keeps=True)
    assert units is not None
    return units


def _run(schedule: Schedule, durations: Durations, slowdowns: Array, jitter: float, seed: int, keeps: bool) -> tuple[Array, Units | None]:
    pipelines, p, last = len(slowdowns), schedule.pipe, schedule.virtual_stages - 1
    stages: Numbers = np.arange(p, dtype=np.int64)
    random = np.random.default_rng(seed)
    late_s = 0.0 if durations.is_blocking else durations.message_s
    blocked_s = durations.message_s if durations.is_blocking and p > 1 else 0.0
    free = np.zeros((pipelines, p))
    ends = [np.zeros((pipelines, p)), np.zeros((pipelines, p))]
    kept = Units(*(np.full((2, schedule.ticks, p), np.nan) for _ in range(2))) if keeps else None
    # a pass' unit numbers, the stage whose output it needs, and the stage on which the first rank of chunks needs none
    passes = ((FORWARD, -stages, 1, 0), (BACKWARD, stages - schedule.backward_offset, -1, p - 1))
    for tick in range(schedule.ticks):
        for of, offsets, direction, source in passes:
            number = tick + offsets
            busy = (number >= 0) & (number < schedule.units)
            if not busy.any():
                continue
            rank: Numbers = number % schedule.period // p
            ready = np.roll(ends[of], direction, axis=1) + late_s
            ready[:, busy & (stages == source) & (rank == 0)] = 0.0
            chunk = rank if of == FORWARD else last - rank
            at_head = (stages == p - 1) & (chunk == last)
            seconds: Array = (durations.unit_s[of, chunk, stages] + durations.head_s[of] * at_head) * slowdowns
            if jitter:
                spread = np.sqrt(np.log1p(jitter**2))
                seconds = seconds * random.lognormal(-(spread**2) / 2, spread, seconds.shape)
            begin = np.maximum(free, ready)
            end = begin + seconds + blocked_s
            free, ends[of] = np.where(busy, end, free), np.where(busy, end, ends[of])
            if kept is not None:
                kept.begin_s[of, tick, busy], kept.end_s[of, tick, busy] = begin[0, busy], end[0, busy]
    return free.max(axis=1), kept

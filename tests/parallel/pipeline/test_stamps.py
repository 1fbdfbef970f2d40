"""The plan of a step's stamps: every unit of every pass once, in the order of the schedule, whatever loops the ticks are folded into."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.observe.step_sums import STEP_NAMES
from megascale_jax.parallel.pipeline.loops import training_loops
from megascale_jax.parallel.pipeline.operations import fill_operations, settle_operations
from megascale_jax.parallel.pipeline.phases import plan_phases, plan_tick
from megascale_jax.parallel.pipeline.schedule import Schedule, TickKind
from megascale_jax.parallel.pipeline.shape import HEAD_GEMMS, TickShape
from megascale_jax.parallel.pipeline.stamps import step_stamps, tick_spans

GRIDS = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3), st.sampled_from([0, 1]), st.booleans(), st.booleans())
"""Stages, chunks a stage, micro-batches over stages, backward delay, halves of the sequence, recomputation."""


def stamps_of(pipe, chunks, groups, delay, split, recompute, tensor=2):
    shape = TickShape(2, recompute, delay, turns=pipe > 1, split=split and delay == 1)
    sizes = {"pipe": pipe, "data": 2, "tensor": tensor}
    schedule = Schedule(pipe, chunks, pipe * groups, delay)
    ends = (plan_phases(operations, sizes) for operations in (fill_operations(shape), settle_operations()))
    return schedule, step_stamps(schedule, shape, lambda kind: plan_tick(kind, shape, sizes, HEAD_GEMMS), *ends)


def units_in_order(stamps, stage, kind):
    """``(tick, micro-batch, chunk)`` of a pass in the order of the ticks, one for each unit."""
    micro_batch, chunk = stamps.units(stage)
    is_kind = (stamps.of == stamps.passes.index(kind)) & (micro_batch >= 0) & (stamps.lane == stamps.lanes.index("compute"))
    late = np.array([stamps.names[name][0] in "LT" for name in stamps.name])
    rows = zip(stamps.tick[is_kind & ~late], micro_batch[is_kind & ~late], chunk[is_kind & ~late], strict=True)
    return list(dict.fromkeys((int(tick), int(m), int(c)) for tick, m, c in rows))


@settings(deadline=None, max_examples=60)
@given(GRIDS)
def test_every_unit_is_stamped_once_in_the_order_of_the_schedule(grid):
    schedule, stamps = stamps_of(*grid)
    pipe, chunks, m = schedule.pipe, schedule.virtual_stages, schedule.micro_batches
    everything = {(micro_batch, chunk) for micro_batch in range(m) for chunk in range(chunks)}
    ticks = {}
    for stage in range(pipe):
        for kind in ("forward", "backward", "weight"):
            found = units_in_order(stamps, stage, kind)
            assert [tick for tick, *_ in found] == sorted({tick for tick, *_ in found}), "one unit a tick"
            assert {(b, c) for _, b, c in found} == everything
            ticks |= {(kind, stage, b, c): tick for tick, b, c in found}
    for (kind, stage, b, c), tick in ticks.items():
        if kind == "forward":  # received one tick after the stage before, from its own last chunk where the ring closes
            before = (stage - 1, c) if stage else (pipe - 1, c - 1)
            assert before[1] < 0 or tick == ticks["forward", before[0], b, before[1]] + 1
            assert ticks["backward", stage, b, c] >= tick
            assert ticks["weight", stage, b, c] >= ticks["backward", stage, b, c]


@settings(deadline=None, max_examples=60)
@given(GRIDS)
def test_spans_lie_within_the_stamps_and_follow_each_other(grid):
    _, stamps = stamps_of(*grid)
    assert ((stamps.begin >= 0) & (stamps.end == stamps.begin + 1) & (stamps.end < stamps.count)).all()
    assert len(set(stamps.begin)) == len(stamps.begin), "no time is counted twice"
    assert (np.diff(stamps.tick.astype(np.int64)) >= 0).all()
    for tick in set(stamps.tick):
        begins = stamps.begin[stamps.tick == tick]
        assert (np.diff(begins) > 0).all()


@pytest.mark.parametrize("pipe", [1, 2])
def test_a_step_begins_with_a_gather_and_ends_with_the_optimizer(pipe):
    _, stamps = stamps_of(pipe, 2, 2, 1, True, False)
    outside = [stamps.names[name] for name, of in zip(stamps.name, stamps.of, strict=True) if stamps.passes[of] == "step"]
    assert outside == list(STEP_NAMES)
    assert stamps.begin[0] == 0 and stamps.end[-1] == stamps.count - 1


def test_a_phase_is_its_compute_and_then_the_wait_for_its_collectives():
    sizes = {"pipe": 4, "data": 2, "tensor": 2}
    plan = plan_tick(TickKind(True, True, weight_gradients=True), TickShape(2, False, 1), sizes, ())
    count, spans = tick_spans(plan)
    at = 0
    for phase in plan.phases:
        own = [span for span in spans if span.name in (phase.compute, " + ".join(phase.collectives))]
        assert [span.lane == "compute" for span in own] == [True] * (phase.compute is not None) + [False] * bool(phase.collectives)
        assert all(first.end == second.begin for first, second in pairwise(own)), "the wait begins where the compute ends"
        assert own[0].begin == at
        at += len(own)
    assert count == at + 1
    of = {span.name: span.of for span in spans}
    assert of["F0.in"] == "forward" and of["B0.dout"] == "backward" and of["W0.wout"] == "weight"


def test_ticks_without_a_unit_have_none():
    schedule, stamps = stamps_of(4, 1, 1, 0, False, False)
    assert len(training_loops(schedule)) > 1
    micro_batch, chunk = stamps.units(3)
    forward = (stamps.of == stamps.passes.index("forward")) & (stamps.lane == stamps.lanes.index("compute"))
    idle = forward & (stamps.tick < 3) & (stamps.tick >= 0)
    assert idle.any() and (micro_batch[idle] == -1).all() and (chunk[idle] == -1).all()

"""Tick plans for every kind of tick: proved, and with no message left uncovered where the schedule promises it."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.parallel.pipeline.loops import training_loops
from megascale_jax.parallel.pipeline.operations import fill_operations, settle_operations, tick_operations
from megascale_jax.parallel.pipeline.phases import Phase, plan_phases, plan_tick, validate_phases
from megascale_jax.parallel.pipeline.pieces import zero_pieces
from megascale_jax.parallel.pipeline.schedule import Schedule, TickKind
from megascale_jax.parallel.pipeline.shape import HEAD_GEMMS, TickShape

SIZES = {"pipe": 8, "data": 8, "tensor": 8}
STEADY = TickKind(forward=True, backward=True, weight_gradients=True)
STEADY_ENDS = replace(STEADY, embed=True, head=True, embed_backward=True)
COOLDOWN = TickKind(forward=False, backward=True, weight_gradients=True, scatter=True)


def all_of(branches):
    return frozenset((branch, matrix) for branch in range(branches) for matrix in ("in", "out"))


def planned(kind, branches=2, recompute=False, delay=1, sizes=SIZES, halved=False, light=(), split=False):
    shape = TickShape(branches, recompute, delay, all_of(branches) if halved else frozenset(), split=split)
    plan = plan_tick(kind, shape, sizes, light)
    validate_phases(plan)
    return plan


SHAPES = st.tuples(st.integers(1, 6), st.booleans(), st.booleans(), st.sampled_from(["", "split", "ring"]))
"""Branches, recompute, halved, and how the tensor axis is hidden."""


@settings(deadline=None, max_examples=80)
@given(SHAPES, st.sampled_from([0, 1]), st.sampled_from([1, 4]), st.sampled_from([1, 4]), st.integers(1, 3))
def test_every_tick_of_every_schedule_has_a_valid_plan(shape, delay, pipe, tensor, groups):
    branches, recompute, halved, overlap = shape
    ways = {"halved": all_of(branches) if halved else frozenset(), "split": overlap == "split" and delay == 1, "ring": overlap == "ring"}
    tick = TickShape(branches, recompute, delay, turns=pipe > 1, **ways)
    sizes = {"pipe": pipe, "data": 2, "tensor": tensor}
    for loop in training_loops(Schedule(pipe, 2, pipe * groups, delay)):
        for run in loop.runs:
            validate_phases(plan_tick(run.kind, tick, sizes, HEAD_GEMMS))
    validate_phases(plan_phases(fill_operations(tick), SIZES))
    validate_phases(plan_phases(settle_operations(), SIZES))


@pytest.mark.parametrize("branches", [1, 2, 4])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [STEADY, STEADY_ENDS], ids=["plain", "ends"])
def test_every_collective_of_a_steady_tick_has_a_gemm_beside_it(kind, branches, recompute):
    plan = planned(kind, branches, recompute)
    if branches > 1:
        assert plan.bare == (), plan.table()
    assert all(len(phase.collectives) <= 2 for phase in plan.phases)


@pytest.mark.parametrize(
    "kind", [STEADY, STEADY_ENDS, COOLDOWN, replace(COOLDOWN, embed_backward=True)], ids=["plain", "ends", "cool-down", "last"]
)
def test_halved_weight_gradients_cover_the_head_and_the_cool_down(kind):
    assert planned(kind, halved=True, light=HEAD_GEMMS).bare == ()


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_pieces_of_every_matrix_cover_it_once_and_ride_on_its_own_gemms(halved, split):
    shape = TickShape(2, False, 1, all_of(2) if halved else frozenset(), split=split)
    pieces = zero_pieces(shape).values()
    for kind, verb in ((TickKind(True, False, gather=True), "gather"), (COOLDOWN, "scatter")):
        plan = plan_phases(tick_operations(kind, shape), SIZES)
        carried = {name: phase.compute for phase in plan.phases for name in phase.collectives if name[0] == "Z"}
        for branch in range(2):
            for matrix in ("in", "out"):
                own = [p for p in pieces if f".{verb}_" in p.operation and (p.branch, p.matrix) == (branch, matrix)]
                assert sorted(unit for p in own for unit in range(p.first, p.last)) == list(range(own[0].units))
                for piece in own:
                    compute = carried[piece.operation]
                    assert compute is not None and compute == piece.beside
                    assert compute[1] == str(branch) and matrix in compute


def test_a_turn_shares_the_phase_of_the_message_before_it_is_needed():
    for phase in planned(STEADY).phases:
        for copy, message in (("P.turn_forward", "P.send_y"), ("P.turn_backward", "P.send_g")):
            assert (copy in phase.copies) == (message in phase.collectives)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("gather", [False, True])
def test_halves_of_the_sequence_cover_the_warm_up(gather, ends):
    kind = TickKind(forward=True, backward=False, gather=gather, embed=ends)
    plan = planned(kind, halved=True, light=HEAD_GEMMS, split=True)
    assert plan.bare == ()
    first = planned(TickKind(True, True, embed=True, head=True), halved=True, light=HEAD_GEMMS, split=True)
    assert first.bare == (), "the first backward passes have no weight gradients to help, but the head's products"


def test_one_gather_and_one_scatter_per_block_and_half():
    shape = TickShape(2, False, 1, split=True)
    names = [o.name for o in tick_operations(TickKind(forward=True, backward=False), shape) if o.axes == ("tensor",)]
    ends = ["P.gather_a", "P.gather_b", "T.scatter"]
    assert sorted(names) == [*ends[:2], ends[2], "a0.scatter", "a1.gather", "a1.scatter", "b0.scatter", "b1.gather"]


def test_one_gather_and_one_scatter_per_block_forward():
    names = [o.name for o in tick_operations(TickKind(forward=True, backward=False), TickShape(2, False, 1)) if o.axes == ("tensor",)]
    assert sorted(names) == ["F0.scatter", "F1.gather", "F1.scatter", "P.gather"], "the first gather belongs to the tick before"


def test_products_that_communicate_themselves_leave_the_tensor_axis_to_the_vocabulary():
    shape = TickShape(2, False, 1, ring=True)
    plan = plan_phases(tick_operations(STEADY_ENDS, shape), SIZES)
    validate_phases(plan)
    tensor = {name for phase in plan.phases for name in phase.collectives if "tensor" in plan.by_name[name].axes}
    assert tensor == {"H.gather", "H.join", "H.scatter", "E.scatter", "D.gather"}


def test_collectives_of_an_axis_of_one_are_no_phases():
    plan = planned(STEADY_ENDS, sizes={"pipe": 8, "data": 1, "tensor": 1})
    named = {plan.by_name[name].axes for phase in plan.phases for name in phase.collectives}
    assert named == {("pipe",), ("pipe", "tensor")}


@pytest.mark.parametrize(
    "breaks",
    [
        lambda phases: phases[1:],
        lambda phases: (*phases, phases[0]),
        lambda phases: phases[::-1],
        lambda phases: (Phase(None, ("L0.scatter", "F0.scatter")), *phases),
    ],
)
def test_validation_notices_a_broken_plan(breaks):
    plan = planned(STEADY)
    with pytest.raises(AssertionError):
        validate_phases(replace(plan, phases=breaks(plan.phases)))


def test_value_written_twice_is_noticed():
    plan = planned(STEADY)
    twice = replace(plan.operations[1], name="X.twice", kind="glue")
    with pytest.raises(AssertionError, match="written twice"):
        validate_phases(replace(plan, operations=(*plan.operations, twice)))


def test_design_page_shows_the_steady_tick_as_it_is_planned():
    page = (Path(__file__).parents[3] / "docs/design/0002-pipeline.md").read_text()
    for line in planned(STEADY, halved=True, light=HEAD_GEMMS).table().splitlines():
        assert line in page

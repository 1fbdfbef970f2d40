"""The schedule for any size: proved by `validate`, which a broken schedule does not pass."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.errors import ConfigError
from megascale_jax.parallel.pipeline.loops import forward_loops, training_loops
from megascale_jax.parallel.pipeline.schedule import Schedule, TickKind
from megascale_jax.parallel.pipeline.validate import validate

SIZES = st.tuples(st.integers(1, 16), st.integers(1, 8), st.integers(1, 64)).map(lambda s: (s[0], s[1], max(s[2] // s[0], 1) * s[0]))


@settings(deadline=None, max_examples=40)
@given(SIZES, st.sampled_from([0, 1]))
def test_schedule_is_valid_for_any_size(sizes, delay):
    validate(Schedule(*sizes, delay))


@settings(deadline=None, max_examples=40)
@given(SIZES, st.sampled_from([0, 1]))
def test_loops_are_the_ticks_in_order(sizes, delay):
    schedule = Schedule(*sizes, delay)
    tick = 0
    for loop in training_loops(schedule):
        assert loop.start == tick
        for run in loop.runs * loop.repeats:
            for place in range(run.ticks):
                kind = schedule.kind(tick)
                assert kind.union(run.kind) == run.kind, "a tick does all it has to"
                assert (kind.gather, kind.scatter) == (run.kind.gather, run.kind.scatter)
                assert schedule.closes_window(tick) == (run.closes and place % run.length == run.length - 1)
                tick += 1
    assert tick == schedule.length


@pytest.mark.parametrize("sizes", [(8, 6, 32), (4, 2, 8), (2, 1, 4)])
@pytest.mark.parametrize("delay", [0, 1])
def test_no_loop_does_more_than_its_ticks_but_for_the_window_at_the_end_of_the_forward_passes(sizes, delay):
    schedule = Schedule(*sizes, delay)
    idle = 0
    for loop in training_loops(schedule):
        tick = loop.start
        for run in loop.runs * loop.repeats:
            for _ in range(run.ticks):
                kind = schedule.kind(tick)
                assert kind.ends == run.kind.ends or not schedule.kind(tick + 1).forward
                assert (kind.backward, kind.weight_gradients) == (run.kind.backward, run.kind.weight_gradients)
                idle += run.kind.forward and not kind.forward
                tick += 1
    assert idle == delay


@settings(deadline=None, max_examples=40)
@given(SIZES, st.sampled_from([0, 1]))
def test_ends_see_every_micro_batch_once(sizes, delay):
    schedule = Schedule(*sizes, delay)
    ticks = range(schedule.length)
    everyone = list(range(schedule.micro_batches))
    first = [] if delay == 0 and schedule.entering(-1) == 0 else [0]
    assert first == [0] or delay == 0
    assert [b for t in ticks if (b := schedule.entering(t)) is not None] == everyone[1:], "the first one enters before the first tick"
    assert [b for t in ticks if (b := schedule.at_head(t)) is not None] == everyone
    assert [b for t in ticks if (b := schedule.leaving(t)) is not None] == everyone
    for tick in ticks[:-1]:
        unit = schedule.forward(tick + 1, 0) if tick + 1 < schedule.ticks else None
        if unit and unit.chunk == 0 and unit.micro_batch:
            assert any(schedule.entering(t) == unit.micro_batch for t in range(tick + 1)), "embedded before it enters"


def test_forward_loops_cover_every_forward_slot():
    schedule = Schedule(4, 2, 8)
    loops = forward_loops(schedule)
    assert sum(loop.period * loop.repeats for loop in loops) == 8 * 2 + 4 - 1
    assert all(run.kind == TickKind(True, False, run.kind.embed, run.kind.head) for loop in loops for run in loop.runs)


def test_repeated_groups_are_one_loop_however_many_micro_batches():
    few, many = (training_loops(Schedule(8, 6, m, 1)) for m in (32, 512))
    assert len(few) == len(many) <= 9
    assert [loop.runs for loop in few] == [loop.runs for loop in many]


@pytest.mark.parametrize("m", [16, 64])
def test_residual_slots_do_not_grow_with_micro_batches(m):
    schedule = Schedule(8, 6, m, 0)
    assert schedule.slots == 5 * 8 + 2 * 7 + 1 == 55
    assert schedule.gpipe_slots == 6 * m


def test_one_tick_of_delay_costs_a_slot_and_no_time():
    prompt, delayed = Schedule(8, 6, 32, 0), Schedule(8, 6, 32, 1)
    assert delayed.slots == prompt.slots + 1
    assert delayed.bubble == prompt.bubble == pytest.approx(7 / 192)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((4, 1, 6), r"6 micro-batches do not divide over 4 .*4, 8"), ((4, 1, 2), "nearest: 4"), ((0, 1, 1), "at least 1")],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        Schedule(*sizes)


@pytest.mark.parametrize(
    ("attribute", "wrong"),
    [
        ("forward_slots", lambda s: tuple(tuple(u % (s.slots) for u in range(s.units)) for _ in range(s.pipe))),
        ("backward_offset", lambda s: s.backward_offset - 1),
        ("warmup", lambda s: s.warmup + 1),
        ("weight_unit", lambda s: lambda tick: s.weight_unit(tick + 1)),
        ("gathered", lambda s: lambda tick: s.gathered(tick - 1)),
        ("scattered", lambda s: lambda tick: s.scattered(tick + 1)),
    ],
)
def test_validate_notices_a_broken_schedule(attribute, wrong):
    schedule = Schedule(4, 3, 16)
    broken = type("Broken", (Schedule,), {attribute: property(lambda self: wrong(schedule))})(4, 3, 16)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        validate(broken)

"""Where a device is in its step by the number of stamps that it has taken."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.observe.pulse import PASSED, Passed
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.train.stamps import StampEvents
from tests.views.fake_steps import fake_plan, stamps_of

SCHEDULE = Schedule(2, 2, 4, 1)
STAMPS = stamps_of(SCHEDULE)
FIRST = 10


class Told:
    """What an `Events` is told."""

    is_on = True

    def __init__(self):
        self.pulses, self.rows = [], []

    def each_pulse(self, tell):
        self.pulses.append(tell)

    def instant(self, name, *, text, **columns):
        self.rows.append((name, Passed.model_validate_json(text), columns))


class Counts:
    """A clock that has taken so many stamps."""

    is_of_host = True

    def __init__(self, taken):
        self.counts = taken

    def taken(self, device):
        return None if self.counts is None else self.counts[device]


def pulse(before, after, device=2):
    clock, told = Counts([before] * 4), Told()
    StampEvents(fake_plan(STAMPS, (2, 1, 2), [device], clock), told, 1).begin(FIRST - 1)
    clock.counts = [after] * 4
    (tell,) = told.pulses
    tell()
    ((name, passed, columns),) = told.rows
    assert name == PASSED and columns["device"] == device and columns["lane"] == "compute" and passed.of == STAMPS.count
    return passed, columns


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 5), st.integers(1, STAMPS.count - 1), st.integers(0, 1000))
def test_inside_a_step_it_is_in_the_span_of_the_next_stamp(steps, stamps, before):
    passed, columns = pulse(before, before + steps * STAMPS.count + stamps)
    assert (passed.stamps, columns["step"]) == (stamps, FIRST + steps)
    ends = STAMPS.end[STAMPS.end >= stamps]
    (span,) = np.flatnonzero(STAMPS.end == ends.min())
    assert (passed.name, passed.lane) == (STAMPS.names[STAMPS.name[span]], STAMPS.lanes[STAMPS.lane[span]])
    micro_batch, chunk = STAMPS.units(1)
    assert (columns["microbatch"], columns["chunk"]) == (micro_batch[span], chunk[span])
    assert columns["tick"] == (STAMPS.tick[span] if 0 <= STAMPS.tick[span] <= SCHEDULE.length else -1)


@pytest.mark.parametrize(("steps", "expected"), [(0, (FIRST, 0)), (1, (FIRST, STAMPS.count)), (3, (FIRST + 2, STAMPS.count))])
def test_between_two_steps_the_one_before_is_done(steps, expected):
    passed, columns = pulse(7, 7 + steps * STAMPS.count)
    assert (columns["step"], passed.stamps, passed.name, passed.lane) == (*expected, "", "")


def test_where_stamps_are_not_counted_nothing_is_told():
    told = Told()
    StampEvents(fake_plan(STAMPS, (2, 1, 2), [0], Counts(None)), told, 1).begin(0)
    for tell in told.pulses:
        tell()
    assert told.rows == []

"""Every moment of a job is booked once, whatever its processes tell."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.observe.booked import KINDS
from megascale_jax.views.booking import CODES, NOTHING, ORDER, book

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(-2, 12), st.sampled_from(sorted(CODES))), max_size=30)
SHIFT_NS = 1_700_000_000_123_456_789


def booked(spans, shift=0):
    begin = np.array([begin + shift for begin, _, _ in spans], np.int64)
    end = np.array([begin + lasted + shift for begin, lasted, _ in spans], np.int64)
    return book(begin, end, np.array([CODES[name] for _, _, name in spans], np.int8))


def at_each_moment(spans):
    """What counts in each unit of time, the plain way."""
    real = [(begin, begin + lasted, CODES[name]) for begin, lasted, name in spans if lasted >= 0]
    first, last = min((span[0] for span in real), default=0), max((span[1] for span in real), default=0)
    return [min((code for begin, end, code in real if begin <= at < end), default=CODES[NOTHING]) for at in range(first, last)]


@settings(deadline=None)
@given(SPANS)
def test_every_moment_is_what_comes_first_in_the_order(spans):
    found, wanted = booked(spans), at_each_moment(spans)
    shown = np.repeat(found.codes, np.diff(found.edges_ns)).tolist()
    assert shown == wanted
    for name, lasted in found.activities_ns().items():
        assert lasted == wanted.count(CODES[name])


@settings(deadline=None)
@given(SPANS, st.randoms())
def test_classes_sum_to_the_wall_time_to_the_nanosecond_in_any_order(spans, random):
    found = booked(spans, SHIFT_NS)
    assert sum(found.booked_ns().values()) == found.wall_ns == len(at_each_moment(spans))
    assert (np.diff(found.edges_ns) > 0).all() and (np.diff(found.codes) != 0).all(), "no overlap, no stretch cut in two"
    segments = list(found.segments())
    assert all(one.end_ns == other.begin_ns for one, other in pairwise(segments))
    shuffled = random.sample(spans, len(spans))
    other = booked(shuffled, SHIFT_NS)
    assert np.array_equal(found.edges_ns, other.edges_ns) and np.array_equal(found.codes, other.codes)


@settings(deadline=None)
@given(SPANS, st.integers(-5, 60), st.integers(-5, 60))
def test_a_part_is_booked_as_it_is_in_the_whole(spans, begin, end):
    wanted, first = at_each_moment(spans), min((span[0] for span in spans if span[1] >= 0), default=0)
    part = wanted[max(begin - first, 0) : max(end - first, 0)] if begin <= end else []
    found = booked(spans).activities_ns(begin, end) if begin <= end else dict.fromkeys(CODES, 0)
    assert found == {name: part.count(code) for name, code in CODES.items()}


@settings(deadline=None)
@given(SPANS, st.integers(1, 50))
def test_shares_of_equal_pieces_are_those_of_the_whole(spans, bins):
    found = booked(spans, SHIFT_NS)
    shares = found.shares(bins)
    if not found.wall_ns:
        assert shares.size == 0
        return
    assert np.allclose(shares.sum(axis=1), 1)
    whole = np.array([found.booked_ns()[kind] for kind in KINDS]) / found.wall_ns
    assert np.allclose(shares.mean(axis=0), whole)


def test_every_activity_has_a_class():
    assert {kind for _, kind in ORDER} == set(KINDS)

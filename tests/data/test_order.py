"""The order of a mixture: fair at every point, exact at any point, whatever the weights and their changes."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.data.mixture import MAX_PERIOD, make_order, make_phases
from megascale_jax.data.order import MixtureOrder, Phase, SkippingOrder, fair_period, past_phases
from megascale_jax.errors import DataError

weights = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any).map(lambda w: tuple(x // math.gcd(*w) for x in w))


def phases_of(lists: list[tuple[int, ...]], lengths: list[int]) -> list[Phase]:
    begins = np.cumsum([0, *lengths])
    return [Phase(int(begin), phase) for begin, phase in zip(begins, lists, strict=False)]


@st.composite
def schedules(draw):
    """Phases over one number of sources, and the rows of each."""
    size = draw(st.integers(1, 4))
    one = st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any).map(lambda w: tuple(x // math.gcd(*w) for x in w))
    lists = draw(st.lists(one, min_size=1, max_size=4))
    lengths = draw(st.lists(st.integers(1, 60), min_size=len(lists), max_size=len(lists)))
    return phases_of(lists, lengths), draw(st.lists(st.integers(1, 12), min_size=size, max_size=size))


@settings(max_examples=300)
@given(weights)
def test_each_source_is_within_one_of_its_share_after_any_number_of_samples(own):
    total = sum(own)
    period = np.tile(fair_period(own), 2)
    for source, weight in enumerate(own):
        given_so_far = np.cumsum(period == source)
        places = np.arange(1, len(period) + 1)
        assert (np.abs(given_so_far * total - places * weight) < total).all()  # in whole numbers: no rounding
        assert given_so_far[total - 1] == weight


@settings(max_examples=40, deadline=None)
@given(schedules(), st.booleans(), st.integers(0, 5))
def test_order_is_what_walking_from_the_start_gives(schedule, shuffle, seed):
    """Also: no sample of a source is repeated or skipped over changes, and every place can be had directly."""
    phases, rows = schedule
    order = make_order([(str(index), count) for index, count in enumerate(rows)], phases, seed, shuffle)
    assert isinstance(order, MixtureOrder)
    samples = np.arange(phases[-1].begin + 70)
    sources, places = order.places(samples)
    drawn = [0] * len(rows)
    for sample in samples:
        phase = [phase for phase in phases if phase.begin <= sample][-1]
        period = fair_period(phase.weights)
        source = period[(sample - phase.begin) % len(period)]
        assert (sources[sample], places[sample]) == (source, drawn[source])
        drawn[source] += 1
    ids = order.ids(samples)
    picked = samples[::7][::-1]
    assert np.array_equal(order.ids(picked), ids[picked])
    begins = np.cumsum([0, *rows])
    for source, count in enumerate(rows):
        own = ids[sources == source] - begins[source]
        epochs = [own[epoch * count : (epoch + 1) * count] for epoch in range(len(own) // count)]
        assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
        if not shuffle:
            assert np.array_equal(own, np.arange(len(own)) % count)


@settings(max_examples=50, deadline=None)
@given(schedules(), st.integers(0, 200))
def test_past_decides_nothing_less_and_the_future_nothing_more(schedule, samples):
    phases, rows = schedule
    order = make_order([(str(index), count) for index, count in enumerate(rows)], phases, 0, False)
    before = order.before(samples)
    assert np.array_equal(before.ids(np.arange(samples)), order.ids(np.arange(samples)))
    kept = past_phases(phases, samples)
    assert all(phase.begin < samples for phase in kept[1:]) and all(phase.begin >= samples for phase in phases[len(kept) :])


def test_far_samples_are_exact():
    order = make_order([("a", 7), ("b", 5)], [Phase(0, (7, 3)), Phase(10**15 + 3, (1, 0))], 0, False)
    assert isinstance(order, MixtureOrder)
    far = 10**15 - 10
    sources, places = order.places(np.array([far]))
    assert places[0] == [far // 10 * 7, far // 10 * 3][sources[0]]
    _, places = order.places(np.array([10**15 + 3]))
    assert places[0] == 10**15 // 10 * 7 + (fair_period((7, 3))[:3] == 0).sum()


def test_sources_are_shuffled_apart_and_by_the_seed():
    sizes = [("a", 50), ("b", 50)]
    one, other = (make_order(sizes, [Phase(0, (1, 1))], seed, True).ids(np.arange(200)) for seed in (0, 1))
    assert not np.array_equal(one, other)
    assert not np.array_equal(one[one < 50], one[one >= 50] - 50)
    reordered = make_order([("b", 50), ("a", 50)], [Phase(0, (1, 1))], 0, True).ids(np.arange(200))
    assert np.array_equal(one[one < 50], reordered[reordered >= 50] - 50)


@pytest.mark.parametrize(
    ("given_weights", "whole"),
    [
        ({"b": 0.3, "a": 0.7}, (7, 3)),
        ({"a": 2, "b": 4.0}, (1, 2)),
        ({"a": 0.1, "b": 0.2, "c": 0.0}, (1, 2, 0)),
        ({"a": 1e-4, "b": 1}, (1, 10000)),
    ],
)
def test_weights_are_the_decimal_numbers_that_they_were_written_as(given_weights, whole):
    assert make_phases(given_weights, {}) == (Phase(0, whole),)
    assert all(Fraction(w, sum(whole)) >= 0 for w in whole)


def test_changes_keep_what_they_leave_out_and_vanish_when_nothing_changes():
    phases = make_phases(
        {"a": 1, "b": 1, "c": 2}, {320: {"b": 2}, 64: {"a": 1.0}, 640: {"a": 3, "b": 3, "c": 6}, 960: {"a": 1, "c": 0, "b": 0}}
    )
    assert phases == (Phase(0, (1, 1, 2)), Phase(320, (1, 2, 2)), Phase(640, (1, 1, 2)), Phase(960, (1, 0, 0)))


@pytest.mark.parametrize(
    ("start", "changes", "message"),
    [
        ({"a": -1.0, "b": 2}, {}, "must be at least 0"),
        ({"a": 0.0}, {}, "not all 0"),
        ({"a": 1}, {5: {"a": 0.0}}, "from sample 5 on must be"),
        ({"a": 1, "b": 1}, {5: {"x": 1.0}}, "names x; the sources are a, b"),
        ({"a": 0.123457, "b": 1}, {}, f"more than {MAX_PERIOD:,}. Round them"),
    ],
)
def test_weights_that_cannot_be_are_refused(start, changes, message):
    with pytest.raises(DataError, match=message):
        make_phases(start, changes)


ranges = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 40)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=6)


@settings(max_examples=100, deadline=None)
@given(schedules(), ranges)
def test_an_order_with_ranges_left_out_is_the_whole_one_without_them(schedule, skip):
    phases, rows = schedule
    order = make_order([(str(index), count) for index, count in enumerate(rows)], phases, 3, False)
    whole = np.arange(300)
    left = np.array([sample for sample in whole if not any(begin <= sample < end for begin, end in skip)], np.int64)
    skipping = SkippingOrder(order, skip)
    kept = np.arange(len(left))
    assert np.array_equal(skipping.samples(kept), left)
    assert np.array_equal(skipping.ids(kept[::-3]), order.ids(left[::-3]))
    assert [skipping.num_kept(int(sample)) for sample in whole] == [int((left < sample).sum()) for sample in whole]

"""Outliers beside the median."""

from hypothesis import given
from hypothesis import strategies as st

from megascale_jax.cluster.diagnose.judge import compare

near = st.floats(0.95, 1.05)


def named(values):
    return {f"node-{index}": value for index, value in enumerate(values)}


@given(st.lists(near, min_size=3, max_size=50))
def test_noise_below_a_tenth_has_no_outlier(values):
    assert not compare(named(values), "TFLOP/s").slow


@given(st.lists(near, min_size=2, max_size=50), st.integers(0, 49), st.floats(0.01, 0.7))
def test_one_slow_by_30_percent_is_found_and_only_that(values, place, slow):
    place %= len(values)
    rates = named([*values[:place], slow, *values[place:]])
    found = compare(rates, "TFLOP/s")
    assert set(found.slow) == {f"node-{place}"} and "below the median" in found.slow[f"node-{place}"]


def test_a_fast_one_is_no_outlier():
    assert not compare(named([1.0, 1.0, 1.0, 3.0]), "GB/s").slow


def test_a_wide_spread_widens_the_limit():
    assert not compare(named([5.0, 6.0, 10.0, 14.0, 15.0]), "GB/s", floor=0.3).slow.keys() - {"node-0"}
    assert not compare(named([6.0, 8.0, 10.0, 14.0, 15.0]), "GB/s").slow  # MAD 4: 6 is not below 10 - 4


def test_too_few_need_a_baseline():
    assert "too few" in compare(named([1.0, 2.0]), "GB/s").problem
    found = compare(named([1.0, 2.0]), "GB/s", baseline=2.0)
    assert not found.problem and set(found.slow) == {"node-0"}
    assert "1 to compare" in compare(named([1.0]), "GB/s").problem

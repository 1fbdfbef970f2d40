"""Formulas against each other and against drawn failures."""

import math

import pytest

from megascale_jax.sim.faults.case import DAY_NS, SECOND_NS
from megascale_jax.sim.faults.closed_forms import best_interval_s, daly_s, expected_ettr, meta_ettr, renewal_ettr, young_s
from megascale_jax.sim.faults.draws import draw
from tests.sim.faults.made_case import made_case
from tests.sim.faults.test_fast import of

HOURS = 3600.0


def test_young_and_daly_are_the_textbooks():
    assert young_s(30.0, 4.1 * HOURS) / 60 == pytest.approx(15.7, abs=0.05)
    assert young_s(300.0, 4.1 * HOURS) / 60 == pytest.approx(50, abs=0.5)
    assert daly_s(30.0, 4.1 * HOURS) == pytest.approx(young_s(30.0, 4.1 * HOURS) - 30.0, rel=0.02)
    assert daly_s(1000.0, 400.0) == 400.0


@pytest.mark.parametrize("blocking_s", [1.0, 5.0, 30.0, 300.0])
@pytest.mark.parametrize("mtbf_h", [1.0, 4.1, 24.0])
def test_the_best_interval_by_trying_all_is_within_a_tenth_of_dalys(blocking_s, mtbf_h):
    rate = 1000 * 24 / mtbf_h / 8
    case = made_case({"gpu": {"failures_per_1000_node_days": rate, "heals": 1.0}}, blocking_s=blocking_s, upload_s=0.0)
    assert case.mtbf_s == pytest.approx(mtbf_h * HOURS)
    assert best_interval_s(case) == pytest.approx(daly_s(blocking_s, case.mtbf_s), rel=0.1)


def test_the_best_interval_holds_against_drawn_failures():
    """The same failures with the best interval, half and twice of it."""
    base = {"gpu": {"failures_per_1000_node_days": 700.0, "heals": 1.0}}
    best = best_interval_s(made_case(base, blocking_s=20.0, upload_s=0.0))
    ratio = {}
    for factor in (0.4, 1.0, 2.5):
        case = made_case(base, blocking_s=20.0, upload_s=0.0, interval_s=factor * best)
        ratio[factor] = of(case, [draw(case, seed, 100 * DAY_NS) for seed in range(30)], 100 * DAY_NS).mean_goodput
    assert ratio[1.0] > max(ratio[0.4], ratio[2.5])


@pytest.mark.parametrize("upload_s", [0.0, 120.0])
@pytest.mark.parametrize("rate", [50.0, 800.0, 4000.0])
def test_the_renewal_form_is_the_mean_of_drawn_jobs(rate, upload_s):
    case = made_case({"gpu": {"failures_per_1000_node_days": rate, "heals": 1.0}}, upload_s=upload_s)
    days = 60 if rate > 100 else 600
    found = of(case, [draw(case, seed, days * DAY_NS) for seed in range(30)], days * DAY_NS)
    error = found.goodput.std() / 30**0.5
    assert found.mean_goodput == pytest.approx(expected_ettr(case), abs=4 * error + 1e-3)


def test_hidden_failures_and_replaced_nodes_are_in_the_mean():
    kinds = {"a": {"failures_per_1000_node_days": 200.0, "found": 0.5}, "b": {"shows": "silent", "heals": 0.5, "detect_s": None}}
    case = made_case(kinds, spares=20)
    found = of(case, [draw(case, seed, 100 * DAY_NS) for seed in range(20)], 100 * DAY_NS)
    assert found.mean_goodput == pytest.approx(expected_ettr(case), abs=0.006)


def test_the_renewal_form_is_metas_where_failures_are_rare():
    for rate in (1e-7, 1e-6):
        assert renewal_ettr(rate, 100.0, 200.0, 1000.0, 0.0) == pytest.approx(meta_ettr(rate, 300.0, 1000.0, 0.0), abs=2e-6)
    assert renewal_ettr(0.0, 1.0, 1.0, 95.0, 5.0) == 0.95
    assert renewal_ettr(1.0, 100.0, 300.0, 1000.0, 0.0) == 0.0


def test_the_expectation_never_rises_with_the_rate():
    case = made_case()
    ratios = [expected_ettr(case, rate_factor=factor) for factor in (0.5, 1.0, 2.0, 50.0, 1e6)]
    assert ratios == sorted(ratios, reverse=True) and ratios[-1] == 0.0
    assert math.isinf(best_interval_s(made_case({"gpu": {"failures_per_1000_node_days": 0.0}})))
    assert expected_ettr(case, case.interval_ns / SECOND_NS) == expected_ettr(case)

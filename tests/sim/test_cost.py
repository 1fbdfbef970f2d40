"""Cost of a run: what is multiplied with what, and what it hangs on."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megascale_jax.config.price import Price
from megascale_jax.errors import ConfigError
from megascale_jax.sim.cost import Power, cost_of, tornado
from megascale_jax.sim.faults.closed_forms import expected_ettr
from tests.sim.faults.made_case import made_case

PRICE = Price(price_per_gpu_hour=2.5, date="2025-06-01", device="X", source="made")


def test_hours_energy_and_money_of_a_run():
    cost = cost_of(10 * 86_400, 100, 4, 8, tokens=2e12, power=Power(10.0, 1.2), price=PRICE)
    assert (cost.gpus, cost.spare_gpus, cost.wall_days) == (800, 32, 10.0)
    assert cost.gpu_hours == 104 * 8 * 240 and cost.gpu_hours_per_trillion_tokens == cost.gpu_hours / 2
    assert cost.energy_mwh == pytest.approx(104 * 10 * 1.2 * 240 / 1000)
    assert cost.amount == cost.gpu_hours * 2.5 and cost.price == PRICE


def test_nothing_is_assumed_of_power_or_price():
    cost = cost_of(3600, 1, 0, 8)
    assert cost.energy_mwh is None and cost.amount is None and cost.gpu_hours_per_trillion_tokens is None


@pytest.mark.parametrize(("kw", "overhead"), [(0.0, 1.0), (-1.0, 1.0), (5.0, 0.9)])
def test_a_power_that_cannot_be_is_refused(kw, overhead):
    with pytest.raises(ConfigError, match="expected more than 0 kW"):
        Power(kw, overhead)


@given(st.floats(1, 1e7), st.integers(1, 5000), st.integers(0, 100))
def test_cost_is_linear_in_time_and_spares_are_paid(wall_s, nodes, spares):
    one, two = cost_of(wall_s, nodes, spares, 8, price=PRICE), cost_of(2 * wall_s, nodes, spares, 8, price=PRICE)
    assert one.amount is not None and two.amount == pytest.approx(2 * one.amount)
    assert cost_of(wall_s, nodes, spares + 1, 8).gpu_hours > one.gpu_hours


def test_a_tornado_goes_the_right_ways_and_by_the_right_amounts():
    case = made_case({"gpu": {"failures_per_1000_node_days": 900.0}})
    found = {one.name: one for one in tornado(case)}
    assert found["MFU"].lower == pytest.approx(1 / 0.9) and found["MFU"].higher == pytest.approx(1 / 1.1)
    assert found["goodput"].lower > 1 > found["goodput"].higher >= expected_ettr(case), "no goodput above 1"
    failures = found["interruptions"]
    assert failures.lower < 1 < failures.higher
    assert failures.higher == pytest.approx(expected_ettr(case) / expected_ettr(case, rate_factor=1.1))
    spans = [one.span for one in tornado(case)]
    assert spans == sorted(spans, reverse=True)


def test_a_job_that_never_keeps_a_step_has_no_cost():
    with pytest.raises(ConfigError, match="never keeps a step"):
        tornado(made_case({"gpu": {"failures_per_1000_node_days": 1e8}}))

"""Time-outs against link flaps: closed form, simulation, plateau."""

import numpy as np
import pytest

from megascale_jax.errors import ConfigError
from megascale_jax.sim.flap import EXPONENTS, Flaps, Retries, expected, plateau, simulated

LIMIT_S = 1800.0
FLAPS = Flaps()


def test_the_default_of_nccl_gives_up_after_about_half_a_minute():
    retries = Retries.of(20, 7, LIMIT_S)
    assert retries.tries_s[0] == pytest.approx(4.295, abs=1e-3) and retries.tries_s[-1] == pytest.approx(30.06, abs=1e-2)
    assert retries.error_s == pytest.approx(34.36, abs=1e-2)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("exponent", [14, 18, 20, 22, 26])
def test_simulation_agrees_with_the_closed_form(exponent, adaptive):
    retries = Retries.of(exponent, 7, LIMIT_S, adaptive=adaptive)
    exact = expected(retries, FLAPS)
    drawn, error = simulated(retries, FLAPS, 20_000, np.random.default_rng(exponent))
    assert abs(drawn.total_s - exact.total_s) < 3 * error
    assert drawn.death == pytest.approx(exact.death, abs=3 * np.sqrt(exact.death * (1 - exact.death) / 20_000) + 1e-9)


def test_adaptive_tries_come_sooner_and_end_at_the_same_time():
    plain, adaptive = Retries.of(22, 7, LIMIT_S), Retries.of(22, 7, LIMIT_S, adaptive=True)
    assert adaptive.tries_s[0] < 0.1 < plain.tries_s[0]
    assert adaptive.tries_s[-1] == plain.tries_s[-1] and adaptive.error_s == plain.error_s
    assert np.diff(adaptive.tries_s).max() <= plain.tries_s[0] * (1 + 1e-9)


def test_the_optimum_is_a_plateau_with_adaptive_retransmission_and_a_point_without():
    spans = {}
    for adaptive in (False, True):
        costs = np.array([expected(Retries.of(exponent, 7, LIMIT_S, adaptive=adaptive), FLAPS).total_s for exponent in EXPONENTS])
        first, last = plateau(costs)
        spans[adaptive] = last - first
        assert costs[0] > 100 * costs.min() and costs[first - 1] > 1.1 * costs.min()
        assert (adaptive and costs[-1] > costs.min()) or costs[-1] > 100 * costs.min()
    assert spans[True] >= 3 > spans[False]


def test_a_flap_that_never_ends_costs_the_whole_wait_and_the_restart():
    retries = Retries.of(20, 7, LIMIT_S)
    assert expected(retries, Flaps(broken=1.0)).total_s == pytest.approx(retries.error_s + 1500)
    hung = Retries.of(31, 7, LIMIT_S)
    assert not hung.tries_s.size and expected(hung, FLAPS).total_s == pytest.approx(LIMIT_S + 1500)


def test_what_no_nic_takes_is_refused():
    with pytest.raises(ConfigError, match="got time-out exponent 32"):
        Retries.of(32, 7, LIMIT_S)
    with pytest.raises(ConfigError, match="got flaps of 0 s"):
        Flaps(mean_s=0)

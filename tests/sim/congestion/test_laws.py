"""DCQCN's alpha and rate, Swift's window: one flow by itself, against what the papers say happens, exactly."""

import numpy as np
import pytest

from megascale_jax.config.load import load_system
from megascale_jax.sim.congestion import engine, laws
from megascale_jax.sim.congestion.engine import Load, Setting
from megascale_jax.sim.congestion.fabric import Fabric
from megascale_jax.sim.congestion.parameters import dcqcn

FABRIC = Fabric(load_system("a100").network, 8, 2)
US = engine.PS_PER_US
ONE = Load(np.array([0]), np.array([7]), np.array([0]), np.array([10**9]), np.zeros(1))


def flow_of(algorithm):
    setting = Setting.of(algorithm, FABRIC)
    world, law = engine._world(FABRIC, ONE, setting, 0, 0.0, 0), engine._law(FABRIC, setting)
    return world.flows, law


def test_alpha_decays_by_one_minus_g_a_period():
    flows, law = flow_of("dcqcn-paper")
    for periods in (1, 2, 40, 1000):
        laws.decay_alpha(flows, 0, law, periods * 55 * US + 17)
        assert flows.alpha[0] == pytest.approx((1 - 1 / 256) ** periods, rel=1e-12)


def test_alpha_rises_by_g_in_the_period_of_a_cnp_only():
    flows, law = flow_of("dcqcn-paper")
    laws.cut_rate(flows, 0, law, 0)
    laws.decay_alpha(flows, 0, law, 3 * 55 * US)
    keep = 1 - 1 / 256
    assert flows.alpha[0] == pytest.approx((keep + 1 / 256) * keep**2, rel=1e-12)


def test_the_first_cnp_halves_the_rate_and_another_one_within_the_gap_changes_nothing():
    flows, law = flow_of("dcqcn-paper")
    laws.cut_rate(flows, 0, law, 100 * US)
    assert flows.rate[0] == pytest.approx(law.line_rate / 2) and flows.goal[0] == pytest.approx(law.line_rate)
    laws.cut_rate(flows, 0, law, 149 * US)
    assert flows.rate[0] == pytest.approx(law.line_rate / 2)


def test_recovery_halves_the_distance_five_times_then_adds_then_adds_more():
    flows, law = flow_of("dcqcn-paper")
    laws.cut_rate(flows, 0, law, 0)
    flows.goal[0] = law.line_rate / 2  # so that there is something to add to
    flows.rate[0], goal = law.line_rate / 4, law.line_rate / 2
    distances = []
    for rounds in range(1, 5):
        laws.raise_rate(flows, 0, law, rounds * 55 * US)
        distances.append((goal - flows.rate[0]) / goal)
    assert distances == pytest.approx([0.25, 0.125, 0.0625, 0.03125]) and flows.goal[0] == pytest.approx(goal)
    laws.raise_rate(flows, 0, law, 5 * 55 * US)
    assert flows.goal[0] == pytest.approx(goal + law.additive_rate), "timer rounds reach F, byte rounds have not"
    flows.byte_rounds[0] = 6
    laws.raise_rate(flows, 0, law, 6 * 55 * US)
    assert flows.goal[0] == pytest.approx(goal + law.additive_rate + law.hyper_rate)


def test_rounds_made_up_for_later_are_those_of_the_timer():
    often, law = flow_of("dcqcn-paper")
    once, _ = flow_of("dcqcn-paper")
    for flows, times in ((often, range(55, 55 * 9, 5)), (once, [55 * 9 - 5])):
        laws.cut_rate(flows, 0, law, 0)
        for time in times:
            laws.raise_rate(flows, 0, law, time * US)
    assert often.rate[0] == once.rate[0] and often.timer_rounds[0] == once.timer_rounds[0]


def test_swift_grows_by_a_packet_a_window_and_cuts_once_a_round_trip_in_proportion_to_how_late_it_is():
    flows, law = flow_of("swift")
    flows.window[0] = 200.0  # above the windows that get a longer target
    target = laws.target_delay(flows, 0, law)
    assert target == pytest.approx(23 * US)
    for _ in range(200):
        laws.change_window(flows, 0, law, 0, 10 * US, 4096, False)
    assert flows.window[0] == pytest.approx(201, abs=0.01)
    window = flows.window[0]
    laws.change_window(flows, 0, law, 1000 * US, 30 * US, 4096, False)
    assert flows.window[0] == pytest.approx(window * (1 - 0.8 * 7 / 30))
    laws.change_window(flows, 0, law, 1029 * US, 30 * US, 4096, False)
    assert flows.window[0] == pytest.approx(window * (1 - 0.8 * 7 / 30)), "not twice in a round trip"
    laws.change_window(flows, 0, law, 2000 * US, 1000 * US, 4096, False)
    assert flows.window[0] == pytest.approx(window * (1 - 0.8 * 7 / 30) * 0.5), "at most by half"


def test_swift_s_target_is_longest_for_small_windows():
    flows, law = flow_of("swift")
    found = []
    for window in (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0):
        flows.window[0] = window
        found.append(laws.target_delay(flows, 0, law) / US)
    assert found[:2] == pytest.approx([103, 103]) and found[-2:] == pytest.approx([23, 23])
    assert found == sorted(found, reverse=True)


def test_the_hybrid_is_swift_until_a_packet_is_marked_and_then_cuts_as_dcqcn():
    hybrid, law = flow_of("hybrid")
    swift, plain = flow_of("swift")
    for flows, one in ((hybrid, law), (swift, plain)):
        for time in range(1, 50):
            laws.change_window(flows, 0, one, time * US, (15 + time % 20) * US, 4096, False)
    assert hybrid.window[0] == swift.window[0]
    before = hybrid.window[0]
    laws.change_window(hybrid, 0, law, 500 * US, 10 * US, 4096, True)
    assert hybrid.window[0] == pytest.approx(before / 2), "alpha is 1 at first"
    laws.change_window(hybrid, 0, law, 505 * US, 10 * US, 4096, True)
    assert hybrid.window[0] == pytest.approx(before / 2)


def test_nscc_s_four_cases():
    for is_late, is_marked, grows in ((False, False, 1), (True, False, 1), (False, True, 0), (True, True, -1)):
        flows, law = flow_of("nscc")
        before, delay = flows.window[0], (30 if is_late else 9) * US
        laws.change_window(flows, 0, law, 10_000 * US, delay, 4096, is_marked)
        assert np.sign(flows.window[0] - before) == grows, (is_late, is_marked)


def test_both_sets_of_dcqcn_are_named_and_differ():
    paper, firmware = dcqcn("dcqcn-paper", 200), dcqcn("dcqcn-firmware", 200)
    assert (paper[0].g, paper[0].fast_rounds, paper[1].least_bytes) == (1 / 256, 5, 25e3)
    assert (firmware[0].g, firmware[0].fast_rounds, firmware[1].least_bytes) == (5 / 1024, 1, 800e3)

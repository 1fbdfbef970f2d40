"""Packets over a fabric: exact times, conservation, fair shares, delays at their target, pauses in place of drops."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale_jax.config.load import load_system
from megascale_jax.errors import ConfigError
from megascale_jax.sim.congestion import workloads
from megascale_jax.sim.congestion.engine import Load, Setting, base_rtt_s, simulate
from megascale_jax.sim.congestion.fabric import Fabric
from megascale_jax.sim.congestion.parameters import ALGORITHMS

CONFIG = load_system("a100").network
SMALL = Fabric(CONFIG, 8, 2)


def load_of(source, target, size, start_s=None, spine=None):
    number = len(source)
    zeros = np.zeros(number)
    return Load(
        np.array(source),
        np.array(target),
        np.zeros(number, int) if spine is None else np.array(spine),
        np.array(size),
        zeros if start_s is None else np.array(start_s, float),
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_packet_takes_the_time_of_its_links(algorithm):
    far = simulate(SMALL, load_of([0], [7], [4096]), Setting.of(algorithm, SMALL))
    near = simulate(SMALL, load_of([0], [3], [4096]), Setting.of(algorithm, SMALL))
    nic, uplink, hop = 4096 * 8 / 200e9, 4096 * 8 / 400e9, 1e-6
    assert far.completion_s[0] == pytest.approx(2 * nic + 2 * uplink + 4 * hop, rel=1e-9)
    assert near.completion_s[0] == pytest.approx(2 * nic + 2 * hop, rel=1e-9)
    assert base_rtt_s(SMALL) == pytest.approx(far.completion_s[0] + 4 * hop)


def test_a_lone_flow_fills_its_link():
    for algorithm in ALGORITHMS:
        size = 4_000_000
        outcome = simulate(SMALL, load_of([0], [7], [size]), Setting.of(algorithm, SMALL))
        least = size * 8 / 200e9
        assert least < outcome.completion_s[0] < 1.02 * least + 5e-6, algorithm


@given(st.data())
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_no_packet_is_lost_or_made_and_the_longest_link_bounds_the_time(data):
    number = data.draw(st.integers(1, 12))
    hosts = st.integers(0, 7)
    source = np.array([data.draw(hosts) for _ in range(number)])
    target = np.array([data.draw(hosts.filter(lambda host, own=own: host != own)) for own in source])
    size = np.array([data.draw(st.integers(1, 300_000)) for _ in range(number)])
    setting = Setting.of(data.draw(st.sampled_from(ALGORITHMS)), SMALL)
    outcome = simulate(SMALL, load_of(source, target, size, spine=target % SMALL.spines), setting)
    assert outcome.received.tolist() == size.tolist()
    assert outcome.packets_sent == outcome.packets_received == np.ceil(size / 4096).sum()
    assert outcome.dropped == 0
    busiest = max(size[target == host].sum() for host in range(8))
    assert outcome.end_s > busiest * 8 / 200e9


def test_two_dcqcn_flows_converge_to_the_fair_share():
    load = load_of([0, 1], [7, 7], [10**9, 10**9], [2e-3, 0.0])
    outcome = simulate(SMALL, load, Setting.of("dcqcn-paper", SMALL), limit_s=40e-3, sample_s=2e-3, samples=21)
    rates = np.diff(outcome.samples.received, axis=0) * 8 / 2e-3 / 1e9
    assert rates[0].tolist() == pytest.approx([0, 200], rel=0.01), "one alone"
    assert abs(rates[1, 0] - rates[1, 1]) > 15, "then both are cut, and recover"
    assert rates[-5:].mean(axis=0) == pytest.approx([100, 100], rel=0.08)


@pytest.mark.parametrize("senders", [2, 4])
def test_swift_s_delay_settles_at_its_target(senders):
    load = load_of(range(4, 4 + senders), [0] * senders, [10**9] * senders, spine=np.arange(senders) % 2)
    outcome = simulate(SMALL, load, Setting.of("swift", SMALL), limit_s=8e-3, sample_s=2e-5, samples=400)
    late = outcome.samples.delay_s[200:]
    rates = np.diff(outcome.samples.received[200:], axis=0).sum(axis=0)
    window = 200e9 / senders / 8 * late.mean() / 4096
    steep = 80e-6 / (1 / np.sqrt(0.1) - 1 / np.sqrt(100))
    target = 23e-6 + min(max(steep / np.sqrt(window) - steep / 10, 0), 80e-6)
    assert late.mean() == pytest.approx(target, rel=0.08)
    assert rates / rates.sum() == pytest.approx(np.full(senders, 1 / senders), abs=0.1)


def narrow(buffer_mb):
    return Fabric(CONFIG.model_copy(update={"buffer_mb": buffer_mb}), 16, 2)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lossless_mode_pauses_and_drops_nothing_and_without_it_packets_are_dropped(algorithm):
    fabric = narrow(8.0)
    load = workloads.incast(fabric, 15, 400_000, np.random.default_rng(0))
    lossless = simulate(fabric, load, Setting.of(algorithm, fabric))
    assert lossless.dropped == 0 and lossless.pauses.sum() > 0 and lossless.paused_s.sum() > 0
    lossy = simulate(fabric, load, Setting.of(algorithm, fabric).lossy())
    assert lossy.dropped > 0 and lossy.pauses.sum() == 0
    assert lossy.packets_sent == lossy.packets_received + lossy.dropped
    assert lossy.received.tolist() == load.size.tolist(), "sent again until all has come"


def test_pauses_hold_up_a_flow_that_has_no_part_in_the_incast():
    fabric = narrow(8.0)
    load = workloads.victim(fabric, 7, 400_000, np.random.default_rng(0))
    alone = load_of(load.source[:1], load.target[:1], load.size[:1])
    setting = Setting.of("dcqcn-paper", fabric)
    held_up = simulate(fabric, load, setting)
    free = simulate(fabric, load, setting.lossy())
    least = simulate(fabric, alone, setting).completion_s[0]
    assert held_up.completion_s[0] > 1.3 * least
    assert held_up.pauses[: fabric.hosts].sum() + held_up.pauses[fabric.hosts :].sum() > 0 == free.pauses.sum()


def test_a_run_repeats_exactly_and_another_seed_marks_others():
    fabric = narrow(64.0)
    load = workloads.incast(fabric, 4, 2_000_000, np.random.default_rng(3))
    setting = Setting.of("dcqcn-paper", fabric)
    first, again, other = (simulate(fabric, load, setting, seed=seed) for seed in (1, 1, 2))
    assert first.completion_s.tolist() == again.completion_s.tolist() and first.events == again.events
    assert first.completion_s.tolist() != other.completion_s.tolist()


def test_flows_that_have_no_time_are_said_to_be_open():
    outcome = simulate(SMALL, load_of([0], [7], [10_000_000]), Setting.of("swift", SMALL), limit_s=1e-4)
    assert np.isnan(outcome.completion_s[0]) and 0 < outcome.received[0] < 10_000_000 and outcome.end_s == 1e-4


def test_impossible_fabrics_and_incasts_are_refused():
    with pytest.raises(ConfigError, match="got 9 hosts under 2 ToR switches"):
        Fabric(CONFIG, 9, 2)
    with pytest.raises(ConfigError, match="do not fill one uplink"):
        Fabric(CONFIG, 2, 2)
    with pytest.raises(ConfigError, match="got an incast of 8 hosts, expected 1 to 7"):
        workloads.incast(SMALL, 8, 1, np.random.default_rng(0))


def test_importing_the_simulator_imports_no_compiler():
    program = "import sys, megascale_jax.sim, megascale_jax.cli.main, megascale_jax.sim.placement; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.stdout.strip() == "False", done.stderr

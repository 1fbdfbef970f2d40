"""The driver's own decisions on virtual time: they agree with the arrays, and what only the driver decides is decided by it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from megascale_jax.cluster.diagnose.checks import Outcome as CheckOutcome
from megascale_jax.cluster.lifecycle import NodeStatus, Phase
from megascale_jax.config.cluster import ClusterConfig, SlowNodesConfig
from megascale_jax.observe.booked import KINDS
from megascale_jax.sim.faults import decisions
from megascale_jax.sim.faults.case import DAY_NS, SECOND_NS
from megascale_jax.sim.faults.decisions import decide
from megascale_jax.sim.faults.draws import Draws, draw
from tests.cluster.simulated import World
from tests.sim.faults.made_case import SLOW, made_case
from tests.sim.faults.test_fast import CASES, failures, of

HORIZON = 2 * DAY_NS
MANY = ClusterConfig(max_evictions=1000)


def agree(case, draws: Draws, end_ns: int = HORIZON, **more) -> None:
    slow, fast = decide(case, draws, end_ns, **more).outcome, of(case, [draws], end_ns, **more)
    assert sum(slow.booked_ns.values()) == slow.wall_ns
    for kind in KINDS:
        assert slow.booked_ns[kind][0] == pytest.approx(fast.booked_ns[kind][0], abs=1000), kind
    for name in ("incidents", "replaced", "gave_up"):
        assert getattr(slow, name)[0] == getattr(fast, name)[0], name
    assert slow.wall_ns[0] == pytest.approx(fast.wall_ns[0], abs=1000) and slow.is_finished[0] == fast.is_finished[0]


@pytest.mark.parametrize(
    "kinds",
    [
        {"a": {"heals": 1.0}},
        {"a": {"heals": 0.3}},
        {"a": {"shows": "hang", "detect_s": None}, "b": {"shows": "corrupt"}},
        {"a": {"shows": "silent", "heals": 0.5, "detect_s": None}},
        {"a": {"failures_per_1000_node_days": 20.0, "found": 0.5}},
    ],
)
def test_both_simulations_agree_to_the_nanosecond_on_the_same_draws(kinds):
    case = made_case(kinds, cluster=MANY, spares=3)
    for seed in range(3):
        agree(case, draw(case, seed, HORIZON))
    agree(case, draw(case, 3, 3 * HORIZON), 3 * HORIZON, need_steps=30_000)


def test_they_agree_where_spares_run_out_and_where_a_switch_takes_many_nodes():
    tor = {"tor": {"events_per_1000_group_days": 400.0, "group_nodes": 4, "outage_s": 400.0, "source": "made"}}
    short, long = ({"tor": tor["tor"] | {"outage_s": seconds}} for seconds in (5.0, 900.0))
    for correlated in (tor, short, long):
        case = made_case({"a": {}}, cluster=MANY, spares=1, correlated=correlated, recovery={"spare_supply_s": 900.0})
        for seed in range(3):
            agree(case, draw(case, seed, HORIZON))


@settings(deadline=None, max_examples=15)
@given(CASES)
def test_whatever_the_driver_decides_every_nanosecond_is_booked_once(case):
    outcome = decide(case, draw(case, 1, HORIZON), HORIZON).outcome
    assert sum(outcome.booked_ns.values()) == outcome.wall_ns == HORIZON
    assert all(spent >= 0 for spent in outcome.booked_ns.values())


def test_evictions_beyond_the_limit_are_refused_and_the_driver_gives_up():
    case = made_case(spares=4, cluster=ClusterConfig(max_evictions=2))
    draws = failures(case, 1000.0, 1500.0, 2000.0, heals=False)
    draws.ranks[:] = (0, 1, 2)
    decided = decide(case, draws, 20_000 * SECOND_NS)
    assert decided.outcome.gave_up[0] == 1 and decided.outcome.incidents[0] > 3
    assert any("node-2 should be evicted" in alarm and "evict it by hand" in alarm for alarm in decided.alarms)
    assert decided.evicted == ("node-0", "node-1") and "no step beyond" in decided.outcomes[0]
    free = made_case(spares=4, cluster=MANY)
    assert decide(free, draws, 20_000 * SECOND_NS).evicted == ("node-0", "node-1", "node-2")


def test_a_decision_of_the_policy_is_not_a_model_of_it(monkeypatch):
    """With a policy that never evicts, nothing here does either."""
    case = made_case()
    draws = failures(case, 1000.0, heals=False)
    assert decide(case, draws, 3000 * SECOND_NS).evicted == ("node-0",)
    real = decisions.apply

    def blind(state, event, config):
        return real(state, event.model_copy(update={"bad": {}}) if event.kind == "diagnosed" else event, config)

    monkeypatch.setattr(decisions, "apply", blind)
    assert decide(case, draws, 1300 * SECOND_NS).evicted == ()


def test_slow_nodes_are_isolated_at_a_save_one_by_one_and_only_when_told_to():
    case = made_case(
        {"gpu": {"failures_per_1000_node_days": 0.0}},
        spares=3,
        slow_nodes=SLOW | {"share": 1e-9},
        cluster=ClusterConfig(slow_nodes=SlowNodesConfig(action="act")),
    )
    draws = failures(case)
    draws.slow[:2] = True
    end = 20_000 * SECOND_NS
    decided = decide(case, draws, end)
    assert decided.isolated == 2 and set(decided.state.slow) == {"node-0", "node-1"}
    assert {one.stage for one in decided.state.slow.values()} == {"returned"}
    assert not {"node-0", "node-1"} & set(decided.state.seats)
    assert decided.outcome.booked_ns["recomputed"] == 0 and decided.outcome.incidents == 0
    observing = made_case({"gpu": {"failures_per_1000_node_days": 0.0}}, spares=3, slow_nodes=SLOW | {"share": 1e-9})
    watched = decide(observing, draws, end)
    assert watched.isolated == 0 and watched.outcome.steps < decided.outcome.steps
    assert watched.outcome.steps == pytest.approx(of(observing, [draws], end).steps)


CONFIG = ClusterConfig(lost_after_s=5.0, grace_s=5.0, wait_s=60.0, diagnose_s=30.0)


def test_the_whole_driver_decides_alike_in_its_simulated_cluster(tmp_path: Path):
    """Watcher, examination and journal of the real driver, polled on virtual time, against the same failures as events."""
    world = World(tmp_path, CONFIG, nodes=4, spares=3, total_steps=10_000)
    world.until_step(6)
    world.crash("node-2")  # its process ends, a restart heals
    world.until_step(12)
    world.sims["node-1"].finds = (CheckOutcome(check="disk", status="fail", reason="no space"),)
    world.crash("node-1")  # the checks find the node
    world.until_step(18)
    world.power_off("node-3")  # nothing is heard of it any more
    world.until_step(24)
    real = world.driver.state

    kinds = {"exit": {"shows": "exit"}, "silent": {"shows": "silent"}}
    case = made_case(kinds, nodes=4, spares=3, cluster=CONFIG)
    draws = failures(case, 1000.0, 2000.0, 3000.0, heals=False)
    draws.ranks[:], draws.kinds[:], draws.heals[:] = (2, 1, 3), (0, 0, 1), (True, False, False)
    simulated = decide(case, draws, 4000 * SECOND_NS).state

    assert real.phase == simulated.phase == Phase.RUNNING
    assert real.seats == simulated.seats == ("node-0", "node-4", "node-2", "node-5")
    for one, other in zip(real.incidents, simulated.incidents, strict=True):
        assert (one.named, one.evicted, one.is_planned) == (other.named, other.evicted, other.is_planned)
    for name in ("node-0", "node-2", "node-4", "node-5", "node-6"):
        assert real.nodes[name].status == simulated.nodes[name].status
    assert real.nodes["node-1"].status == NodeStatus.EVICTED == simulated.nodes["node-1"].status
    assert np.all([real.nodes[name].status == NodeStatus.LOST == simulated.nodes[name].status for name in ("node-3",)])

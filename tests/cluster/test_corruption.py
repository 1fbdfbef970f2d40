"""Silent corruption on virtual time: who is named, evicted, measured, and how often."""

import pytest

from megascale_jax.cluster.diagnose.checks import Outcome
from megascale_jax.cluster.lifecycle import NodeStatus
from megascale_jax.cluster.policy import apply, first_state
from tests.cluster.simulated import World
from tests.cluster.test_driver import CONFIG


@pytest.fixture
def world(tmp_path) -> World:
    world = World(tmp_path, CONFIG)
    world.until_step(12)
    return world


def replayed(world: World):
    state = first_state(world.shapes)
    for event in world.journal.events():
        state = apply(state, event, world.config)
    return state


def test_the_odd_node_is_named_and_evicted_and_the_others_are_consequences(world) -> None:
    world.corrupt("node-2")
    world.until_step(20)
    (incident,) = world.driver.state.incidents
    assert (incident.named, incident.evicted, incident.resumed_step) == (("node-2",), ("node-2",), 10)
    assert [one.rule for one in incident.suspicions if one.is_primary] == ["corruption"]
    assert len(incident.suspicions) == 5, "and four processes that ended with it"
    assert world.driver.state.seats == ("node-0", "node-1", "node-4", "node-3")
    assert replayed(world) == world.driver.state


def test_a_fault_is_counted_where_once_is_not_enough(tmp_path) -> None:
    world = World(tmp_path, CONFIG.model_copy(update={"evict_on_corruption": False, "strikes": 2}))
    world.until_step(12)
    for step, status in ((20, NodeStatus.ASSIGNED), (30, NodeStatus.EVICTED)):
        world.corrupt("node-2")
        world.until_step(step)
        assert world.driver.state.nodes["node-2"].status == status


def test_without_a_majority_nobody_is_blamed_and_all_are_measured(world) -> None:
    orders = []
    tell = world.driver._outbox
    world.driver._outbox = lambda name, wanted: (orders.append(wanted.diagnosis), tell(name, wanted))[1]
    world.sims["node-3"].finds = (Outcome(check="corruption", status="fail", reason="a product is wrong"),)
    world.corrupt("node-1", "node-3", is_certain=False)
    world.until_step(20)
    (incident,) = world.driver.state.incidents
    checks = {check for order in orders if order is not None for check in order.checks}
    assert {"gemm", "disk"} & checks, checks
    assert (incident.named, incident.evicted) == (("node-3",), ("node-3",)), "the diagnosis told them apart"
    assert world.driver.state.nodes["node-1"].faults_s == ()


def test_evictions_for_corruption_keep_the_limit(world) -> None:
    for step, name in ((20, "node-0"), (30, "node-1"), (40, "node-2")):
        world.corrupt(name)
        world.until_step(step)
    evicted = [name for name, node in world.driver.state.nodes.items() if node.status == NodeStatus.EVICTED]
    assert evicted == ["node-0", "node-1"] and "node-2 should be evicted" in world.driver.state.alarms[0]


def test_observed_corruption_blames_nobody(tmp_path) -> None:
    rules = CONFIG.rules.model_copy(update={"corruption": "observe"})
    world = World(tmp_path, CONFIG.model_copy(update={"rules": rules}))
    world.until_step(12)
    world.corrupt("node-2")
    world.until_step(20)
    assert world.driver.state.incidents[0].named == ()
    assert any(line.startswith("observed: corruption on node-2") for line in world.lines)

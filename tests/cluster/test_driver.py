"""The real driver and its rules against a cluster on virtual time."""

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as HypothesisPhase

from megascale_jax.cluster.anomaly import NodeView, Watcher
from megascale_jax.cluster.counters import read_counters
from megascale_jax.cluster.diagnose.checks import Outcome
from megascale_jax.cluster.journal import Journal
from megascale_jax.cluster.lifecycle import NodeStatus, Phase
from megascale_jax.cluster.limits import Limits as SectionLimits
from megascale_jax.cluster.link.wire import Limits, write_message
from megascale_jax.cluster.messages import Answer, Beat, Hello
from megascale_jax.cluster.state import Ordered, Shape
from megascale_jax.cluster.status import status_of
from megascale_jax.config.cluster import ClusterConfig, FloorsConfig
from megascale_jax.errors import BackendError, JournalError
from tests.cluster.simulated import STEP_S, SimNode, World

CONFIG = ClusterConfig(
    lost_after_s=5.0, grace_s=5.0, wait_s=60.0, diagnose_s=30.0, floors=FloorsConfig(data=20.0, compile=300.0, restore=60.0)
)


@pytest.fixture
def world(tmp_path) -> World:
    world = World(tmp_path, CONFIG)
    world.until_step(12)
    return world


def test_a_run_without_faults_ends(tmp_path) -> None:
    world = World(tmp_path, CONFIG, total_steps=30)
    assert world.run(120, lambda: world.driver.is_over)
    assert world.driver.state.phase == Phase.FINISHED
    assert not world.driver.state.incidents


def test_a_killed_process_is_told_from_those_that_died_with_it(world) -> None:
    world.crash("node-2")
    world.until_step(20)
    (incident,) = world.driver.state.incidents
    assert incident.named == ("node-2",)
    assert len(incident.suspicions) == 4, "the others are known to have followed"
    assert world.driver.state.seats == ("node-0", "node-1", "node-2", "node-3")
    assert incident.resumed_step == 10, "the newest checkpoint"


def test_a_killed_executor_comes_back_to_its_place(world) -> None:
    world.kill_executor("node-1")
    world.until_step(20)
    (incident,) = world.driver.state.incidents
    assert incident.named == ("node-1",)
    assert world.driver.state.seats[1] == "node-1"


def test_a_node_without_power_is_replaced_by_a_spare(world) -> None:
    world.power_off("node-1")
    world.until_step(20)
    assert world.driver.state.incidents[0].named == ("node-1",)
    assert world.driver.state.seats == ("node-0", "node-4", "node-2", "node-3")


@pytest.mark.parametrize("how", ["stopped", "behind", "frozen"])
def test_a_hang_is_seen_within_twice_the_limit_and_named(world, how) -> None:
    began, world.sims["node-3"].hangs = world.now, how
    world.run(100, lambda: world.driver.state.phase != Phase.RUNNING)
    limit_s = world.driver.watcher.limits.limit_s("data" if how == "behind" else "step", {"step": 9})
    assert world.now - began < 2 * limit_s
    world.until_step(20)
    assert world.driver.state.incidents[0].named == ("node-3",)
    assert world.driver.state.seats[3] == "node-3"


@pytest.mark.parametrize(("how", "is_found"), [("stopped", True), ("frozen", False)])
def test_a_stopped_process_is_found_however_long_a_step_may_take(world, how, is_found) -> None:
    world.driver.watcher.limits.learn({"step": 60.0})
    world.sims["node-3"].hangs = how
    world.run(world.driver.config.rules.halted_s + 3)
    assert [incident.named for incident in world.driver.state.incidents] == ([("node-3",)] if is_found else [])


@pytest.mark.parametrize("how", ["stopped", "frozen"])
def test_a_halted_process_is_named_when_the_others_give_it_up_before_any_limit(world, how) -> None:
    """JAX's coordinator in a frozen process: all others end, and say that they lost it."""
    world.sims["node-3"].hangs = how
    world.run(8)
    assert world.driver.state.phase == Phase.RUNNING, "no limit is reached"
    for name in ("node-0", "node-1", "node-2"):
        sim = world.sims[name]
        sim.process, sim.exit_code, sim.is_secondary, sim.ended_s = "exited", 1, True, world.now
    world.until_step(20)
    assert [incident.named for incident in world.driver.state.incidents] == [("node-3",)]


def test_a_partition_is_a_lost_node(world) -> None:
    world.drops = lambda name: name == "node-0"
    world.is_alive = lambda name: None  # nobody can tell from outside
    world.until_step(20)
    assert world.driver.state.incidents[0].named == ("node-0",)
    assert world.driver.state.nodes["node-0"].status == NodeStatus.LOST
    world.drops = lambda name: False
    world.greet(world.sims["node-0"])
    world.run(5)
    assert world.driver.state.nodes["node-0"].status == NodeStatus.READY
    assert world.driver.state.phase == Phase.RUNNING
    assert world.sims["node-0"].process == "none", "it no longer trains"


def test_a_node_that_was_only_silent_comes_back_without_a_new_connection(world) -> None:
    world.is_alive = lambda name: None
    world.drops = lambda name: name == "node-5"
    world.run(10)
    assert world.driver.state.nodes["node-5"].status == NodeStatus.LOST
    world.drops = lambda name: False
    world.run(3)
    assert world.driver.state.nodes["node-5"].status == NodeStatus.READY


def test_silence_is_no_word_on_the_training(world) -> None:
    """A pause of the control network that is longer than a step may take, and shorter than a node may be silent."""
    world.driver.config = world.config.model_copy(update={"lost_after_s": 30.0})
    world.is_alive = lambda name: None
    world.drops = lambda name: name == "node-2"
    world.run(15)
    world.drops = lambda name: False
    world.run(5)
    assert not world.driver.state.incidents


def test_a_node_that_cannot_start_its_process_is_found(world) -> None:
    world.crash("node-1")
    world.run(1)
    assert world.run(60, lambda: world.sims["node-1"].attempt == 2)
    world.sims["node-1"].process = "none"
    assert world.run(60, lambda: len(world.driver.state.incidents) == 2)
    assert world.driver.state.incidents[1].named == ("node-1",)


def test_dropped_beats_below_the_limit_change_nothing(world) -> None:
    world.drops = lambda name: int(world.now) % 3 != 0
    world.run(30)
    assert not world.driver.state.incidents


def test_a_killed_driver_adopts_what_runs(world) -> None:
    attempt = world.driver.state.attempt
    for _ in range(3):
        world.run(2)
        world.kill_driver()
    world.until_step(40)
    assert not world.driver.state.incidents
    assert world.driver.state.attempt == attempt


def test_a_driver_killed_at_any_moment_of_a_recovery_finishes_it(tmp_path) -> None:
    for delay in range(0, 100, 7):
        folder = tmp_path / str(delay)
        world = World(folder, CONFIG, total_steps=60)
        world.until_step(12)
        world.power_off("node-1")
        world.run(delay / 10)
        world.kill_driver()
        assert world.run(300, lambda world=world: world.driver.is_over), world.lines[-10:]
        assert world.driver.state.phase == Phase.FINISHED
        assert [incident.named for incident in world.driver.state.incidents] == [("node-1",)]


def test_a_bad_node_found_by_its_checks_is_evicted(world) -> None:
    world.sims["node-2"].finds = (Outcome(check="disk", status="fail", reason="no space"),)
    world.crash("node-2")
    world.until_step(20)
    assert world.driver.state.nodes["node-2"].status == NodeStatus.EVICTED
    assert world.driver.state.seats == ("node-0", "node-1", "node-4", "node-3")


def test_a_node_that_goes_away_during_a_diagnosis_is_not_bad(world) -> None:
    world.crash("node-2")
    assert world.run(30, lambda: world.driver.examination is not None)
    world.kill_executor("node-1")
    world.until_step(20)
    assert not any(node.status == NodeStatus.EVICTED for node in world.driver.state.nodes.values())


def test_it_shrinks_and_grows_back(tmp_path) -> None:
    shapes = (Shape(num_nodes=2), Shape(num_nodes=1, overrides=("parallel.data=1",)))
    world = World(tmp_path, CONFIG.model_copy(update={"shrink": True, "wait_s": 10.0}), nodes=2, spares=0, shapes=shapes)
    world.until_step(12)
    world.power_off("node-1")
    world.until_step(20)
    assert world.driver.state.seats == ("node-0",)
    world.sims["node-1"].is_down = False
    assert world.run(60, lambda: len(world.driver.state.seats) == 2)
    world.until_step(30)
    assert world.driver.state.shape == 0


def test_a_spare_that_dies_changes_nothing(world) -> None:
    world.power_off("node-5")
    world.run(10)
    assert world.driver.state.phase == Phase.RUNNING
    assert not world.driver.state.incidents


def test_an_operator_stops_the_job(world) -> None:
    world.driver.record(Ordered(at_s=world.driver.clock.now(), action="stop", by="ada", step=world.driver.step))
    assert world.run(30, lambda: world.driver.is_over)
    assert world.driver.state.phase == Phase.STOPPED


KINDS = ("crash", "executor", "power", "stopped", "behind", "driver", "partition")


@settings(
    max_examples=25,
    deadline=None,
    phases=[p for p in HypothesisPhase if p is not HypothesisPhase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(faults=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.floats(0, 12)), min_size=1, max_size=5))
def test_random_faults_end_in_a_finished_run(tmp_path_factory, faults) -> None:
    config = CONFIG.model_copy(update={"strikes": 50, "fruitless_recoveries": 20})
    world = World(tmp_path_factory.mktemp("world"), config, total_steps=80)
    world.until_running()
    for kind, number, after_s in faults:
        world.run(after_s)
        name = f"node-{number}"
        match kind:
            case "crash":
                world.crash(name)
            case "executor":
                world.kill_executor(name)
            case "power" if sum(sim.is_down for sim in world.sims.values()) < 2:
                world.power_off(name)
            case "stopped" | "behind":
                world.sims[name].hangs = kind
            case "driver":
                world.kill_driver()
            case "partition":
                world.drops = lambda other, name=name: other == name
                world.run(2 * STEP_S)
                world.drops = lambda other: False
            case _:
                pass
    assert world.run(3000, lambda: world.driver.is_over), (world.driver.state.phase, world.lines[-20:])
    state = world.driver.state
    assert state.phase == Phase.FINISHED, state.outcome
    assert not any(node.status == NodeStatus.EVICTED for node in state.nodes.values()), "no node was bad"
    struck = {f"node-{number}" for kind, number, _ in faults if kind != "driver"}
    assert {name for incident in state.incidents for name in incident.named} <= struck


def test_a_job_that_comes_up_on_other_nodes_goes_on_there(world) -> None:
    """Its batch script was queued again: the journal knows the old nodes, the engine has others."""
    for name in world.names:
        world.power_off(name)
    world.names = tuple(f"other-{number}" for number in range(6))
    world.kill_driver()
    began = world.now
    world.until_step(20)
    incident = world.driver.state.incidents[0]
    assert set(incident.named) >= {"node-0", "node-1", "node-2", "node-3"} and incident.resumed_step == 10
    assert set(world.driver.state.seats) < set(world.names), "ranks on nodes that are there"
    assert world.now - began < CONFIG.grace_s + 20, "the old ones are waited for within their grace, not longer"
    assert not any(node.status == NodeStatus.EVICTED for node in world.driver.state.nodes.values())


def test_the_last_words_of_a_dead_executor_do_not_bring_it_back(world) -> None:
    beat = world.driver.beats["node-1"]
    world.power_off("node-1")
    world.run(0.3)
    assert world.driver.state.nodes["node-1"].lost_at_s is not None
    world.driver.heard("node-1", beat)
    assert world.driver.state.nodes["node-1"].lost_at_s is not None


def test_without_a_journal_nothing_is_decided_and_afterwards_all_goes_on(tmp_path, monkeypatch) -> None:
    world, appended = World(tmp_path, CONFIG), Journal.append

    def full(self: Journal, event: object) -> None:
        raise JournalError("the disk is full")

    monkeypatch.setattr(Journal, "append", full)
    world.run(10.0)
    assert not world.driver.state.nodes, "a node is not known before that is journaled"
    monkeypatch.setattr(Journal, "append", appended)
    world.until_step(12)
    monkeypatch.setattr(Journal, "append", full)
    world.crash("node-1")
    world.run(30.0)
    assert not world.driver.state.incidents
    monkeypatch.setattr(Journal, "append", appended)
    world.until_step(20)
    assert [incident.named for incident in world.driver.state.incidents] == [("node-1",)]
    assert [line for line in world.lines if line.startswith("alarm")] == ["alarm: the disk is full"] * 2


@pytest.mark.parametrize("knows", [False, True])
def test_neighbours_of_a_diagnosis_are_known_by_what_nodes_say_of_their_switch_or_the_backend_of_their_machine(
    world, monkeypatch, knows
) -> None:
    if knows:
        monkeypatch.setattr(world, "switch", lambda machine: f"under {machine}")
    for name, more in (("node-1", {"switch": "leaf-2", "machine": "m1"}), ("node-2", {"machine": "m2"})):
        node = world.driver.state.nodes[name]
        values = {"node": name, "incarnation": f"{name} anew", "address": node.address, "ports": node.ports, "software": {"jax": "1"}}
        world.driver.heard(name, Hello(**values, **more))
    switches = tuple(world.driver._in_pairs(name).switch for name in ("node-1", "node-2"))
    assert switches == ("leaf-2", "under m2" if knows else None)


def test_nodes_go_on_hearing_what_was_decided_while_the_journal_cannot_be_written(world, monkeypatch) -> None:
    def full(self: Journal, event: object) -> None:
        raise JournalError("the disk is full")

    monkeypatch.setattr(Journal, "append", full)
    world.crash("node-1")  # an event that cannot be journaled, again and again
    heard, tell = [], world.driver._outbox
    world.driver._outbox = lambda name, wanted: (heard.append(name), tell(name, wanted))
    world.run(20.0)
    assert {"node-0", "node-2", "node-3"} <= set(heard)


def test_the_first_start_may_wait_longer_than_a_replacement(tmp_path) -> None:
    world = World(tmp_path, CONFIG.model_copy(update={"first_wait_s": 300.0}), nodes=2, spares=0)
    world.sims["node-1"] = SimNode("node-1", "none", is_alive=False, is_down=True)
    world.run(200.0)
    assert world.driver.state.phase == Phase.REPLACING, "its image is still being loaded"
    world.run(200.0)
    assert (world.driver.state.phase, world.driver.state.exit_code) == (Phase.FAILED, 21)


def test_a_node_taken_back_is_restored_also_by_a_driver_that_did_not_hear_the_order(world, monkeypatch) -> None:
    removed, restored = [], []
    monkeypatch.setattr(world, "remove", lambda name, machine, reason: removed.append(name))
    world.driver.record(Ordered(at_s=world.now, action="evict", node="node-4", by="ada and bob", step=12))
    world.run(1.0)
    assert removed == ["node-4"]
    world.driver.record(Ordered(at_s=world.now, action="uncordon", node="node-4", by="ada"))
    monkeypatch.setattr(world, "restore", lambda name, machine: restored.append(name))
    world.kill_driver()  # before it could ask for anything
    world.run(1.0)
    assert (restored, removed) == (["node-4"], ["node-4"])
    world.kill_driver()
    world.run(1.0)
    assert restored == ["node-4"], "once is enough"


def test_a_removal_that_fails_is_asked_for_again(world, monkeypatch) -> None:
    asked = []

    def refuse(name: str, machine: str, reason: str) -> None:
        asked.append(name)
        raise BackendError("no right to drain")

    monkeypatch.setattr(world, "remove", refuse)
    world.driver.record(Ordered(at_s=world.now, action="evict", node="node-4", by="ada and bob", step=12))
    world.run(2.0)
    assert len(asked) > 3
    assert [line for line in world.lines if "no right to drain" in line] == ["node-4: no right to drain"]


def test_a_driver_of_many_nodes_looks_less_often_but_at_news_at_once(world, monkeypatch) -> None:
    monkeypatch.setattr("megascale_jax.cluster.driver._WATCH_PER_NODE_S", 1.0)
    looks, examine = [], world.driver.watcher.examine
    monkeypatch.setattr(world.driver.watcher, "examine", lambda now, *views: looks.append(now) or examine(now, *views))
    world.run(12.0)
    assert 2 <= len(looks) <= 3, "six nodes: every six seconds"
    world.crash("node-2")
    before = world.now
    while not world.driver.state.incidents and world.now < before + 60:
        world.run(0.1)
    assert world.now - before < 3.0


def test_status_of_thousands_of_nodes_fits_into_one_answer(world) -> None:
    driver = world.driver
    beat, node = driver.beats["node-0"], driver.state.nodes["node-0"]
    names = [f"gpu-node-{number}" for number in range(1536)]
    driver.state = driver.state.model_copy(update={"nodes": dict.fromkeys(names, node), "seats": tuple(names)})
    driver.beats, driver._heard_s = dict.fromkeys(names, beat), dict.fromkeys(names, world.now)
    answer = Answer(is_done=True, text="running", status=json.loads(json.dumps(status_of(driver))))
    assert len(write_message(answer)) < min(Limits().answer_bytes, Limits().queue_bytes) / 4


def test_a_process_whose_main_thread_alone_has_ended_is_found(world) -> None:
    world.sims["node-2"].hangs = "zombie"
    world.until_step(20)
    assert [incident.named for incident in world.driver.state.incidents] == [("node-2",)]
    assert "main thread ended" in world.driver.state.incidents[0].suspicions[0].detail


def test_a_node_whose_traffic_falls_is_observed() -> None:
    watcher, lines = Watcher(CONFIG, SectionLimits.of(CONFIG)), []
    sent = {"node-0": 0.0, "node-1": 0.0}
    for second in range(200):
        for name in sent:
            sent[name] += 1e6 if name == "node-0" or second < 100 else 1e3
        views = [
            NodeView(name, Beat(attempt=1, is_idle=True, processes=(), counters={"nic.eth0.rx_bytes": moved, "disk.free_bytes": 1.0}), 0.0)
            for name, moved in sent.items()
        ]
        lines += watcher.examine(float(second), 1, views).observed
    assert {(one.rule, one.node) for one in lines} == {("traffic", "node-1")}
    assert any(name.startswith("nic.") and name.endswith(".rx_bytes") for name in read_counters(Path("/"))), "the names are those of beats"

"""Loss spikes and rewinds on virtual time: what is acted on, how often, and that a journal replays to the same."""

from types import SimpleNamespace

import pytest

from megascale_jax.cluster.driver_process import Control
from megascale_jax.cluster.lifecycle import Phase
from megascale_jax.cluster.link import operators
from megascale_jax.cluster.link.tokens import Role
from megascale_jax.cluster.messages import Command
from megascale_jax.cluster.policy import apply, desired
from megascale_jax.cluster.state import Anomaly, Ordered, Suspicion
from megascale_jax.config.cluster import RulesConfig
from tests.cluster.simulated import World
from tests.cluster.test_corruption import replayed
from tests.cluster.test_driver import CONFIG

ACT = CONFIG.model_copy(update={"rules": RulesConfig(loss_spike="act"), "max_rewinds": 2})


@pytest.fixture
def world(tmp_path) -> World:
    world = World(tmp_path, ACT)
    world.until_step(28)
    return world


def test_a_spike_rewinds_once_and_every_later_attempt_is_told(world) -> None:
    world.spike(22, 26, rewind_step=15)
    assert world.run(60, lambda: bool(world.driver.state.rewinds) and world.driver.state.phase == Phase.RUNNING)
    state = world.driver.state
    (incident,) = state.incidents
    assert (state.rewinds, incident.rewind) == (((15, 220, 260),), (15, 220, 260))
    assert incident.resumed_step in (15, 16) and state.best_step in (16, 17), "as the beats show it"
    assert (incident.named, incident.diagnosed_s) == ((), None), "no node is to blame or examined"
    assert [line for line in world.lines if "samples 220 to 259" in line]
    world.until_step(22)
    world.crash("node-1")
    world.until_step(30)
    assert world.driver.state.incidents[-1].resumed_step == 20, "the new line's newest checkpoint"
    order = desired(world.driver.state, "node-0", ACT).assignment
    assert order.overrides == ("train.rewinds=[[15,220,260]]",)
    world.kill_driver()
    assert replayed(world) == world.driver.state


def test_at_most_so_many_rewinds_in_a_job_then_spikes_are_observed(world) -> None:
    for number in range(3):
        step = world.driver.step
        world.spike(step - 1, step, rewind_step=10)
        world.run(30, lambda number=number: len(world.driver.state.rewinds) > number)
        world.until_step(25 + number)
    assert len(world.driver.state.rewinds) == len(world.driver.state.incidents) == 2
    assert any(line.startswith("observed: loss_spike") for line in world.lines)
    late = Anomaly(
        at_s=world.now, attempt=world.driver.state.attempt, step=30, suspicions=(Suspicion(rule="loss_spike", rewind=(1, 2, 3)),)
    )
    assert apply(world.driver.state, late, ACT) == world.driver.state


@pytest.mark.parametrize(("rules", "rewind_step"), [(RulesConfig(), 15), (RulesConfig(loss_spike="act"), None)])
def test_a_spike_is_only_observed_by_default_or_without_a_checkpoint_from_before(tmp_path, rules, rewind_step) -> None:
    world = World(tmp_path, CONFIG.model_copy(update={"rules": rules}))
    world.until_step(28)
    world.spike(22, 26, rewind_step)
    world.run(20)
    assert world.driver.state.incidents == () and any(line.startswith("observed: loss_spike") for line in world.lines)


def test_what_was_reached_before_a_rewind_does_not_count_after_it(world) -> None:
    world.spike(22, 26, rewind_step=15)
    world.run(60, lambda: world.driver.state.phase == Phase.SUSPENDED)
    world.driver.record(Ordered(at_s=world.now, action="cordon", node="node-5", by="ada", step=28))
    world.until_running()
    state = world.driver.state
    assert state.best_step <= 17 and state.last_best_step <= 15 and state.saved_step <= 15, "steps after it are new ones"
    world.until_step(20)
    world.crash("node-1")
    world.until_step(22)
    assert world.driver.state.fruitless == 0


def test_an_admin_may_rewind_by_hand_and_the_audit_log_has_it(world, tmp_path) -> None:
    log, answers = [], []
    audit = SimpleNamespace(path=tmp_path / "audit.jsonl", append=lambda *entry: log.append(entry))
    control = Control(audit, operators.Rule(), lambda: [15, 25])
    control.driver = world.driver

    def order(role: Role, rewind: tuple[int, int, int] | None) -> None:
        control.received(SimpleNamespace(name="ada", role=role, send=answers.append), Command(action="rewind", rewind=rewind))

    order(Role.OPERATE, (15, 200, 240))
    order(Role.ADMIN, None)
    order(Role.ADMIN, (15, 240, 240))
    order(Role.ADMIN, (14, 200, 240))
    assert "no checkpoint of step 14 or before is on storage, only of 15, 25" in answers[-1].text
    assert [answer.is_done for answer in answers] == [False] * 4 and world.driver.state.phase == Phase.RUNNING
    order(Role.ADMIN, (15, 200, 240))
    assert answers[-1].is_done and log[-1][3]["rewind"] == [15, 200, 240]
    wanted = desired(world.driver.state, "node-0", ACT)
    assert wanted.stop_grace_s == 0.0, "a save of what is given up would have retention take what the run is to go back to"
    world.until_running()
    assert world.driver.state.rewinds == ((15, 200, 240),) and world.rewinds == [(15, 200, 240)]
    assert world.driver.state.incidents[-1].resumed_step in (15, 16)
    assert replayed(world) == world.driver.state

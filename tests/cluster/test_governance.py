"""What becomes of slow nodes: single stories, the driver on virtual time, and a state machine with random windows, orders and faults."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, precondition, rule

from megascale_jax.cluster.diagnose.checks import Outcome
from megascale_jax.cluster.governance import judged
from megascale_jax.cluster.lifecycle import ENDS, NodeStatus, Phase
from megascale_jax.cluster.moves import most_evictions
from megascale_jax.cluster.slow_windows import PassTimes, RankTimes, Window
from megascale_jax.cluster.state import Advanced, Event, Judged, Ordered, Rechecked, SlowPass, SlowWindow
from megascale_jax.cluster.status import status_of
from megascale_jax.config.cluster import SlowNodesConfig
from tests.cluster.simulated import World
from tests.cluster.test_corruption import replayed
from tests.cluster.test_driver import CONFIG as DRIVER_CONFIG
from tests.cluster.test_policy import CONFIG, Story
from tests.cluster.test_policy_machine import Cluster

SLOW = SlowNodesConfig(action="act", windows=2, of=3, baseline=2)
ACT = CONFIG.model_copy(update={"slow_nodes": SLOW})
LOOK = CONFIG.model_copy(update={"slow_nodes": SLOW.model_copy(update={"action": "observe"})})


def times(excess: float = 0.0, *, deviation: float = 0.01, waits_less: float = 1.0) -> PassTimes:
    return PassTimes(excess=excess, deviation=deviation, cost_s=0.1 * excess, waits_less=waits_less)


def window(*excess: float, first: int = 0, attempt: int = 1, **more: float) -> Window:
    ranks = tuple(RankTimes(rank=rank, passes={"forward": times(one, **more), "backward": times()}) for rank, one in enumerate(excess))
    return Window(attempt=attempt, first=first, end=first + 40, step_s=1.0, ranks=ranks)


class Watched(Story):
    """A running job whose windows are made up."""

    def __init__(self, config=ACT, nodes: int = 4, spares: int = 1):
        super().__init__(nodes, spares, config)
        self.advance(1)
        self.saved = 0

    def see(self, *slow: int, excess: float = 0.10, **more: float) -> Judged:
        one = window(*(excess if rank in slow else 0.0 for rank in range(len(self.state.seats))), attempt=self.state.attempt, **more)
        event = judged(self.state, one, self.config.slow_nodes, self.after(60).now_s)
        self.on(event)
        return event

    def save(self) -> None:
        self.saved += 10
        step = self.state.best_step + 10
        self.on(Advanced(at_s=self.now_s, attempt=self.state.attempt, step=step, saved_step=step))

    def recheck(self, node: str, bad: str = "") -> None:
        self.on(Rechecked(at_s=self.now_s, node=node, isolation=self.state.slow[node].isolations, bad=bad, findings="all rates as usual"))

    def replace(self) -> None:
        self.settle_down()
        self.advance(self.state.best_step + 1)


def test_a_node_ten_percent_slow_is_suspected_after_enough_windows_and_named_with_its_evidence() -> None:
    story = Watched(LOOK)
    story.see(2)
    assert story.state.slow == {} and story.state.alarms == ()
    story.see(2)
    assert list(story.state.slow) == ["node-2"]
    (alarm,) = story.state.alarms
    assert alarm.startswith("node-2 is slow: 10.0% longer in forward than its peers in 2 of 2 windows, steps 0 to 39")
    for _ in range(3):
        story.save()
    assert story.state.phase == Phase.RUNNING and story.state.incidents == (), "it is only observed"


def test_an_old_window_does_not_count_and_a_suspicion_ends_when_nothing_is_seen_any_more() -> None:
    story = Watched(LOOK)
    for slow in ((2,), (), (), (2,)):
        story.see(*slow)
    assert story.state.slow == {}
    story.see(2)
    assert list(story.state.slow) == ["node-2"]
    for _ in range(3):
        story.see()
    assert story.state.slow == {} and len(story.state.alarms) == 1, "what was seen stays to be looked at"


@pytest.mark.parametrize(
    ("excess", "more", "is_slow"),
    [
        (0.051, {}, True),
        (0.049, {}, False),
        (0.10, {"deviation": 0.04}, False),
        (0.10, {"waits_less": 0.2}, False),
        (0.10, {}, True),
    ],
)
def test_slow_is_beyond_threshold_and_noise_and_only_who_is_waited_for(excess: float, more: dict[str, float], is_slow: bool) -> None:
    story = Watched(ACT)
    for _ in range(SLOW.baseline):
        assert story.see().window.slow == {}
    assert (list(story.see(1, excess=excess, **more).window.slow) == ["node-1"]) is is_slow


def test_what_is_usual_for_a_node_is_forgiven_up_to_half_the_threshold() -> None:
    story = Watched(ACT)
    story.see(1, excess=0.02)
    story.see(1, excess=0.02)
    assert story.state.profiles["node-1"].excess["forward"] == (0.02, 0.02)
    assert story.see(1, excess=0.06).window.slow == {} and story.see(1, excess=0.071).window.slow
    slow = Watched(ACT)  # one that was slow from the beginning does not become normal by that
    assert slow.see(1, excess=0.10).window.slow and slow.see(1, excess=0.10).window.slow and slow.see(1, excess=0.10).window.slow


def test_most_nodes_slow_at_once_is_nobodys_fault() -> None:
    story = Watched(ACT)
    for _ in range(3):
        assert story.see(0, 1, 2).window.slow == {}


def suspected(story: Watched, rank: int) -> str:
    name = story.state.seats[rank]
    assert name is not None
    while name not in story.state.slow or story.state.slow[name].stage != "suspected":
        story.see(rank)
    return name


def test_a_suspected_node_is_isolated_at_the_next_checkpoint_checked_and_returned() -> None:
    story = Watched()
    name = suspected(story, 2)
    story.advance(story.state.best_step + 1)
    assert story.state.phase == Phase.RUNNING, "no checkpoint yet"
    story.save()
    assert story.state.phase == Phase.SUSPENDED and story.state.incidents[-1].is_planned, "its processes save first"
    assert story.state.incidents[-1].named == (name,) and story.state.nodes[name].status == NodeStatus.CORDONED
    story.replace()
    assert story.state.seats == ("node-0", "node-1", "node-4", "node-3") and story.state.phase == Phase.RUNNING
    story.recheck(name)
    assert (story.state.nodes[name].status, story.state.slow[name].stage) == (NodeStatus.READY, "returned")
    assert not any(name in one.slow for one in story.state.slow_windows), "it begins anew"


def test_a_node_that_is_isolated_a_second_time_or_found_bad_is_archived() -> None:
    story = Watched()
    name = suspected(story, 2)
    story.save()
    story.replace()
    story.recheck(name)
    story.lose("node-0")  # the only spare is the one that was returned
    story.settle_down()
    story.diagnosed()
    story.after(CONFIG.grace_s + 1).elapse()
    story.advance(story.state.best_step + 1)
    story.join("node-5")
    rank = story.state.seats.index(name)
    assert suspected(story, rank) == name
    story.save()
    assert story.state.phase == Phase.SUSPENDED
    story.replace()
    story.recheck(name)
    assert story.state.nodes[name].status == NodeStatus.EVICTED and "slow again" in story.state.nodes[name].reason
    bad = Watched()
    name = suspected(bad, 1)
    bad.save()
    bad.replace()
    bad.recheck(name, bad="gemm: 40 % below")
    assert bad.state.nodes[name].status == NodeStatus.EVICTED and "gemm" in bad.state.nodes[name].reason


def test_without_a_spare_or_beyond_the_limit_a_person_is_asked_once() -> None:
    story = Watched(spares=0)
    suspected(story, 2)
    story.save()
    story.save()
    assert story.state.phase == Phase.RUNNING
    (alarm,) = story.state.alarms
    assert "no spare" in alarm
    many = Watched(ACT.model_copy(update={"max_evictions": 1}), spares=3)
    name = suspected(many, 2)
    many.save()
    many.replace()
    many.recheck(name)
    suspected(many, 1)
    many.save()
    assert many.state.phase == Phase.RUNNING and len(many.state.isolations_s) == 1
    assert "were isolated or evicted within" in many.state.alarms[-1]


def test_one_at_a_time_the_slowest_first() -> None:
    story = Watched(spares=3)
    for _ in range(2):
        one = window(0.0, 0.08, 0.12, 0.0)
        story.on(judged(story.state, one, story.config.slow_nodes, story.after(60).now_s))
    story.save()
    assert story.state.incidents[-1].named == ("node-2",)
    story.replace()
    story.save()
    assert story.state.phase == Phase.RUNNING, "node-2 is not checked yet"
    story.recheck("node-2")
    story.save()
    assert story.state.incidents[-1].named == ("node-1",)


def test_an_isolated_node_is_taken_back_before_the_run_ends_for_want_of_nodes() -> None:
    story = Watched()
    name = suspected(story, 2)
    story.save()
    story.replace()
    story.lose("node-1")
    story.settle_down()
    story.diagnosed()
    story.after(CONFIG.grace_s + 1).elapse()
    assert story.state.phase == Phase.RESTORING and name in story.state.seats
    assert story.state.slow[name].stage == "returned"


def test_an_operator_takes_a_node_back_and_it_is_as_if_nothing_had_been() -> None:
    story = Watched()
    name = suspected(story, 2)
    story.save()
    story.replace()
    story.on(Ordered(at_s=story.now_s, action="uncordon", node=name, by="ada"))
    assert story.state.slow == {} and story.state.nodes[name].status == NodeStatus.READY


class Windows:
    """Windows of made-up analyses, in place of a process."""

    def __init__(self) -> None:
        self.next: list[Window] = []
        self.closed = False

    def look(self, now_s: float, attempt: int, step: int) -> Window | None:
        return self.next.pop(0) if self.next and self.next[0].attempt == attempt else None

    def close(self) -> None:
        self.closed = True


def governed(tmp_path, **config: object) -> tuple[World, Windows]:
    world = World(tmp_path, DRIVER_CONFIG.model_copy(update={"slow_nodes": SLOW, **config}))
    world.suspects = windows = Windows()
    world.kill_driver()
    world.until_step(12)
    return world, windows


def slow_rank(world: World, windows: Windows, rank: int) -> None:
    for number in range(2):
        excess = (0.1 if one == rank else 0.0 for one in range(4))
        windows.next.append(window(*excess, first=40 * number, attempt=world.driver.state.attempt))


def test_the_driver_isolates_rechecks_and_returns_and_a_restarted_one_goes_on(tmp_path) -> None:
    world, windows = governed(tmp_path)
    slow_rank(world, windows, 2)
    assert world.run(60, lambda: world.driver.state.phase == Phase.SUSPENDED)
    world.kill_driver()
    assert world.run(60, lambda: world.driver.state.phase == Phase.RUNNING and "node-4" in world.driver.state.seats)
    world.kill_driver()
    assert world.run(60, lambda: world.driver.state.nodes["node-2"].status == NodeStatus.READY)
    state = world.driver.state
    assert state.slow["node-2"].stage == "returned" and state.nodes["node-2"].faults_s == ()
    assert len(state.incidents) == 1 and state.incidents[0].diagnosed_s is None and state.incidents[0].evicted == ()
    assert replayed(world) == state
    text = "\n".join(world.lines)
    for part in ("node-2 is suspected of being slow: 10.0% longer", "node-2 is isolated, for the 1. time", "node-2 is a spare again"):
        assert part in text, world.lines
    assert status_of(world.driver)["slow"]["node-2"]["stage"] == "returned"


def test_a_check_that_finds_something_archives_the_isolated_node(tmp_path) -> None:
    world, windows = governed(tmp_path)
    world.sims["node-2"].finds = (Outcome(check="disk", status="fail", reason="the disk is full"),)
    slow_rank(world, windows, 2)
    assert world.run(120, lambda: world.driver.state.nodes["node-2"].status == NodeStatus.EVICTED)
    assert world.driver.state.phase == Phase.RUNNING and "the disk is full" in world.driver.state.nodes["node-2"].reason
    assert replayed(world) == world.driver.state


class Governance(Cluster):
    """The cluster of the driver's state machine, some of whose nodes are slow."""

    @rule()
    def go_on(self) -> None:
        """All that can be overcome is: nodes are there, processes have ended, a diagnosis finds nothing, the next attempt trains."""
        for name in self.names:
            self.join(name, fresh=False)
        for name in self.state.seats:
            if name is not None:
                self.idle(name)
        self.diagnose(set())
        self.wait(self.config.wait_s)
        self.advance(min(40, self.state.best_step + 1))

    @rule(slow=st.sets(st.sampled_from(Cluster.names), max_size=2), times=st.integers(1, 3), usual=st.floats(-0.1, 0.1))
    def judge(self, slow: set[str], times: int, usual: float) -> None:
        evidence = {name: SlowPass(name="forward", excess=0.1, usual=0.0, cost_s=0.1, waits_less=1.0) for name in sorted(slow)}
        window = SlowWindow(first=0, end=8, slow=evidence)
        for _ in range(times):
            self.on(Judged(at_s=self.now_s, attempt=self.state.attempt, window=window, usual={"node-1": {"forward": usual}}))

    @rule()
    def save(self) -> None:
        step, saved = self.state.best_step, self.state.saved_step + 1
        self.on(Advanced(at_s=self.now_s, attempt=self.state.attempt, step=step, saved_step=saved))

    @rule(name=st.sampled_from(Cluster.names))
    def slow(self, name: str) -> None:
        """What isolates a node, wherever that is allowed."""
        self.go_on()
        self.judge({name}, times=SLOW.windows, usual=0.0)
        self.save()

    @precondition(lambda self: self.state.slow)
    @rule(data=st.data(), is_late=st.booleans(), bad=st.sampled_from(["", "gemm is slow"]))
    def recheck(self, data: st.DataObject, is_late: bool, bad: str) -> None:
        isolated = sorted(name for name, one in self.state.slow.items() if one.stage == "isolated")
        name = data.draw(st.sampled_from(isolated or sorted(self.state.slow)))
        isolation = self.state.slow[name].isolations - is_late
        self.on(Rechecked(at_s=self.now_s, node=name, isolation=isolation, bad=bad))

    def on(self, event: Event) -> None:
        if not self.said:
            self.config = self.config.model_copy(update={"slow_nodes": SLOW})
        before = self.state
        super().on(event)
        isolated = {name for name, one in self.state.slow.items() if one.stage == "isolated"}
        if new := isolated - {name for name, one in before.slow.items() if one.stage == "isolated"}:
            assert isinstance(event, Advanced) and event.saved_step > before.saved_step, "only at a checkpoint"
            assert len(isolated) == 1 and before.phase == Phase.RUNNING, "one at a time"
            (name,) = new
            assert any(
                node.status == NodeStatus.READY and node.lost_at_s is None and other not in before.slow
                for other, node in before.nodes.items()
            ), "never without a spare"
            assert before.slow[name].stage == "suspected"
        for name, one in before.slow.items():
            after = self.state.slow.get(name)
            if one.stage == "archived" and after is not None and self.state.phase not in ENDS:
                assert after.stage == "archived"

    @invariant()
    def isolations_keep_the_limit(self) -> None:
        recent = [at for at in self.state.isolations_s if at > self.now_s - self.config.strike_window_s]
        assert len(recent) <= most_evictions(self.state, self.config)

    @invariant()
    def evictions_keep_the_limit(self) -> None:
        recent = [at for at in self.state.evictions_s if at > self.now_s - self.config.strike_window_s]
        assert len(recent) <= most_evictions(self.state, self.config)

    @invariant()
    def isolated_nodes_get_no_work(self) -> None:
        for name, one in self.state.slow.items():
            if one.stage == "isolated" and self.state.phase in (Phase.RESTORING, Phase.RUNNING):
                assert name not in self.state.seats


Governance.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGovernance = Governance.TestCase

"""The driver's decisions on virtual time: single stories, and a state machine with random faults, restarts, doubled and late events."""

import pytest

from megascale_jax.cluster.journal import Journal, JournalClock
from megascale_jax.cluster.lifecycle import ENDS, JOB_MOVES, IllegalMoveError, NodeStatus, Phase, check_phase
from megascale_jax.cluster.moves import most_evictions
from megascale_jax.cluster.policy import apply, deadline, desired, first_state, looks_again_at
from megascale_jax.cluster.seats import shapes_of
from megascale_jax.cluster.state import (
    Advanced,
    Anomaly,
    Diagnosed,
    Elapsed,
    Ended,
    Event,
    Idle,
    Joined,
    Lost,
    Ordered,
    Shape,
    State,
    Suspicion,
)
from megascale_jax.config.cluster import ClusterConfig
from megascale_jax.config.schema import ParallelConfig
from megascale_jax.errors import RunFolderError

CONFIG = ClusterConfig(grace_s=5.0, wait_s=60.0, stop_s=10.0, diagnose_s=20.0)


class Story:
    """A job and its clock."""

    def __init__(self, nodes: int = 4, spares: int = 0, config: ClusterConfig = CONFIG, shapes: tuple[Shape, ...] | None = None):
        self.config, self.now_s = config, 0.0
        self.state = first_state(shapes or (Shape(num_nodes=nodes),))
        for number in range(nodes + spares):
            self.join(f"node-{number}")

    def on(self, event: Event) -> State:
        self.state = apply(self.state, event, self.config)
        return self.state

    def after(self, seconds: float) -> "Story":
        self.now_s += seconds
        return self

    def join(self, node: str, incarnation: str = "first", machine: str = "") -> State:
        event = Joined(at_s=self.now_s, node=node, incarnation=incarnation, address="10.0.0.1", ports=(20000, 20001), machine=machine)
        return self.on(event)

    def lose(self, node: str, incarnation: str = "first") -> State:
        return self.on(Lost(at_s=self.now_s, node=node, incarnation=incarnation, reason="silent", step=self.state.best_step))

    def advance(self, step: int) -> State:
        return self.on(Advanced(at_s=self.now_s, attempt=self.state.attempt, step=step, saved_step=0, resumed_step=step - 1))

    def suspect(self, *nodes: str, rule: str = "exit", step: int = 0) -> State:
        suspicions = tuple(Suspicion(rule=rule, node=node) for node in nodes)
        return self.on(Anomaly(at_s=self.now_s, attempt=self.state.attempt, step=step, suspicions=suspicions))

    def settle_down(self) -> State:
        for node in self.state.seats:
            if node is not None and self.state.nodes[node].lost_at_s is None:
                self.on(Idle(at_s=self.now_s, node=node, attempt=self.state.attempt))
        return self.state

    def diagnosed(self, **bad: str) -> State:
        bad = {name.replace("_", "-"): reason for name, reason in bad.items()}
        return self.on(Diagnosed(at_s=self.now_s, attempt=self.state.attempt, bad=bad))

    def elapse(self) -> State:
        limit = deadline(self.state, self.config)
        assert limit is not None
        self.now_s = max(self.now_s, limit)
        return self.on(Elapsed(at_s=self.now_s, phase=self.state.phase, since_s=self.state.since_s))


def test_it_starts_when_enough_nodes_have_come() -> None:
    story = Story(nodes=2)
    assert story.state.phase == Phase.RESTORING
    assert story.state.seats == ("node-0", "node-1")
    order = desired(story.state, "node-1", CONFIG).assignment
    assert order is not None
    assert (order.attempt, order.rank, order.num_ranks, order.coordinator) == (1, 1, 2, "10.0.0.1:20001")
    assert story.advance(1).phase == Phase.RUNNING


def test_a_crashed_process_comes_back_on_its_node() -> None:
    story = Story(nodes=2, spares=1)
    story.advance(7)
    assert story.suspect("node-1", step=7).phase == Phase.SUSPENDED
    assert desired(story.state, "node-0", CONFIG).assignment is None
    assert story.settle_down().phase == Phase.DIAGNOSING
    assert story.diagnosed().phase == Phase.RESTORING
    assert story.state.seats == ("node-0", "node-1"), "one crash is no reason to leave a node"
    assert story.state.attempt == 2
    state = story.after(3).advance(8)
    (incident,) = state.incidents
    assert (incident.named, incident.resumed_step, incident.restored_s) == (("node-1",), 7, 3.0)


def test_a_node_that_crashes_again_and_again_is_evicted() -> None:
    story = Story(nodes=2, spares=1)
    for step in range(1, 4):
        story.advance(step)
        story.suspect("node-1", step=step)
        story.settle_down()
        story.diagnosed()
    assert story.state.nodes["node-1"].status == NodeStatus.EVICTED
    assert story.state.seats == ("node-0", "node-2")
    assert desired(story.state, "node-1", CONFIG).leave


def test_old_faults_are_forgotten() -> None:
    story = Story(nodes=2, spares=1)
    for step in range(1, 6):
        story.after(CONFIG.strike_window_s / 2).advance(step)
        story.suspect("node-1", step=step)
        story.settle_down()
        story.diagnosed()
    assert story.state.nodes["node-1"].status == NodeStatus.ASSIGNED


def test_a_lost_node_that_returns_in_time_beats_the_spare() -> None:
    story = Story(nodes=2, spares=1)
    story.advance(1)
    story.lose("node-1")
    story.settle_down()
    story.diagnosed()
    assert story.state.phase == Phase.REPLACING
    assert looks_again_at(story.state, CONFIG) == CONFIG.grace_s
    story.after(2).join("node-1", "second")
    assert story.state.phase == Phase.RESTORING
    assert story.state.seats == ("node-0", "node-1")
    assert story.state.incidents[-1].named == ("node-1",)


def test_the_spare_takes_over_when_the_grace_is_over() -> None:
    story = Story(nodes=2, spares=1)
    story.advance(1)
    story.lose("node-1")
    story.settle_down()
    story.diagnosed()
    story.after(CONFIG.grace_s).join("node-9", "any event makes the driver look again")
    assert story.state.seats == ("node-0", "node-2")
    assert story.join("node-1", "late").nodes["node-1"].status == NodeStatus.READY, "a spare now"


def test_a_node_found_bad_is_evicted_and_named_in_place_of_the_guess() -> None:
    story = Story(nodes=3, spares=1)
    story.advance(1)
    story.suspect("node-0", rule="no_progress")
    story.settle_down()
    story.diagnosed(node_2="its all-reduce is slow")
    assert story.state.nodes["node-2"].status == NodeStatus.EVICTED
    assert story.state.incidents[-1].named == ("node-2",)
    assert story.state.seats == ("node-0", "node-1", "node-3")


def test_what_an_older_attempt_says_changes_nothing() -> None:
    story = Story(nodes=2, spares=1)
    story.advance(1)
    story.suspect("node-1", step=1)
    story.settle_down()
    story.diagnosed()
    story.advance(2)
    story.suspect("node-1", step=2)
    story.settle_down()
    before = story.state
    late: list[Event] = [
        Diagnosed(at_s=1.0, attempt=1, bad={"node-0": "bad"}),
        Idle(at_s=1.0, node="node-1", attempt=1),
        Ended(at_s=1.0, attempt=1, step=9, is_complete=True),
        Advanced(at_s=1.0, attempt=1, step=9, saved_step=9),
        Anomaly(at_s=1.0, attempt=1, step=9, suspicions=()),
    ]
    for event in late:
        assert story.on(event) == before


def test_an_evicted_node_comes_back_as_a_new_one_on_another_machine_only() -> None:
    story = Story(nodes=2, spares=1)
    story.advance(5)
    story.suspect("node-1", step=5)
    story.settle_down()
    story.diagnosed(node_1="disk is full")
    assert story.state.seats == ("node-0", "node-2")
    assert story.join("node-1", "second").nodes["node-1"].status == NodeStatus.EVICTED
    node = story.join("node-1", "third", machine="another").nodes["node-1"]
    assert (node.status, node.faults_s, node.reason) == (NodeStatus.READY, (), "")


def test_a_large_job_may_evict_more_by_itself() -> None:
    large = Story(nodes=4).state.model_copy(update={"seats": tuple(f"node-{number}" for number in range(1536))})
    assert most_evictions(large, CONFIG) == 8
    assert most_evictions(large, CONFIG.model_copy(update={"max_evictions": 0})) == 0


def test_too_many_evictions_ask_for_a_person() -> None:
    story = Story(nodes=4, spares=4)
    story.advance(1)
    story.suspect("node-0")
    story.settle_down()
    story.diagnosed(node_0="bad", node_1="bad", node_2="bad", node_3="bad")
    evicted = [name for name, node in story.state.nodes.items() if node.status == NodeStatus.EVICTED]
    assert len(evicted) == most_evictions(story.state, CONFIG) == 2
    assert len(story.state.alarms) == 2
    assert story.state.phase == Phase.RESTORING


def test_no_progress_ends_the_run_instead_of_looping() -> None:
    story = Story(nodes=2)
    story.advance(5)
    for _ in range(CONFIG.fruitless_recoveries + 1):
        assert story.state.phase in (Phase.RUNNING, Phase.RESTORING)
        story.suspect("node-0", step=5)
        story.settle_down()
        story.on(Diagnosed(at_s=story.now_s, attempt=story.state.attempt, bad={}))
        story.after(CONFIG.strike_window_s)  # strikes are another matter
    assert story.state.phase == Phase.FAILED
    assert "no step beyond 5" in story.state.outcome


def test_a_node_that_does_not_confirm_is_lost() -> None:
    story = Story(nodes=2, spares=1)
    story.advance(1)
    story.suspect("node-0")
    story.on(Idle(at_s=0.0, node="node-1", attempt=1))
    assert story.elapse().phase == Phase.DIAGNOSING
    assert story.state.nodes["node-0"].status == NodeStatus.LOST
    assert story.diagnosed().seats == ("node-2", "node-1"), "ranks of survivors stay"


def test_with_too_few_nodes_it_ends_or_shrinks_and_grows_back() -> None:
    story = Story(nodes=2)
    story.advance(1)
    story.lose("node-1")
    story.settle_down()
    story.diagnosed()
    assert story.elapse().phase == Phase.FAILED

    shrinking = CONFIG.model_copy(update={"shrink": True})
    shapes = shapes_of(2, ParallelConfig(pipe=2, data=2, micro_batch_size=4), 32, shrink=True)
    assert shapes == (Shape(num_nodes=2), Shape(num_nodes=1, overrides=("parallel.data=1",)))
    story = Story(nodes=2, config=shrinking, shapes=shapes)
    story.advance(1)
    story.lose("node-1")
    story.settle_down()
    story.diagnosed()
    assert story.elapse().phase == Phase.RESTORING
    assert story.state.seats == ("node-0",)
    order = desired(story.state, "node-0", shrinking).assignment
    assert order is not None and order.overrides == ("parallel.data=1",)
    story.advance(2)
    assert story.join("node-1", "second").phase == Phase.SUSPENDED
    assert desired(story.state, "node-0", shrinking).stop_grace_s == shrinking.save_s, "it saves before it grows"
    assert story.settle_down().phase == Phase.RESTORING
    assert story.state.seats == ("node-0", "node-1")
    assert story.state.shape == 0


def test_smaller_sizes_keep_the_batch_and_the_rule_of_the_schedule() -> None:
    three = ParallelConfig(pipe=4, data=3)
    assert shapes_of(3, three, 12, shrink=True) == (Shape(num_nodes=3), Shape(num_nodes=1, overrides=("parallel.data=1",))), "6 % 4"
    assert shapes_of(3, three, 24, shrink=True)[1] == Shape(num_nodes=2, overrides=("parallel.data=2",))
    assert shapes_of(3, three, 24, shrink=False) == (Shape(num_nodes=3),)


def test_an_executor_that_comes_back_anew_has_lost_its_processes() -> None:
    story = Story(nodes=2)
    story.advance(1)
    assert story.join("node-0", "first").phase == Phase.RUNNING, "the same one, after a break of the network"
    assert story.join("node-0", "second").phase == Phase.SUSPENDED
    assert story.state.incidents[-1].named == ("node-0",)


def test_what_an_operator_may_order() -> None:
    story = Story(nodes=2, spares=1)
    story.advance(3)
    story.on(Ordered(at_s=1.0, action="evict", node="node-0", by="ada", step=3))
    assert story.state.phase == Phase.SUSPENDED
    story.settle_down()
    assert story.state.seats == ("node-2", "node-1")
    story.on(Ordered(at_s=1.0, action="uncordon", node="node-0", by="ada"))
    assert story.state.nodes["node-0"].status == NodeStatus.READY
    story.advance(4)
    story.on(Ordered(at_s=1.0, action="stop", by="ada"))
    assert desired(story.state, "node-1", CONFIG).stop_grace_s == CONFIG.save_s
    story.on(Ended(at_s=2.0, attempt=2, step=9, is_complete=False))
    assert (story.state.phase, story.state.outcome) == (Phase.STOPPED, "stopped after step 9")


def test_illegal_moves_raise() -> None:
    for old in Phase:
        for new in Phase:
            if new not in JOB_MOVES[old]:
                with pytest.raises(IllegalMoveError):
                    check_phase(old, new)


def test_the_journal_keeps_events_and_facts(tmp_path) -> None:
    path = tmp_path / "cluster" / "journal.sqlite"
    events = [Idle(at_s=1.0, node="node-0", attempt=1), Ended(at_s=2.5, attempt=1, step=3, is_complete=True)]
    with Journal(path) as journal:
        for event in events:
            journal.append(event)
        journal.keep("port", "4711")
    with Journal(path) as journal:
        assert list(journal.events()) == events
        assert journal.fact("port") == "4711"
        assert journal.fact("nothing") is None
    path.write_bytes(b"not a database at all, but long enough to be taken for one" * 20)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    with pytest.raises(RunFolderError, match="no journal of a job"):
        Journal(path)


def test_the_clock_goes_on_where_the_journal_ended() -> None:
    ticks = iter([100.0, 103.0])
    clock = JournalClock(50.0, lambda: next(ticks))
    assert clock.now() == 53.0


def test_what_most_nodes_have_is_no_fault_of_theirs() -> None:
    """A checkpoint that cannot be read, or a full storage, ends every process: nobody is evicted, and the budget ends the job."""
    story = Story(nodes=4, spares=2)
    story.advance(5)
    for _ in range(CONFIG.fruitless_recoveries + 1):
        if story.state.phase in ENDS:
            break
        story.after(30)
        story.suspect("node-0", "node-1", "node-2", "node-3", step=5)
        story.settle_down()
        story.diagnosed()
    assert (story.state.phase, story.state.exit_code) == (Phase.FAILED, 20)
    assert not any(node.status == NodeStatus.EVICTED or node.faults_s for node in story.state.nodes.values())


def test_progress_between_planned_interruptions_counts() -> None:
    story = Story(nodes=2)
    story.advance(5)
    for _ in range(CONFIG.fruitless_recoveries - 1):
        story.after(4000)
        story.suspect("node-1", step=5)
        story.settle_down()
        story.diagnosed()
        story.advance(5)
    story.advance(500)
    story.on(Ordered(at_s=story.now_s, action="restart", by="ada", step=500))
    story.settle_down()
    story.after(4000).advance(501)
    story.suspect("node-1", step=501)
    assert story.settle_down().phase == Phase.DIAGNOSING, "it has come 495 steps further since"


def test_a_stop_waits_for_the_save_of_a_planned_interruption() -> None:
    story = Story(nodes=2)
    story.advance(5)
    story.on(Ordered(at_s=1.0, action="restart", by="ada", step=5))
    assert story.on(Ordered(at_s=2.0, action="stop", by="ada", step=5)).phase == Phase.STOPPING
    assert desired(story.state, "node-0", CONFIG).stop_grace_s == CONFIG.save_s
    assert story.settle_down().phase == Phase.STOPPED

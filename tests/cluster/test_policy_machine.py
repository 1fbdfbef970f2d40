"""The driver's decisions under random faults, restarts, and doubled, late and reordered events."""

import json

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megascale_jax.cluster.lifecycle import ENDS, NodeStatus, Phase
from megascale_jax.cluster.moves import most_evictions
from megascale_jax.cluster.policy import apply, desired, first_state
from megascale_jax.cluster.state import Advanced, Anomaly, Diagnosed, Elapsed, Event, Idle, Joined, Lost, Ordered, Shape, State, Suspicion
from tests.cluster.test_policy import CONFIG


class Cluster(RuleBasedStateMachine):
    """Random faults of five nodes of which three are needed, with every event sometimes doubled, late, or out of order."""

    names = tuple(f"node-{number}" for number in range(5))

    @initialize()
    def begin(self) -> None:
        self.first = first_state((Shape(num_nodes=3), Shape(num_nodes=2, overrides=("parallel.data=2",))))
        self.config = CONFIG.model_copy(update={"shrink": True})
        self.state, self.now_s, self.said = self.first, 0.0, []
        self.incarnations = dict.fromkeys(self.names, 0)
        self.ordered: list[str] = []

    def on(self, event: Event) -> None:
        self.said.append(event)
        before, self.state = self.state, apply(self.state, event, self.config)
        for name, node in before.nodes.items():
            assert name in self.state.nodes, "no node is forgotten"
            if node.status == NodeStatus.EVICTED and self.state.nodes[name].status != NodeStatus.EVICTED:
                assert isinstance(event, Ordered), "only an operator brings an evicted node back"

    @rule(name=st.sampled_from(names), fresh=st.booleans())
    def join(self, name: str, fresh: bool) -> None:
        self.incarnations[name] += fresh
        incarnation = str(self.incarnations[name])
        self.on(Joined(at_s=self.now_s, node=name, incarnation=incarnation, address="h", ports=(1, 2)))

    @rule(name=st.sampled_from(names))
    def lose(self, name: str) -> None:
        self.on(Lost(at_s=self.now_s, node=name, incarnation=str(self.incarnations[name]), reason="silent"))

    @rule(names=st.sets(st.sampled_from(names), max_size=2), step=st.integers(0, 30))
    def suspect(self, names: set[str], step: int) -> None:
        suspicions = tuple(Suspicion(rule="exit", node=name) for name in sorted(names))
        self.on(Anomaly(at_s=self.now_s, attempt=self.state.attempt, step=step, suspicions=suspicions))

    @rule(step=st.integers(0, 30), also=st.booleans())
    def spike(self, step: int, also: bool) -> None:
        before = self.state.rewinds
        suspicions = (Suspicion(rule="loss_spike", rewind=(step, step, step + 1)), *((Suspicion(rule="exit", node="node-0"),) * also))
        self.on(Anomaly(at_s=self.now_s, attempt=self.state.attempt, step=step, suspicions=suspicions))
        assert self.state.rewinds[: len(before)] == before and len(self.state.rewinds) <= self.config.max_rewinds

    @rule(bad=st.sets(st.sampled_from(names), max_size=2))
    def diagnose(self, bad: set[str]) -> None:
        self.on(Diagnosed(at_s=self.now_s, attempt=self.state.attempt, bad=dict.fromkeys(sorted(bad), "bad")))

    @rule(name=st.sampled_from(names))
    def idle(self, name: str) -> None:
        self.on(Idle(at_s=self.now_s, node=name, attempt=self.state.attempt))

    @rule(step=st.integers(1, 40))
    def advance(self, step: int) -> None:
        self.on(Advanced(at_s=self.now_s, attempt=self.state.attempt, step=step, saved_step=step // 2))

    @rule(action=st.sampled_from(["evict", "cordon", "uncordon", "restart"]), name=st.sampled_from(names))
    def order(self, action: str, name: str) -> None:
        self.on(Ordered(at_s=self.now_s, action=action, node=name, by="ada"))

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def again(self, data: st.DataObject) -> None:
        """A message that comes a second time, however late."""
        event = data.draw(st.sampled_from(self.said)).model_copy(update={"at_s": self.now_s})
        if not isinstance(event, Joined | Ordered):  # the link lets no dead executor speak, and the driver answers a command once
            self.on(event)

    @rule(seconds=st.floats(0.1, 100))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.on(Elapsed(at_s=self.now_s, phase=self.state.phase, since_s=self.state.since_s))

    @invariant()
    def seats_are_sound(self) -> None:
        held = [name for name in self.state.seats if name is not None]
        assert len(held) == len(set(held)), "no node has two seats"
        assert len(self.state.seats) == self.state.shapes[self.state.shape].num_nodes or self.state.phase == Phase.REPLACING
        if self.state.phase == Phase.RESTORING:
            assert None not in self.state.seats
        if self.state.phase not in ENDS | {Phase.REPLACING}:
            assert None not in self.state.seats

    @invariant()
    def nobody_else_is_asked_to_train(self) -> None:
        orders = {name: desired(self.state, name, self.config) for name in self.state.nodes}
        trained = {name: order.assignment for name, order in orders.items() if order.assignment is not None}
        if self.state.phase in (Phase.RESTORING, Phase.RUNNING):
            assert sorted(order.rank for order in trained.values()) == list(range(len(self.state.seats)))
            assert len({order.coordinator for order in trained.values()}) == 1
        else:
            assert not trained
        for name, order in orders.items():
            assert order.is_over == (self.state.phase in ENDS)
            assert order.leave == (self.state.phase in ENDS or self.state.nodes[name].status == NodeStatus.EVICTED)

    @invariant()
    def evictions_keep_the_limit(self) -> None:
        automatic = [name for incident in self.state.incidents for name in incident.evicted]
        recent = [time for time in self.state.evictions_s if time > self.now_s - self.config.strike_window_s]
        assert len(recent) <= most_evictions(self.state, self.config)
        assert len(automatic) >= len(recent)

    @invariant()
    def the_journal_replays_to_the_same_state(self) -> None:
        replayed = self.first
        for event in self.said:
            replayed = apply(replayed, type(event).model_validate_json(event.model_dump_json()), self.config)
        assert replayed == self.state
        assert State.model_validate(json.loads(self.state.model_dump_json())) == self.state


Cluster.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCluster = Cluster.TestCase

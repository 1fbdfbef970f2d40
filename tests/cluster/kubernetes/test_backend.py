"""The Kubernetes backend through the official client, against an API server of ours that allows what the rendered rights allow."""

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from megascale_jax.cluster.backends.base import Start
from megascale_jax.cluster.backends.kubernetes.backend import EVICT_S, LOOK_S, STALE_S, STUCK_S, KubernetesBackend
from megascale_jax.cluster.backends.kubernetes.engine import KubernetesEngine
from megascale_jax.cluster.backends.kubernetes.names import CORDONED_BY, REASON
from megascale_jax.cluster.backends.kubernetes.plan import Plan
from megascale_jax.config.cluster import KubernetesConfig
from megascale_jax.errors import BackendError
from tests.cluster.kubernetes.fake_kubernetes import FakeKubernetes

PLAN = Plan(name="run", namespace="team", image="image", experiment="x", nodes=3, spares=1, gpus_per_node=8, run_volume="work")
JOB = "team/run"
LABELS = ("leaf", "example.com/rack")


@dataclass
class Bench:
    """A backend before a cluster, on a clock of its own."""

    fake: FakeKubernetes
    backend: KubernetesBackend
    clock: "Clock"

    def looks(self, number: int = 1) -> None:
        for _ in range(number):
            self.clock.now += LOOK_S
            self.backend.look()
            self.fake.reconcile()

    def restore(self, name: str, machine: str) -> None:
        """Ask for it, as a driver does that is told to wait."""
        with suppress(BackendError):
            self.backend.restore(name, machine)

    def cordoned(self) -> list[str]:
        return [name for name, node in self.fake.nodes.items() if node["spec"].get("unschedulable")]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def bench(caplog) -> Iterator[Bench]:
    caplog.set_level(logging.ERROR)
    fake, clock = FakeKubernetes(PLAN, machines=6), Clock()
    with fake.serving() as cluster:
        yield Bench(fake, KubernetesBackend(cluster, LABELS, clock=clock), clock)
    assert not fake.violations


def test_a_bad_machine_is_cordoned_and_its_pod_moves(bench) -> None:
    machine, others = bench.fake.machine_of("node-1"), [bench.fake.pod_of(f"node-{index}") for index in (0, 2, 3)]
    old = bench.fake.pod_of("node-1")["metadata"]["name"]
    bench.backend.remove("node-1", machine, "disk: no space")
    bench.looks(2)
    node = bench.fake.nodes[machine]
    assert node["spec"]["unschedulable"]
    assert node["metadata"]["annotations"] == {CORDONED_BY: JOB, REASON: "disk: no space"}
    assert bench.fake.changes("evict") == [old]
    assert bench.fake.machine_of("node-1") not in (machine, "")
    assert [bench.fake.pod_of(f"node-{index}") for index in (0, 2, 3)] == others
    assert not bench.backend.is_busy
    assert [(one.verb, one.machine) for one in bench.fake.done] == [("patch", machine), ("evict", machine)], "cordoned first"


def test_requests_that_come_again_change_nothing(bench) -> None:
    machine = bench.fake.machine_of("node-1")
    for _ in range(3):
        bench.backend.remove("node-1", machine, "bad")
        bench.looks(2)
    assert (bench.fake.changes("patch"), len(bench.fake.changes("evict"))) == ([machine], 1)
    for _ in range(3):
        bench.restore("node-1", machine)
        bench.looks()
    assert bench.fake.changes("patch") == [machine, machine]
    assert bench.fake.nodes[machine]["spec"] == {}
    assert bench.fake.nodes[machine]["metadata"]["annotations"] == {}


def test_a_pod_that_is_elsewhere_already_stays(bench) -> None:
    machine = bench.fake.machine_of("node-1")
    bench.looks()
    bench.fake.set_ready(machine, False)
    del bench.fake.pods[bench.fake.pod_of("node-1")["metadata"]["name"]]
    bench.looks()
    elsewhere = bench.fake.machine_of("node-1")
    bench.backend.remove("node-1", machine, "bad")
    bench.looks(2)
    assert bench.fake.machine_of("node-1") == elsewhere != machine
    assert bench.cordoned() == [machine], "it was there"
    assert not bench.fake.changes("evict")


def test_a_machine_that_an_executor_only_claims_to_be_on_is_not_cordoned(bench) -> None:
    bench.backend.remove("node-1", bench.fake.machine_of("node-2"), "bad")
    bench.looks(3)
    assert not bench.fake.done
    assert "no pod of node-1 was seen there" in bench.backend.facts()["node-1"]
    assert not bench.backend.is_busy


def test_a_machine_that_somebody_uncordons_is_taken_back(bench) -> None:
    machine = bench.fake.machine_of("node-1")
    bench.backend.remove("node-1", machine, "bad")
    bench.looks(2)
    assert not bench.backend.taken_back()
    bench.fake.set_cordon(machine, False)
    for backend in (bench.backend, KubernetesBackend(bench.backend._cluster, clock=bench.clock)):  # this driver's, and the next one's
        bench.backend = backend
        backend.remove("node-1", machine, "bad")
        bench.looks(3)
        assert backend.taken_back() == {"node-1": machine}
        assert bench.cordoned() == []
        assert len(bench.fake.changes("evict")) == 1
    with pytest.raises(BackendError, match="not back in service yet"):
        bench.backend.restore("node-1", machine)
    bench.fake.set_cordon(machine, True)
    bench.looks()
    assert bench.fake.nodes[machine]["metadata"]["annotations"] == {}, "history is not taken for a cordon that was lifted"
    assert bench.cordoned() == [machine], "that cordon is somebody else's"
    assert not bench.backend.taken_back()
    bench.backend.restore("node-1", machine)


def test_an_annotation_of_an_eviction_before_hides_no_new_one(bench) -> None:
    machine = bench.fake.machine_of("node-1")
    bench.fake.nodes[machine]["metadata"]["annotations"] = {CORDONED_BY: JOB, REASON: "disk: no space"}
    bench.backend.remove("node-1", machine, "gpu: lost")
    bench.looks(2)
    assert bench.cordoned() == [machine]
    assert bench.fake.nodes[machine]["metadata"]["annotations"][REASON] == "gpu: lost"


def test_a_pod_that_was_replaced_under_way_is_not_taken_for_the_old_one(bench) -> None:
    """Same name, another pod: the precondition on its identity refuses."""
    machine = bench.fake.machine_of("node-1")
    bench.backend.remove("node-1", machine, "bad")
    listed = bench.backend._cluster.pods()
    bench.backend._cluster.pods = lambda: listed
    bench.fake.pod_of("node-1")["metadata"]["uid"] = "another"
    bench.looks()
    assert not bench.fake.changes("evict")


def test_what_somebody_else_has_cordoned_stays_theirs(bench) -> None:
    machine = bench.fake.machine_of("node-2")
    bench.fake.nodes[machine]["spec"]["unschedulable"] = True
    bench.backend.remove("node-2", machine, "bad")
    bench.looks(2)
    assert not bench.fake.changes("patch")
    assert len(bench.fake.changes("evict")) == 1
    bench.restore("node-2", machine)
    bench.looks()
    assert bench.cordoned() == [machine]


def test_a_budget_that_refuses_for_too_long_is_overruled(bench) -> None:
    bench.fake.min_available = 4
    machine = bench.fake.machine_of("node-0")
    bench.backend.remove("node-0", machine, "bad")
    bench.looks(int(EVICT_S / LOOK_S))
    assert bench.cordoned() == [machine]
    assert bench.fake.machine_of("node-0") == machine
    bench.looks(3)
    assert bench.fake.machine_of("node-0") != machine
    assert not bench.fake.changes("evict")
    assert "gracePeriodSeconds" not in bench.fake.done[-1].body, "it may still end by itself"


def test_a_server_that_is_asked_too_much_is_no_budget_that_refuses(bench) -> None:
    """Status 429 without the budget's cause is waited out, and never leads to a deletion."""
    machine = bench.fake.machine_of("node-0")
    bench.backend.remove("node-0", machine, "bad")
    while bench.clock.now < 1000 + 2 * EVICT_S:
        bench.fake.faults.extend(["", "", "", "", "429"] if not bench.cordoned() else ["", "", "", "429"])
        bench.looks()
        bench.fake.faults.clear()
    assert not bench.fake.changes("delete")
    assert bench.fake.machine_of("node-0") == machine
    bench.looks(3)
    assert (len(bench.fake.changes("evict")), bench.fake.changes("delete")) == (1, [])


def test_a_server_is_not_asked_before_it_wants_to_be(bench) -> None:
    bench.fake.faults.append("429")
    bench.backend.look()
    bench.backend.look()
    assert not bench.fake.asked
    bench.looks()
    assert bench.fake.asked


def test_how_often_the_driver_was_restarted_is_told(bench) -> None:
    bench.fake.driver_restarts = 7
    assert bench.backend.facts()["driver restarts"].startswith("unknown")
    bench.looks()
    assert bench.backend.facts()["driver restarts"] == "7 of at most 200"


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_machine_that_is_away_is_not_waited_for(bench, is_gone) -> None:
    machine = bench.fake.machine_of("node-1")
    if is_gone:
        del bench.fake.nodes[machine]
    else:
        bench.fake.set_ready(machine, False)
    bench.backend.remove("node-1", machine, "dead")
    bench.looks(4)
    assert bench.fake.machine_of("node-1") not in (machine, "")
    assert bench.fake.done[-1].body["gracePeriodSeconds"] == 0
    assert not bench.backend.is_busy


def test_a_missed_node_is_freed_from_a_machine_that_is_away(bench) -> None:
    machine = bench.fake.machine_of("node-3")
    bench.fake.set_ready(machine, False)

    def miss(seconds: float) -> None:
        for _ in range(int(seconds / LOOK_S)):
            bench.backend.ensure("node-3")
            bench.looks()

    miss(STUCK_S)
    assert not bench.fake.done, "a machine may be away for a moment"
    miss(3 * LOOK_S)
    assert [(one.verb, one.machine, one.body.get("gracePeriodSeconds")) for one in bench.fake.done] == [("delete", machine, 0)]
    assert bench.fake.machine_of("node-3") != machine
    miss(2 * STUCK_S)
    assert len(bench.fake.done) == 1, "the new one's machine is there"


def test_a_node_that_came_back_is_missed_anew(bench) -> None:
    bench.backend.ensure("node-3")
    bench.looks(int(2 * STUCK_S / LOOK_S))
    bench.fake.set_ready(bench.fake.machine_of("node-3"), False)
    bench.backend.ensure("node-3")
    bench.looks()
    assert not bench.fake.done


def test_a_death_is_told_once_and_only_when_it_is_sure(bench) -> None:
    assert bench.backend.is_alive("node-0") is None, "nothing was seen yet"
    bench.looks()
    assert bench.backend.is_alive("node-0") is True
    bench.fake.set_container("node-0", "terminated")
    bench.looks()
    assert bench.backend.is_alive("node-0") is None, "it may have started again meanwhile"
    bench.looks()
    assert bench.backend.is_alive("node-0") is False
    assert bench.backend.is_alive("node-0") is None
    bench.looks(3)
    assert bench.backend.is_alive("node-0") is None, "it may be back, and this picture old"
    bench.fake.set_container("node-0", "running")
    bench.looks()
    assert bench.backend.is_alive("node-0") is True
    bench.clock.now += STALE_S + 1
    assert bench.backend.is_alive("node-0") is None


@pytest.mark.parametrize("fault", ["500", "401", "hang", "drop", "garbage", "429"])
def test_an_api_server_that_is_away_stops_nothing(bench, fault) -> None:
    bench.looks()
    machine = bench.fake.machine_of("node-1")
    bench.fake.faults.extend([fault] * 2)
    bench.backend.remove("node-1", machine, "bad")
    for _ in range(2):
        bench.backend.look()
    assert not bench.fake.done
    assert "cannot list pods" in bench.backend.facts()["pods"]
    bench.looks(2)
    assert bench.fake.machine_of("node-1") != machine
    assert bench.backend.facts()["pods"].startswith("4 running")


@pytest.mark.parametrize("fault", ["409", "410", "500", "hang", "lost", "404"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_fault_in_the_middle_is_made_good_by_the_next_look(bench, fault, at) -> None:
    """Requests of a look: list pods, the rest of them (410: too late for that), read the machine, cordon it, evict."""
    machine = bench.fake.machine_of("node-1")
    bench.fake.faults.extend(["", "", "", "", ""])
    bench.fake.faults[at] = fault
    bench.backend.remove("node-1", machine, "bad")
    bench.looks(5)
    assert (bench.cordoned(), bench.fake.changes("patch")) == ([machine], [machine])
    assert len(bench.fake.changes("evict")) == 1
    assert not bench.backend.is_busy


def test_without_the_right_to_cordon_nothing_is_evicted(bench) -> None:
    """A pod that is evicted from a machine that is not cordoned would only come back to it."""
    bench.fake.rules.discard(("patch", "nodes", None))
    bench.backend.remove("node-1", bench.fake.machine_of("node-1"), "bad")
    bench.looks(3)
    assert not bench.fake.done
    assert "403" in bench.backend.facts()["node-1"]
    assert bench.backend.is_busy
    bench.fake.violations.clear()


def test_the_rights_are_those_that_are_used(bench) -> None:
    bench.backend.remove("node-1", bench.fake.machine_of("node-1"), "bad")
    bench.fake.set_ready(bench.fake.machine_of("node-2"), False)
    bench.backend.remove("node-2", bench.fake.machine_of("node-2"), "dead")
    bench.looks(4)
    assert set(bench.fake.asked) == {(verb, resource) for verb, resource, _ in bench.fake.rules}


def test_a_node_without_a_known_machine_is_refused(bench) -> None:
    with pytest.raises(BackendError, match="--machine"):
        bench.backend.remove("node-1", "", "bad")


def test_a_driver_outside_of_its_pod_says_where_it_belongs(tmp_path) -> None:
    with pytest.raises(BackendError, match="megascale launch render"):
        KubernetesEngine(3, KubernetesConfig(), {})
    engine = KubernetesEngine(3, KubernetesConfig(), {"MEGASCALE_JOBSET": "run", "MEGASCALE_LAUNCH": "uid"})
    assert (engine.names, engine.launch) == (("node-0", "node-1", "node-2"), "uid")
    with pytest.raises(BackendError, match="no service account"):
        engine.backend(Start(("driver", 7070), tmp_path, tmp_path, ()))


def test_the_thread_looks_by_itself(bench) -> None:
    bench.backend.start()
    machine = bench.fake.machine_of("node-1")
    bench.backend.remove("node-1", machine, "bad")
    limit = time.monotonic() + 30
    while bench.fake.machine_of("node-1") == machine and time.monotonic() < limit:
        bench.fake.reconcile()
        time.sleep(0.02)
    bench.backend.stop()
    assert bench.fake.machine_of("node-1") != machine


NODES = st.sampled_from([f"node-{index}" for index in range(4)])
MACHINES = st.sampled_from([f"machine-{index}" for index in range(7)])  # the last one does not exist
STEPS = st.one_of(
    st.tuples(st.just("remove"), NODES, st.none() | MACHINES),
    st.tuples(st.just("remove"), NODES, st.none()),
    st.tuples(st.just("restore"), NODES, MACHINES),
    st.tuples(st.just("ensure"), NODES),
    st.tuples(st.just("look"), st.integers(1, 4)),
    st.tuples(st.just("wait"), st.sampled_from([STUCK_S, EVICT_S])),
    st.tuples(st.just("away"), MACHINES),
    st.tuples(st.just("back"), MACHINES),
    st.tuples(st.just("person"), MACHINES),
    st.tuples(st.just("lift"), st.integers(0, 3)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("fault"), st.lists(st.sampled_from(["500", "409", "410", "404", "429", "drop", "lost", "garbage", ""]), max_size=4)),
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEPS, min_size=8, max_size=25), min_available=st.integers(0, 4))
@example(steps=[("remove", "node-1", None), ("look", 2), ("lift", 0), ("look", 1), ("restart",), ("look", 2)], min_available=0)
def test_whatever_happens_only_what_was_asked_for_is_touched(steps: list[tuple[Any, ...]], min_available: int) -> None:
    story = Story(min_available)
    logging.disable(logging.WARNING)
    with story.fake.serving() as cluster:
        story.bench = Bench(story.fake, KubernetesBackend(cluster, LABELS, clock=story.clock), story.clock)
        try:
            for step in steps:
                story.play(step)
            story.check()
        finally:
            logging.disable(logging.NOTSET)


class Story:
    """What was asked for, and what happened to the cluster by itself."""

    bench: Bench

    def __init__(self, min_available: int):
        self.fake, self.clock = FakeKubernetes(PLAN, machines=6), Clock()
        self.fake.min_available = min_available
        self.wanted: dict[str, str] = {}
        """Node -> machine of a removal that no other request has replaced."""
        self.removed: set[str] = set()
        self.restored: set[str] = set()
        self.away: set[str] = set()
        self.touched: set[str] = set()
        self.lifted: dict[str, int] = {}
        """Machine of this job's cordon, uncordoned by a person -> changes before that."""
        self.was_there: set[str] = set()
        """Nodes with a pod on the machine that is to be removed, and that this backend has seen there."""

    def play(self, step: tuple[Any, ...]) -> None:
        fake, backend = self.fake, self.bench.backend
        match step:
            case ("remove", node, machine):
                machine = machine or fake.machine_of(node) or "machine-0"
                backend.remove(node, machine, "bad")
                if self.wanted.get(node) != machine:
                    self.was_there.discard(node)
                if fake.machine_of(node) == machine:
                    self.was_there.add(node)
                self.wanted[node] = machine
                self.removed.add(machine)
            case ("restore", node, machine):
                self.bench.restore(node, machine)
                self.wanted.pop(node, None)
                self.restored.add(machine)
            case ("ensure", node):
                for _ in range(5):
                    backend.ensure(node)
                    self.clock.now += STALE_S - 1
                backend.ensure(node)
            case ("look", number):
                self.bench.looks(number)
            case ("wait", seconds):
                self.clock.now += seconds
            case ("away" | "back", machine) if machine in fake.nodes:
                fake.set_ready(machine, step[0] == "back")
                self.away.add(machine)
            case ("person", machine) if machine in fake.nodes:
                fake.set_cordon(machine, True)
                self.lifted.pop(machine, None)  # a person has taken it out of service again, before the driver heard of the lift
            case ("lift", number) if cordoned := self.bench.cordoned():
                machine = cordoned[number % len(cordoned)]
                if machine not in self.restored and CORDONED_BY in fake.nodes[machine]["metadata"].get("annotations", {}):
                    self.lifted.setdefault(machine, len(fake.done))
                self.touched.add(machine)
                fake.set_cordon(machine, False)
            case ("restart",):
                self.bench.backend = KubernetesBackend(backend._cluster, LABELS, clock=self.clock)
                self.was_there.clear()
                for node, machine in self.wanted.items():
                    self.bench.backend.remove(node, machine, "bad")
            case ("fault", kinds):
                fake.faults.extend(kinds)
            case _:
                pass

    def check(self) -> None:
        fake = self.fake
        fake.faults.clear()
        self.bench.looks(2)
        for _ in range(int(EVICT_S / LOOK_S) + 6):
            if self.bench.backend.is_busy:
                self.bench.looks()
        assert not fake.violations
        assert not self.bench.backend.is_busy
        for one in fake.done:
            assert one.machine in self.removed | self.restored or (one.verb == "delete" and one.machine in self.away), one
            assert one.body.get("gracePeriodSeconds") != 0 or one.machine in self.away, "torn from a machine that was there"
            assert one.verb == "patch" or one.machine in self.removed | self.away
        for name, node in fake.nodes.items():
            assert name in self.removed or not node["metadata"].get("annotations"), "cordoned without being asked"
        for node, machine in self.wanted.items():
            if machine in fake.nodes and machine not in self.restored | self.touched:
                assert fake.nodes[machine]["spec"].get("unschedulable") or node not in self.was_there
                assert fake.machine_of(node) != machine
        for machine, before in self.lifted.items():
            later = [one for one in fake.done[before:] if one.machine == machine]
            assert machine in self.restored or not later, "a person has put it back into service"

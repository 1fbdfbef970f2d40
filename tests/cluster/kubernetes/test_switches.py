"""The switch of a machine by its labels: read as one list, kept, read again when there is something to know, done without if refused."""

import logging
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megascale_jax.cluster.backends.kubernetes.backend import LOOK_S, KubernetesBackend
from megascale_jax.cluster.backends.kubernetes.client import RequestError
from megascale_jax.cluster.backends.kubernetes.switches import AGAIN_S, RENEW_S, Switches
from tests.cluster.kubernetes.fake_kubernetes import PAGE, FakeKubernetes
from tests.cluster.kubernetes.test_backend import LABELS, PLAN, Bench, Clock

LEAF, RACK = LABELS
MACHINES = 6
PAGES = MACHINES // PAGE


@pytest.fixture
def bench() -> Iterator[Bench]:
    fake, clock = FakeKubernetes(PLAN, MACHINES), Clock()
    with fake.serving() as cluster:
        yield Bench(fake, KubernetesBackend(cluster, LABELS, clock=clock), clock)
    assert not fake.violations


def wait(bench: Bench, seconds: float) -> None:
    bench.looks(int(seconds / LOOK_S) + 1)


def lists(bench: Bench) -> int:
    return bench.fake.asked.count(("list", "nodes"))


def test_the_first_label_that_a_machine_has_names_its_switch(bench) -> None:
    bench.fake.set_labels("machine-0", {LEAF: "s1", RACK: "1"})
    bench.fake.set_labels("machine-1", {RACK: "1"})
    bench.fake.set_labels("machine-2", {LEAF: "", RACK: "1"})
    bench.fake.set_labels("machine-3", {LEAF: "1", "other": "s1"})
    assert bench.backend.switch("machine-0") is None, "nothing was read yet"
    bench.looks()
    found = {name: bench.backend.switch(name) for name in (*bench.fake.nodes, "gone", "")}
    assert found == {
        "machine-0": "leaf=s1",
        "machine-1": "example.com/rack=1",
        "machine-2": "example.com/rack=1",
        "machine-3": "leaf=1",
        "machine-4": None,
        "machine-5": None,
        "gone": None,
        "": None,
    }
    assert bench.backend.facts()["switches"] == "3, known of 4 of 4 machines"


def test_all_machines_are_read_as_one_list_and_once(bench) -> None:
    wait(bench, 0.9 * RENEW_S)
    assert lists(bench) == PAGES
    assert ("get", "nodes") not in bench.fake.asked


def test_a_machine_that_joins_is_known_once_a_pod_is_on_it(bench) -> None:
    bench.looks()
    for name in bench.fake.nodes:
        bench.fake.set_ready(name, name == bench.fake.machine_of("node-1"))
    bench.fake.add_machine("new")
    bench.fake.set_labels("new", {LEAF: "s9"})
    wait(bench, 2 * AGAIN_S)
    assert lists(bench) == PAGES, "nobody is there yet"
    bench.backend.remove("node-1", bench.fake.machine_of("node-1"), "bad")
    bench.looks(3)
    assert bench.fake.machine_of("node-1") == "new"
    assert bench.backend.switch("new") == "leaf=s9"


def test_a_machine_that_no_list_has_is_not_looked_for_again_and_again(bench) -> None:
    bench.fake.pod_of("node-0")["spec"]["nodeName"] = "gone"
    wait(bench, 0.9 * RENEW_S)
    assert lists(bench) == PAGES


def test_a_label_that_changes_is_known_after_a_while(bench) -> None:
    bench.fake.set_labels("machine-0", {LEAF: "s1"})
    bench.looks()
    bench.fake.set_labels("machine-0", {LEAF: "s2"})
    bench.fake.set_labels("machine-1", {LEAF: "s2"})
    wait(bench, RENEW_S)
    assert (bench.backend.switch("machine-0"), bench.backend.switch("machine-1")) == ("leaf=s2", "leaf=s2")
    assert lists(bench) == 2 * PAGES


def test_without_the_right_to_list_it_is_said_once_and_all_else_goes_on(bench, caplog) -> None:
    for name in ("machine-1", "machine-2"):
        bench.fake.set_labels(name, {LEAF: "s1"})
    bench.fake.rules.discard(("list", "nodes", None))
    with caplog.at_level(logging.WARNING):
        wait(bench, 3 * AGAIN_S)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("cannot list machines: 403")
    assert "ClusterRole" in line and "cluster.kubernetes.switch_labels=[]" in line and "without regard to switches" in line
    assert bench.backend.facts()["switches"] == line
    assert bench.backend.switch("machine-1") is None
    bench.backend.remove("node-1", "machine-1", "bad")
    bench.looks(2)
    assert bench.fake.machine_of("node-1") != "machine-1"
    assert len(bench.fake.violations) <= 4, "a refusal is not asked for at every look"
    bench.fake.violations.clear()
    bench.fake.rules.add(("list", "nodes", None))
    wait(bench, AGAIN_S)
    assert bench.backend.switch("machine-1") == "leaf=s1"
    assert bench.backend.facts()["switches"].startswith("1, known of 1 of 4")


@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("fault", ["500", "410", "429", "hang", "drop", "garbage"])
def test_what_was_read_before_counts_until_a_list_succeeds(bench, page, fault) -> None:
    bench.fake.set_labels("machine-5", {LEAF: "s1"})
    bench.looks()
    bench.fake.set_labels("machine-5", {LEAF: "s2"})
    bench.clock.now += RENEW_S
    of_pods = -(-PLAN.number // PAGE)
    bench.fake.faults.extend(["", *[""] * (of_pods - 1), *[""] * page, fault])
    bench.looks()
    assert not bench.fake.faults
    assert bench.backend.switch("machine-5") == "leaf=s1"
    assert "by the labels that were read before" in bench.backend.facts()["switches"]
    wait(bench, AGAIN_S)
    assert bench.backend.switch("machine-5") == "leaf=s2"


def test_without_labels_nothing_is_read(bench) -> None:
    backend = KubernetesBackend(bench.backend._cluster, (), clock=bench.clock)
    bench.fake.set_labels("machine-0", {LEAF: "s1"})
    for _ in range(3):
        bench.clock.now += RENEW_S
        backend.look()
    assert lists(bench) == 0
    assert "switches" not in backend.facts()
    assert backend.switch("machine-0") is None


class Listed:
    """A cluster of which only labels are asked."""

    def __init__(self, clock: Clock):
        self.now: dict[str, dict[str, str]] = {}
        self.clock, self.fails, self.asked_s = clock, False, []

    def labels(self, names: tuple[str, ...]) -> dict[str, dict[str, str]]:
        self.asked_s.append(self.clock.now)
        if self.fails:
            raise RequestError("cannot list machines: 500 a fault", 500)
        return {name: dict(labels) for name, labels in self.now.items()}


MACHINE = st.sampled_from("abcd")
EVENTS = st.one_of(
    st.tuples(st.just("label"), MACHINE, st.sampled_from(LABELS), st.sampled_from(["", "1", "2"])),
    st.tuples(st.just("pods"), st.sets(MACHINE)),
    st.tuples(st.just("fail"), st.booleans()),
    st.tuples(st.just("look"), st.integers(1, 30)),
    st.tuples(st.just("look"), st.just(int(RENEW_S / LOOK_S))),
)


@settings(max_examples=200, deadline=None)
@given(events=st.lists(EVENTS, max_size=20))
def test_labels_are_never_older_than_they_may_be_and_seldom_asked_for(events) -> None:
    clock = Clock()
    cluster = Listed(clock)
    switches, pods, seen = Switches(cluster, LABELS, clock), set(), {}

    def look(times: int) -> None:
        nonlocal seen
        for _ in range(times):
            clock.now += LOOK_S
            if switches.are_due(pods):
                try:
                    switches.read(pods)
                    seen = {name: dict(labels) for name, labels in cluster.now.items()}
                except RequestError:
                    assert cluster.fails
            for machine in "abcd":
                own = seen.get(machine, {})
                said = next((f"{label}={own[label]}" for label in LABELS if own.get(label)), None)
                assert switches.of(machine) == said

    for event in events:
        match event:
            case ("label", machine, label, value):
                cluster.now.setdefault(machine, {})[label] = value
            case ("pods", machines):
                pods = set(machines)
            case ("fail", fails):
                cluster.fails = fails
            case ("look", times):
                look(times)
    cluster.fails, pods = False, {"a"}
    look(int(max(AGAIN_S, RENEW_S) / LOOK_S) + 1)
    assert seen == cluster.now
    assert all(later - earlier >= AGAIN_S for earlier, later in zip(cluster.asked_s, cluster.asked_s[1:], strict=False))

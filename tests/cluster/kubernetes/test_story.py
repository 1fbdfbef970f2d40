"""The real driver over the Kubernetes backend, the official client and the API server of ours, on virtual time."""

from collections.abc import Iterator

import pytest

from megascale_jax.cluster.backends.kubernetes.backend import LOOK_S, KubernetesBackend
from megascale_jax.cluster.backends.kubernetes.client import Cluster
from megascale_jax.cluster.backends.kubernetes.names import CORDONED_BY
from megascale_jax.cluster.backends.kubernetes.plan import Plan
from megascale_jax.cluster.diagnose.checks import Outcome
from megascale_jax.cluster.lifecycle import NodeStatus, Phase
from megascale_jax.cluster.messages import Desired, Hello
from megascale_jax.cluster.state import Ordered
from megascale_jax.cluster.status import status_of
from tests.cluster.kubernetes.fake_kubernetes import FakeKubernetes
from tests.cluster.simulated import SimNode, World
from tests.cluster.test_driver import CONFIG

PLAN = Plan(name="run", namespace="team", image="image", experiment="x", nodes=4, spares=2, gpus_per_node=8, run_volume="work")
START_S, RESTART_S = 2.0, 4.0
LABEL = "leaf"


class PodWorld(World):
    """Nodes are pods: they come and go as the cluster has them, and the driver asks the backend."""

    fake: FakeKubernetes
    cluster: Cluster

    def begin(self, fake: FakeKubernetes, cluster: Cluster) -> None:
        self.fake, self.cluster = fake, cluster
        self.backend = KubernetesBackend(cluster, (LABEL,), clock=lambda: self.now)
        self._looked_at, self._uids, self._since = 0.0, {}, {}

    def kill_driver(self) -> None:
        """With all that its backend remembered."""
        self.backend = KubernetesBackend(self.cluster, (LABEL,), clock=lambda: self.now)
        super().kill_driver()

    def ensure(self, name: str) -> None:
        self.backend.ensure(name)

    def is_alive(self, name: str) -> bool | None:
        return self.backend.is_alive(name)

    def remove(self, name: str, machine: str, reason: str) -> None:
        self.backend.remove(name, machine, reason)

    def restore(self, name: str, machine: str) -> None:
        self.backend.restore(name, machine)

    def taken_back(self) -> dict[str, str]:
        return dict(self.backend.taken_back())

    def switch(self, machine: str) -> str | None:
        return self.backend.switch(machine)

    def facts(self) -> dict[str, str]:
        return dict(self.backend.facts())

    def greet(self, sim: SimNode) -> None:
        machine = self.fake.machine_of(sim.name)
        hello = Hello(node=sim.name, incarnation=sim.incarnation, address="10.0.0.1", ports=(20000, 20001), software={}, machine=machine)
        self.driver.heard(sim.name, hello)

    def _train(self) -> None:
        if self.now >= self._looked_at + LOOK_S:
            self._looked_at = self.now
            self.backend.look()
            self.fake.reconcile()
        for name in self.names:
            self._run_pod(name)
        super()._train()

    def _run_pod(self, name: str) -> None:
        """What a kubelet does with the container: start it, and again when it ends and the run is not over."""
        pod = self.fake.pod_of(name)
        uid, is_there = pod["metadata"]["uid"], pod["status"]["phase"] == "Running" and self.fake.is_ready(pod["spec"]["nodeName"])
        sim = self.sims.get(name)
        if self._uids.get(name) != uid or not is_there:
            if sim is not None:
                sim.is_alive, sim.process = False, "none"
            if is_there:
                self._uids[name], self._since[name] = uid, self.now + START_S
        elif sim is None or not sim.is_alive:
            if sim is not None and sim.wanted is not None and sim.wanted.is_over:
                return
            self._since.setdefault(name, self.now + RESTART_S)
            if self.now >= self._since[name]:
                del self._since[name]
                self.sims[name] = SimNode(name, f"{uid} {next(self._numbers)}")
                self.greet(self.sims[name])


@pytest.fixture
def world(tmp_path) -> Iterator[PodWorld]:
    fake = FakeKubernetes(PLAN, machines=8)
    with fake.serving() as cluster:
        world = PodWorld(tmp_path, CONFIG, total_steps=400)
        world.begin(fake, cluster)
        world.until_step(12)
        yield world
    assert not fake.violations


def test_a_bad_machine_is_cordoned_and_its_node_returns_elsewhere_as_a_spare(world) -> None:
    machine, pod = world.fake.machine_of("node-2"), world.fake.pod_of("node-2")["metadata"]["name"]
    world.sims["node-2"].finds = (Outcome(check="disk", status="fail", reason="no space"),)
    world.crash("node-2")
    world.until_step(20)
    assert world.driver.state.seats == ("node-0", "node-1", "node-4", "node-3")
    assert world.run(60, lambda: world.driver.state.nodes["node-2"].status == NodeStatus.READY), world.lines[-10:]
    assert world.fake.nodes[machine]["spec"]["unschedulable"]
    assert "no space" in str(world.fake.nodes[machine]["metadata"]["annotations"])
    assert world.driver.state.nodes["node-2"].machine == world.fake.machine_of("node-2") != machine
    assert world.fake.changes("evict") == [pod]
    assert [incident.evicted for incident in world.driver.state.incidents] == [("node-2",)]

    for name in ("node-5", "node-1"):  # the other spare, then one that trains
        world.fake.set_ready(world.fake.machine_of(name), False)
        world.run(8)
    world.until_step(40)
    assert world.driver.state.seats == ("node-0", "node-2", "node-4", "node-3"), "the replaced node has a place again"


def test_a_driver_that_is_started_again_does_not_evict_twice(world) -> None:
    machine = world.fake.machine_of("node-2")
    world.sims["node-2"].finds = (Outcome(check="disk", status="fail", reason="no space"),)
    world.crash("node-2")
    for _ in range(20):
        world.run(1.5)
        world.kill_driver()
    world.until_step(20)
    assert world.run(60, lambda: world.driver.state.nodes["node-2"].status == NodeStatus.READY)
    assert (len(world.fake.changes("evict")), world.fake.changes("patch")) == (1, [machine])


def test_a_dead_machine_is_left_and_its_node_comes_back_elsewhere(world) -> None:
    machine = world.fake.machine_of("node-1")
    world.fake.set_ready(machine, False)
    world.until_step(20)
    assert world.driver.state.seats[1] == "node-4"
    assert world.run(120, lambda: world.driver.state.nodes["node-1"].status == NodeStatus.READY), world.lines[-10:]
    assert world.driver.state.nodes["node-1"].machine != machine
    assert not world.fake.nodes[machine]["metadata"].get("annotations", {}).get(CORDONED_BY), "it is dead, not bad"


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_operator_takes_an_evicted_node_back_before_it_has_moved(world, is_killed) -> None:
    for name in world.fake.nodes:
        if name not in {world.fake.machine_of(node) for node in world.names}:
            world.fake.set_ready(name, False)  # nowhere to go
    machine = world.fake.machine_of("node-5")
    order = {"by": "ada", "node": "node-5", "step": world.driver.step}
    world.driver.record(Ordered(at_s=world.driver.clock.now(), action="evict", **order))
    assert world.run(60, lambda: world.fake.machine_of("node-5") == "")
    world.driver.record(Ordered(at_s=world.driver.clock.now(), action="uncordon", **order))
    if is_killed:  # before its backend has carried it out
        world.driver.tick()
        world.kill_driver()
    assert world.run(60, lambda: world.fake.machine_of("node-5") == machine)
    assert world.run(20, lambda: world.driver.state.nodes["node-5"].status == NodeStatus.READY), world.lines[-5:]
    assert world.driver.state.phase == Phase.RUNNING


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_repaired_machine_is_taken_back_once_somebody_uncordons_it(world, is_restarted) -> None:
    """Exactly as many machines as nodes: the pod can only come back to where it was."""
    for name in world.fake.nodes:
        if name not in {world.fake.machine_of(node) for node in world.names}:
            world.fake.set_ready(name, False)
    machine = world.fake.machine_of("node-2")
    world.sims["node-2"].finds = (Outcome(check="disk", status="fail", reason="no space"),)
    world.crash("node-2")
    assert world.run(60, lambda: world.fake.machine_of("node-2") == "")
    if is_restarted:
        world.kill_driver()
    world.fake.set_cordon(machine, False)
    if is_restarted:
        world.kill_driver()
    assert world.run(60, lambda: world.driver.state.nodes["node-2"].status == NodeStatus.READY), world.lines[-10:]
    assert world.run(30, lambda: not world.backend.is_busy)
    for _ in range(2):
        world.run(10)
        world.kill_driver()
    world.run(20)
    assert world.driver.state.nodes["node-2"].status == NodeStatus.READY
    assert world.fake.machine_of("node-2") == machine
    assert world.fake.nodes[machine]["metadata"]["annotations"] == {}
    assert len(world.fake.changes("evict")) == 1
    assert [one.body["spec"] for one in world.fake.done if one.verb == "patch" and "spec" in one.body] == [{"unschedulable": True}]


@pytest.mark.parametrize("may_list", [True, False])
def test_neighbours_meet_under_one_switch_if_it_is_known_and_the_run_goes_on_anyway(world, may_list) -> None:
    for number in range(8):
        world.fake.set_labels(f"machine-{number}", {LABEL: f"s{number % 2}"})
    if not may_list:
        world.fake.rules.discard(("list", "nodes", None))
    world.kill_driver()  # the next one reads the labels anew
    world.run(2 * LOOK_S)
    met, tell = [], world.driver._outbox

    def watch(name: str, wanted: Desired) -> None:
        if wanted.diagnosis is not None and wanted.diagnosis.pair is not None and wanted.diagnosis.pair.round == 1:
            met.append({name, wanted.diagnosis.pair.peer})
        tell(name, wanted)

    world.driver._outbox = watch
    world.corrupt("node-0", "node-1", is_certain=False)
    world.until_step(50)
    pairs = {tuple(sorted(world.fake.machine_of(name)[-1] for name in pair)) for pair in met}
    assert pairs == ({("0", "2"), ("1", "3"), ("4", "5")} if may_list else {("0", "1"), ("2", "3"), ("4", "5")})
    assert world.driver.state.phase == Phase.RUNNING
    assert ("403" in status_of(world.driver)["where"]["switches"]) == (not may_list)
    world.fake.violations.clear()


def test_status_tells_how_the_pods_are(world) -> None:
    where = status_of(world.driver)["where"]
    assert where["jobset"] == "team/run"
    assert where["pods"].startswith("6 running")
    assert where["driver restarts"] == "3 of at most 200"
    assert where["switches"] == "0, known of 0 of 6 machines"

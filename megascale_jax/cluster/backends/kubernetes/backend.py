"""What the driver does to a cluster: one thread looks at all pods every few seconds, and makes good what was asked for.

Requests are only noted, so the driver's tick never waits for an API server. A look lists the pods, then goes through what is to be done
as the world is *now*: a machine that is cordoned already is left, a pod that is on another machine too. So a request may come again, a
look may break off anywhere, and a conflict (409) or a pod that is gone (404) is answered by the next look.

A machine out of service is looked at again and again: once somebody else has lifted its cordon (`kubectl uncordon`), it counts as repaired
and is never cordoned again for the same eviction. The annotation on it says so to the next driver too.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megascale_jax.cluster.backends.kubernetes.client import Cluster, Machine, Pod, RequestError
from megascale_jax.cluster.backends.kubernetes.names import DRIVER_RESTARTS, node_name
from megascale_jax.cluster.backends.kubernetes.switches import Switches
from megascale_jax.errors import BackendError

LOOK_S = 3.0
STALE_S = 4 * LOOK_S
"""Age at which the last look says nothing about what is alive."""
DEATH_LOOKS = 2
"""Looks in a row that must find an executor dead: a machine reports a restarted container late."""
STUCK_S = 30.0
"""A node that was missed for so long, and whose machine is away, has its pod deleted without a word of that machine."""
EVICT_S = 60.0
"""Time for which a disruption budget may refuse; then the pod is deleted."""
LONGEST_QUIET_S = 30.0
"""For which the API server may say that it wants no requests."""

_logger = logging.getLogger(__name__)


@dataclass
class _Task:
    """A machine to take out of service, or to take back into it."""

    machine: str
    reason: str
    is_removal: bool
    refused_s: float | None = None
    """When a disruption budget refused first."""
    was_cordoned: bool = False
    """The machine was seen cordoned, by whomever."""
    is_lifted: bool = False
    """Then somebody has uncordoned it."""
    is_done: bool = False


@dataclass(frozen=True)
class _Missed:
    """A node that the driver wants to have and has not."""

    first_s: float
    last_s: float


class KubernetesBackend:
    """Executors that are pods of a JobSet. `start` begins to look; without it, `look` is called from outside. ``switch_labels``: of
    machines, as `KubernetesConfig` has them.
    """

    def __init__(self, cluster: Cluster, switch_labels: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic):
        self._cluster, self._clock = cluster, clock
        self._switches = Switches(cluster, switch_labels, clock)
        self._lock = threading.Lock()
        self._news, self._is_ended = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="kubernetes", daemon=True)
        self._tasks: dict[str, _Task] = {}
        self._missed: dict[str, _Missed] = {}
        self._looked_s: float | None = None
        self._pods: Mapping[str, list[Pod]] = {}
        self._living: set[str] = set()
        """Nodes whose executor was seen to run, and whose death has not been told."""
        self._dead: Counter[str] = Counter()
        self._were_on: dict[str, set[str]] = {}
        """Node -> machines that its pods were seen on."""
        self._troubles: dict[str, str] = {}
        self._quiet_until_s = clock()
        """The API server wants no requests before."""
        self._driver_restarts: int | None = None

    def start(self) -> None:
        """Look from now on, in a thread that ends with the process."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; waits for the look that is under way."""
        self._is_ended = True
        self._news.set()
        self._thread.join()

    # What the driver asks for; nothing here waits.

    def ensure(self, name: str) -> None:
        """Note that the node is missed. Its pod is made by the Job controller, also in place of a failed one; what may stand in the way
        is a pod on a machine that is away.
        """
        now = self._clock()
        with self._lock:
            missed = self._missed.get(name)
            is_news = missed is None or now > missed.last_s + STALE_S
            self._missed[name] = _Missed(now if is_news or missed is None else missed.first_s, now)

    def is_alive(self, name: str) -> bool | None:
        """``False`` once for each death that the last looks found: by the next one the executor may be back, and known to the driver."""
        with self._lock:
            if self._looked_s is None or self._clock() > self._looked_s + STALE_S:
                return None
            if any(pod.is_running for pod in self._pods.get(name, ())):
                return True
            if name in self._living and self._dead[name] >= DEATH_LOOKS:
                self._living.discard(name)
                return False
            return None

    def remove(self, name: str, machine: str, reason: str) -> None:
        """Cordon the machine, then evict the node's pod if it is there."""
        self._note(name, _Task(_known(name, machine), reason, is_removal=True))

    def restore(self, name: str, machine: str) -> None:
        """Uncordon the machine if this job has cordoned it, and take its annotations off. Raises BackendError until that is done: a driver
        that ends before must ask again.
        """
        task = _Task(_known(name, machine), "", is_removal=False)
        with self._lock:
            old = self._tasks.get(name)
            if old is not None and (old.machine, old.is_removal, old.is_done) == (machine, False, True):
                del self._tasks[name]
                return
        self._note(name, task)
        raise BackendError(f"machine {machine} is not back in service yet")

    def switch(self, machine: str) -> str | None:
        """By the machine's labels, as they were read last."""
        return self._switches.of(machine)

    def release(self, name: str) -> None:
        """Nothing to do: the JobSet ends with its driver."""

    def taken_back(self) -> Mapping[str, str]:
        """Nodes of machines that were to be out of service, and that somebody has uncordoned himself."""
        with self._lock:
            return {name: task.machine for name, task in self._tasks.items() if task.is_removal and task.is_lifted}

    def facts(self) -> Mapping[str, str]:
        """The JobSet, its pods, how often its driver was restarted, and what does not work."""
        with self._lock:
            phases = Counter(pod.phase.lower() for pods in self._pods.values() for pod in pods)
            age = "never seen" if self._looked_s is None else f"{self._clock() - self._looked_s:.0f} s ago"
            pods = ", ".join(f"{number} {phase}" for phase, number in sorted(phases.items())) or "none"
            restarts = "unknown" if self._driver_restarts is None else f"{self._driver_restarts} of at most {DRIVER_RESTARTS}"
            facts = {"jobset": self._cluster.job, "pods": f"{pods} ({age})", "driver restarts": restarts}
            return facts | self._switches.facts(self._machines()) | self._troubles

    @property
    def is_busy(self) -> bool:
        """Whether a request is not carried out yet."""
        with self._lock:
            return any(not task.is_done for task in self._tasks.values())

    # What the thread does.

    def look(self) -> None:
        """See how things are, and do what is to be done. Takes as long as the API server does, within limits."""
        if self._clock() < self._quiet_until_s or not self._attempt("pods", self._list):
            return
        with self._lock:
            tasks, missed = dict(self._tasks), dict(self._missed)
        machines: dict[str, Machine | None] = {}
        for name, task in tasks.items():
            if task.is_removal or not task.is_done:
                self._attempt(name, lambda name=name, task=task: self._carry_out(name, task))
        for name, one in missed.items():
            if self._looked_s is not None and one.last_s + STALE_S < self._looked_s:
                with self._lock:
                    self._missed.pop(name, None)
            elif (name not in tasks or tasks[name].is_done) and one.last_s >= one.first_s + STUCK_S:
                self._attempt(name, lambda name=name: self._free(name, machines))
        if self._driver_restarts is None:  # it does not change while this driver lives
            self._attempt("driver restarts", self._count_restarts)
        in_use = self._machines()
        if self._switches.are_due(in_use):
            self._attempt("switches", lambda: self._switches.read(in_use))

    def _list(self) -> None:
        pods = self._cluster.pods()
        with self._lock:
            self._see(pods)

    def _machines(self) -> set[str]:
        return {pod.machine for pods in self._pods.values() for pod in pods if pod.machine and not pod.is_over}

    def _count_restarts(self) -> None:
        self._driver_restarts = self._cluster.driver_restarts()

    def _see(self, pods: list[Pod]) -> None:
        self._looked_s, self._pods = self._clock(), {}
        for pod in pods:
            self._pods.setdefault(node_name(pod.index), []).append(pod)
            if pod.machine:
                self._were_on.setdefault(node_name(pod.index), set()).add(pod.machine)
        running = {name for name, found in self._pods.items() if any(pod.is_running for pod in found)}
        self._living |= running
        for name in self._living:
            self._dead[name] = 0 if name in running else self._dead[name] + 1

    def _carry_out(self, name: str, task: _Task) -> None:
        machine = self._cluster.machine(task.machine)
        if task.is_removal:
            self._take_out(name, task, machine)
            return
        if machine is not None and machine.cordoned_by == self._cluster.job:
            if machine.is_cordoned and not task.is_lifted:
                self._cluster.uncordon(machine)
            else:  # a cordon that is there now is somebody else's
                self._cluster.forget(machine)
        task.is_done = True

    def _take_out(self, name: str, task: _Task, machine: Machine | None) -> None:
        """Cordon, then evict; a machine that is out of service already is only looked at."""
        if machine is not None and not machine.is_cordoned:
            is_ours = machine.cordoned_by == self._cluster.job and machine.reason == Cluster.kept(task.reason)
            if task.was_cordoned or is_ours:
                task.is_lifted = task.is_done = True
                return
            if task.machine not in self._were_on.get(name, ()):
                self._drop(name, task)
                raise RequestError(f"machine {task.machine} is not cordoned: no pod of {name} was seen there, whatever its executor says")
            self._cluster.cordon(machine, task.reason)
        elif machine is not None:
            task.was_cordoned, task.is_lifted = True, False
        here = [pod for pod in self._pods.get(name, ()) if pod.machine == task.machine and not pod.is_over]
        for pod in here:
            self._take_off(pod, machine, task)
        task.is_done = not here
        if machine is None and task.is_done:
            self._drop(name, task)

    def _drop(self, name: str, task: _Task) -> None:
        with self._lock:
            if self._tasks.get(name) is task:
                del self._tasks[name]

    def _take_off(self, pod: Pod, machine: Machine | None, task: _Task) -> None:
        """One step towards the end of a pod; the next look sees how far it went."""
        if machine is None or (pod.is_leaving and not machine.is_ready):
            self._cluster.delete(pod, at_once=True)
        elif not pod.is_leaving:
            now = self._clock()
            if task.refused_s is not None and now >= task.refused_s + EVICT_S:
                self._cluster.delete(pod, at_once=False)
                return
            try:
                self._cluster.evict(pod)
            except RequestError as error:
                if not error.is_of_budget:
                    raise
                task.refused_s = now if task.refused_s is None else task.refused_s

    def _free(self, name: str, machines: dict[str, Machine | None]) -> None:
        """Delete pods of machines that are away, so that the Job controller puts others elsewhere."""
        for pod in self._pods.get(name, ()):
            if pod.is_over or not pod.machine:
                continue
            if pod.machine not in machines:
                machines[pod.machine] = self._cluster.machine(pod.machine)
            machine = machines[pod.machine]
            if machine is None or not machine.is_ready:
                self._cluster.delete(pod, at_once=True)

    def _attempt(self, name: str, action: Callable[[], None]) -> bool:
        """Whether it went well. What did not is tried again by the next look, or when the API server wants to hear of it."""
        if self._clock() < self._quiet_until_s:
            return False
        try:
            action()
        except RequestError as error:
            if error.after_s is not None:
                self._quiet_until_s = self._clock() + min(error.after_s, LONGEST_QUIET_S)
            if error.status not in (404, 409) or name == "pods":  # else it has changed meanwhile
                self._trouble(name, str(error))
            return False
        self._trouble(name, "")
        return True

    def _trouble(self, where: str, text: str) -> None:
        with self._lock:
            old = self._troubles.pop(where, "")
            if text:
                self._troubles[where] = text
        if text and text != old:
            _logger.warning("%s", text)

    def _note(self, name: str, task: _Task) -> None:
        with self._lock:
            old = self._tasks.get(name)
            if old is None or (old.machine, old.is_removal) != (task.machine, task.is_removal):
                task.is_lifted = not task.is_removal and old is not None and old.machine == task.machine and old.is_lifted
                self._tasks[name] = task
        self._news.set()

    def _work(self) -> None:
        while not self._is_ended:
            try:
                self.look()
            except Exception:
                _logger.exception("a look at the cluster broke off")
            self._news.wait(LOOK_S)
            self._news.clear()


def _known(name: str, machine: str) -> str:
    if not machine:
        raise BackendError(f"{name} did not say which machine it is on; start executors with --machine (spec.nodeName)")
    return machine

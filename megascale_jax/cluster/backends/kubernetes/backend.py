"""What the driver does to a cluster: one thread looks at all pods every few seconds, and makes good what was asked for.

Requests are only noted, so the driver's tick never waits for an API server. A look lists the pods, then goes through what is to be done
as the world is *now*: a machine that is cordoned already is left, a pod that is on another machine too. So a request may come again, a
look may break off anywhere, and a conflict (409) or a pod that is gone (404) is answered by the next look.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megascale_jax.cluster.backends.kubernetes.client import Cluster, Machine, Pod, RequestError
from megascale_jax.cluster.backends.kubernetes.names import node_name
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

_logger = logging.getLogger(__name__)


@dataclass
class _Task:
    """A machine to take out of service, or to take back into it."""

    machine: str
    reason: str
    is_removal: bool
    refused_s: float | None = None
    """When a disruption budget refused first."""


@dataclass(frozen=True)
class _Missed:
    """A node that the driver wants to have and has not."""

    first_s: float
    last_s: float


class KubernetesBackend:
    """Executors that are pods of a JobSet. `start` begins to look; without it, `look` is called from outside."""

    def __init__(self, cluster: Cluster, *, clock: Callable[[], float] = time.monotonic):
        self._cluster, self._clock = cluster, clock
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
        self._troubles: dict[str, str] = {}

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
        """Uncordon the machine if this job has cordoned it."""
        self._note(name, _Task(_known(name, machine), "", is_removal=False))

    def release(self, name: str) -> None:
        """Nothing to do: the JobSet ends with its driver."""

    def facts(self) -> Mapping[str, str]:
        """The JobSet, its pods, and what does not work."""
        with self._lock:
            phases = Counter(pod.phase.lower() for pods in self._pods.values() for pod in pods)
            age = "never seen" if self._looked_s is None else f"{self._clock() - self._looked_s:.0f} s ago"
            pods = ", ".join(f"{number} {phase}" for phase, number in sorted(phases.items())) or "none"
            return {"jobset": self._cluster.job, "pods": f"{pods} ({age})", **self._troubles}

    @property
    def is_busy(self) -> bool:
        """Whether a request is not carried out yet."""
        return bool(self._tasks)

    # What the thread does.

    def look(self) -> None:
        """See how things are, and do what is to be done. Takes as long as the API server does, within limits."""
        try:
            pods = self._cluster.pods()
        except RequestError as error:
            self._trouble("pods", str(error))
            return
        self._trouble("pods", "")
        with self._lock:
            self._see(pods)
            tasks, missed = dict(self._tasks), dict(self._missed)
        machines: dict[str, Machine | None] = {}
        for name, task in tasks.items():
            self._attempt(name, lambda name=name, task=task: self._carry_out(name, task))
        for name, one in missed.items():
            if self._looked_s is not None and one.last_s + STALE_S < self._looked_s:
                with self._lock:
                    self._missed.pop(name, None)
            elif name not in tasks and one.last_s >= one.first_s + STUCK_S:
                self._attempt(name, lambda name=name: self._free(name, machines))

    def _see(self, pods: list[Pod]) -> None:
        self._looked_s, self._pods = self._clock(), {}
        for pod in pods:
            self._pods.setdefault(node_name(pod.index), []).append(pod)
        running = {name for name, found in self._pods.items() if any(pod.is_running for pod in found)}
        self._living |= running
        for name in self._living:
            self._dead[name] = 0 if name in running else self._dead[name] + 1

    def _carry_out(self, name: str, task: _Task) -> None:
        machine = self._cluster.machine(task.machine)
        if task.is_removal:
            if machine is not None and not machine.is_cordoned:
                self._cluster.cordon(machine, task.reason)
            here = [pod for pod in self._pods.get(name, ()) if pod.machine == task.machine and not pod.is_over]
            for pod in here:
                self._take_off(pod, machine, task)
            is_done = not here
        else:
            if machine is not None and machine.is_cordoned and machine.cordoned_by == self._cluster.job:
                self._cluster.uncordon(machine)
            is_done = True
        if is_done:
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
                if error.status in (429, 500):  # refused by a budget, or by more than one
                    task.refused_s = now if task.refused_s is None else task.refused_s
                if error.status != 429:
                    raise

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

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
            self._trouble(name, "")
        except RequestError as error:
            if error.status in (404, 409):  # it has changed meanwhile
                return
            self._trouble(name, str(error))

    def _trouble(self, where: str, text: str) -> None:
        with self._lock:
            old = self._troubles.pop(where, "")
            if text:
                self._troubles[where] = text
        if text and text != old:
            _logger.warning("%s; it is tried again", text)

    def _note(self, name: str, task: _Task) -> None:
        with self._lock:
            old = self._tasks.get(name)
            if old is None or (old.machine, old.is_removal) != (task.machine, task.is_removal):
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

"""The one thread that talks to Slurm, so that the driver's tick never waits for it: takes requests, publishes what it saw last.

Requests are kept until they are done: a node that should be drained is tried again, and what stands in the way is said once.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from megascale_jax.cluster.backends.slurm_commands import REASON_MARK, NodeState, Slurm, Step
from megascale_jax.errors import BackendError

_logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Time between two looks: two questions to the controller for a whole job."""
AGAIN_S = 60.0
"""Time after which a request that failed is tried again."""
FRESH_S = 30.0
"""A look that is older says nothing any more."""


@dataclass(frozen=True)
class Look:
    """What Slurm said. ``began_s``: when it was asked, on the monotonic clock."""

    began_s: float
    steps: Mapping[str, Sequence[Step]] = field(default_factory=dict)
    """Executors by node."""
    nodes: Mapping[str, NodeState] = field(default_factory=dict)


class SlurmWorker:
    """Looks at the ``names`` of a job, drains and resumes nodes, ends steps. ``say``: for what a person should know."""

    def __init__(
        self, slurm: Slurm, job: str, names: Sequence[str], say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ):
        self._slurm, self._job, self._names, self._say, self._clock = slurm, job, tuple(names), say, clock
        self.newest: Look | None = None
        """Replaced as a whole; read by any thread."""
        self.trouble = "Slurm has not answered yet"
        """Why there is no newer look; empty when the last one succeeded."""
        self._requests: queue.SimpleQueue[Callable[[], None] | threading.Event] = queue.SimpleQueue()
        self._drains: dict[str, str] = {}
        self._resumes: set[str] = set()
        self._ends: dict[str, Step] = {}
        self._again_s: dict[str, float] = {}
        self._said: dict[str, str] = {}

    def start(self) -> None:
        """In a thread of its own, until the process ends."""
        threading.Thread(target=self._run, name="slurm", daemon=True).start()

    def drain(self, name: str, reason: str) -> None:
        """Have a node drained."""
        self._requests.put(lambda: self._want_drained(name, reason))

    def resume(self, name: str) -> None:
        """Have a node that was drained by a driver back in service."""
        self._requests.put(lambda: self._want_resumed(name))

    def end(self, steps: Sequence[Step]) -> None:
        """Have steps ended."""
        self._requests.put(lambda: self._ends.update({step.number: step for step in steps}))

    def wait(self, limit_s: float) -> bool:
        """Until all that was asked for was tried, and a new look was had; whether that was in time."""
        done = threading.Event()
        self._requests.put(done)
        return done.wait(limit_s)

    def work(self, limit_s: float = 0.0) -> None:
        """One round: take in what is asked within ``limit_s``, try what is due, look; then answer those who `wait`."""
        waiting = []
        with suppress(queue.Empty):
            request = self._requests.get(timeout=limit_s) if limit_s > 0 else self._requests.get_nowait()
            while True:
                waiting.append(request) if isinstance(request, threading.Event) else request()
                request = self._requests.get_nowait()
        self._try_all()
        self._look()
        for done in waiting:
            done.set()

    def _run(self) -> None:
        limit_s = 0.0
        while True:
            try:
                self.work(limit_s)
            except Exception as error:  # a fault of this very module: without the thread no step would ever be found again
                self.trouble = f"{type(error).__name__}: {error}"
                _logger.exception("a round with Slurm failed")
                time.sleep(LOOK_S)
            limit_s = LOOK_S

    def _want_drained(self, name: str, reason: str) -> None:
        self._resumes.discard(name)
        self._drains[name] = reason
        self._again_s.pop(name, None)

    def _want_resumed(self, name: str) -> None:
        self._drains.pop(name, None)
        self._resumes.add(name)
        self._again_s.pop(name, None)

    def _look(self) -> None:
        began_s = self._clock()
        try:
            steps: dict[str, list[Step]] = {}
            for step in self._slurm.steps(self._job):
                steps.setdefault(step.node, []).append(step)
            self.newest = Look(began_s, steps, self._slurm.nodes(self._names))
            self.trouble = ""
        except BackendError as error:
            self.trouble = str(error)

    def _try_all(self) -> None:
        listed = {step.number for steps in self.newest.steps.values() for step in steps} if self.newest is not None else self._ends.keys()
        steps = [step for number, step in self._ends.items() if number in listed]
        try:
            self._slurm.end(steps)
            self._ends.clear()
        except BackendError as error:
            self._note("", f"steps {', '.join(step.number for step in steps)} are not ended: {error}")
        now = self._clock()
        for name in [name for name in (*self._drains, *self._resumes) if now >= self._again_s.get(name, 0.0)]:
            try:
                self._drain(name) if name in self._drains else self._resume(name)
            except BackendError as error:
                self._again_s[name] = now + AGAIN_S
                what = "drained; this job does not use it, others may" if name in self._drains else "resumed"
                self._note(name, f"{name} is not {what}: {error}")

    def _drain(self, name: str) -> None:
        state = self._slurm.nodes([name]).get(name)
        if state is None or not state.is_drained:  # a reason that others gave is theirs
            self._slurm.drain(name, self._drains[name])
            self._note(name, f"{name} is drained in Slurm")
        del self._drains[name]

    def _resume(self, name: str) -> None:
        state = self._slurm.nodes([name]).get(name)
        if state is not None and state.is_drained and state.reason.startswith(REASON_MARK.strip()):
            self._slurm.resume(name)
            self._note(name, f"{name} is resumed in Slurm")
        elif state is not None and state.is_drained:
            self._note(name, f"{name} stays drained in Slurm, since others did that: {state.reason}")
        self._resumes.discard(name)

    def _note(self, key: str, text: str) -> None:
        if self._said.get(key) != text:
            self._said[key] = text
            self._say(text)

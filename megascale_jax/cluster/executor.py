"""The executor: makes a node do what the driver wants, and says how it goes (paper section 4.1).

One per node. It is level-triggered: the newest `Desired` is compared with what is there, and the difference is made good, however
often it is told. While the driver cannot be reached everything goes on as it was last wanted; after ``orphan_s`` the processes are
asked to save and the executor leaves, so that a dead job does not hold its nodes for ever.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megascale_jax.cluster.counters import Counters
from megascale_jax.cluster.messages import Answer, Assignment, Beat, Desired, Diagnosis, DiagnosisOrder, Hello, Message
from megascale_jax.cluster.processes import Launch, TrainingProcesses
from megascale_jax.cluster.reports import ProcessReport
from megascale_jax.errors import StuckProcessError

LOOK_S = 0.1
"""Time between two looks at the processes; a change is reported at once."""
CUT_OFF_S = 12.0
"""Without a word of the driver, which repeats itself every 5 s."""
ORPHAN_S = 900.0
LEAVE_GRACE_S = 30.0
WARM_AFTER_STEPS = 1
"""Steps of an attempt after which the process of the next one is prepared."""
WARM_LOG = "warm.log"
"""In the node's folder: what the process that is prepared says."""
SETTLED_S = 5.0
"""Time without a process after which a spare prepares one."""

_logger = logging.getLogger(__name__)


class Link(Protocol):
    """The connection to the driver, which comes back by itself."""

    def send(self, message: Message) -> bool:
        """Whether it could be handed over."""
        ...


Examine = Callable[[DiagnosisOrder], Sequence[Mapping[str, object]]]
"""Runs checks on this node; blocks until they are done or their time is up."""


class Executor:
    """One node. ``command``: argv of a training process, without the overrides of an attempt. ``hello``: how the node presents itself.

    ``counters`` is asked in a thread of its own; it may hang or raise.
    """

    def __init__(
        self,
        hello: Hello,
        command: Sequence[str],
        environment: Mapping[str, str],
        processes: TrainingProcesses,
        link: Link,
        examine: Examine,
        counters: Callable[[], dict[str, float]],
        folder: Path,
        orphan_s: float = ORPHAN_S,
    ):
        self._hello, self._command, self._environment = hello, tuple(command), dict(environment)
        self._processes, self._link, self._examine, self._folder = processes, link, examine, folder
        self._counters, self._orphan_s = Counters(counters), orphan_s
        self.desired: Desired | None = None
        self.leaving = False
        self._attempt = 0
        self._has_processes = False
        """Something was started and has not been seen to be gone with all that it started."""
        self._news = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._examining: asyncio.Task[None] | None = None
        self._diagnosis: Diagnosis | None = None
        self._said: object = None
        self._beat_at = 0.0
        self._reports: tuple[ProcessReport, ...] = ()
        self._changed_at = time.monotonic()
        self._heard_at = time.monotonic()

    def received(self, message: Message) -> None:
        """The driver said what it wants."""
        self._heard_at = time.monotonic()
        if isinstance(message, Desired):
            self.desired = message
            self._news.set()
        elif isinstance(message, Answer):
            _logger.info("driver: %s", message.text)

    def connected(self) -> None:
        """The link is there again: present the node, and say again what may have been lost."""
        self._link.send(self._hello.model_copy(update={"attempt": self._attempt}))
        if self._diagnosis is not None:
            self._link.send(self._diagnosis)
        self._said = None

    async def run(self) -> None:
        """Until the driver lets this node go, or `leaving` is set; no training process is left then."""
        self._counters.start()
        try:
            while not self.leaving:
                self._make_so()
                self._report()
                try:
                    await asyncio.wait_for(self._news.wait(), LOOK_S)
                except TimeoutError:
                    continue
                self._news.clear()
        finally:
            self._counters.close()
            if self._examining is not None:
                self._examining.cancel()
            if self._stopping is not None:
                await self._stopping
            self._processes.cool_down()
            await self._stop(0.0 if self._is_let_go else LEAVE_GRACE_S)
            self._report(always=True)

    @property
    def is_over(self) -> bool:
        """The driver has said that the job has ended."""
        return self.desired is not None and self.desired.is_over

    @property
    def _is_let_go(self) -> bool:
        return self.desired is not None and self.desired.leave

    def _make_so(self) -> None:
        """One look at what is wanted and what is there."""
        wanted = self.desired
        if time.monotonic() > self._heard_at + self._orphan_s:
            _logger.warning("no word of the driver for %.0f s: this node gives up", self._orphan_s)
            self.leaving = True
        if wanted is None:
            return
        assignment = wanted.assignment
        if self._has_processes and (assignment is None or assignment.attempt != self._attempt):
            if self._stopping is None:
                self._stopping = asyncio.create_task(self._stop(wanted.stop_grace_s))
        elif self._is_cut_off() and self._is_left_alone() and self._stopping is None:
            _logger.warning("no word of the driver, and peers of the training process are gone: it is ended")
            self._stopping = asyncio.create_task(self._stop(0.0))
        elif wanted.leave and self._stopping is None:
            self.leaving = True
        elif assignment is not None and assignment.attempt > self._attempt and self._stopping is None:
            self._begin(assignment)
        elif wanted.warm and self._stopping is None and self._is_settled():
            self._processes.warm_up(self._environment, self._folder / WARM_LOG)
        order = wanted.diagnosis
        if order is not None and (self._diagnosis is None or self._diagnosis.round != order.round) and self._examining is None:
            self._examining = asyncio.create_task(self._examine_for(order))

    def _is_cut_off(self) -> bool:
        """Whether the driver has been silent for longer than it ever is."""
        return time.monotonic() > self._heard_at + CUT_OFF_S

    def _is_left_alone(self) -> bool:
        """Whether the training process says that peers are gone: it cannot go on, and may hold what its successor needs, for a minute."""
        return self._has_processes and any(report.is_secondary for report in self._reports)

    def _is_settled(self) -> bool:
        """Nothing is started or ended here for a while: the next process may be prepared without being in anybody's way."""
        if not self._has_processes:
            return self._examining is None and time.monotonic() > self._changed_at + SETTLED_S
        return bool(self._reports) and all(report.passes.get("step", 0) > WARM_AFTER_STEPS for report in self._reports)

    def _begin(self, assignment: Assignment) -> None:
        try:
            self._start(assignment)
        except (
            OSError,
            RuntimeError,
            StuckProcessError,
        ) as error:  # a full disk, no thread: the beat shows a node without a process, which is an anomaly
            _logger.error("attempt %d cannot be started here: %s", assignment.attempt, error)

    async def _stop(self, grace_s: float) -> None:
        try:
            await asyncio.to_thread(self._processes.stop, grace_s)
            self._has_processes, self._changed_at = False, time.monotonic()
        except StuckProcessError as error:  # the driver gives this node up when its time is over
            _logger.error("%s", error)
        finally:
            self._stopping = None
            self._news.set()

    def _start(self, assignment: Assignment) -> None:
        self._attempt, self._has_processes = assignment.attempt, True
        environment = self._environment | {
            "MEGASCALE_COORDINATOR": assignment.coordinator,
            "MEGASCALE_NUM_PROCESSES": str(assignment.num_ranks),
            "MEGASCALE_PROCESS_ID": str(assignment.rank),
        }
        if assignment.num_ranks == 1:
            for name in ("MEGASCALE_COORDINATOR", "MEGASCALE_NUM_PROCESSES", "MEGASCALE_PROCESS_ID"):
                del environment[name]
        command = (*self._command, *assignment.overrides)
        self._processes.start(assignment.attempt, [Launch(assignment.rank, command, environment)], self._folder)

    async def _examine_for(self, order: DiagnosisOrder) -> None:
        try:
            outcomes = await asyncio.to_thread(self._examine, order)
            self._diagnosis = Diagnosis.model_validate({"round": order.round, "outcomes": tuple(outcomes)})
            self._link.send(self._diagnosis)
        except Exception:
            _logger.exception("the diagnosis of round %d could not be made", order.round)
            self._diagnosis = Diagnosis(round=order.round, outcomes=())
            self._link.send(self._diagnosis)
        finally:
            self._examining = None

    def _report(self, *, always: bool = False) -> None:
        """A beat when it is time, and at once when something ended or began."""
        period_s = self.desired.beat_s if self.desired is not None else 1.0
        now = time.monotonic()
        shape = (self._attempt, self._has_processes, self._processes.states())
        if not always and now < self._beat_at + period_s and shape == self._said:
            return
        self._said, self._beat_at = shape, now
        reports = self._reports = self._processes.poll()
        self._link.send(Beat(attempt=self._attempt, is_idle=not self._has_processes, processes=reports, counters=self._counters.newest()))

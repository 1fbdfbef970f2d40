"""The driver: turns what nodes say into events, journals them, and tells each node what it should be doing (paper section 4.1).

No thread, no socket and no clock of its own: `heard`, `gone` and `tick` are called, ``outbox`` takes what should be sent, so that
everything here runs on virtual time in tests. `driver_process.py` connects it to the world.

Whatever is done follows from the journaled state and may be done again: a driver that is killed at any line and started again
reads its journal, hears the executors present themselves, and goes on.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol

from megascale_jax.cluster.anomaly import Findings, NodeView, Watcher, odd_software
from megascale_jax.cluster.backends.base import Backend
from megascale_jax.cluster.diagnose.network import MOST_ROUNDS
from megascale_jax.cluster.diagnose.nic import Baseline
from megascale_jax.cluster.diagnose.request import Node
from megascale_jax.cluster.examination import Examination
from megascale_jax.cluster.governor import Governor
from megascale_jax.cluster.journal import Journal
from megascale_jax.cluster.lifecycle import ENDS, NodeStatus, Phase
from megascale_jax.cluster.messages import Beat, Desired, Diagnosis, Hello
from megascale_jax.cluster.policy import ACTIVE, apply, deadline, desired, first_state, looks_again_at, ranks_of
from megascale_jax.cluster.reports import ProcessReport
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
    Restored,
    Shape,
    State,
    Suspicion,
)
from megascale_jax.cluster.story import told
from megascale_jax.cluster.supply import Supply
from megascale_jax.cluster.suspects import Suspects
from megascale_jax.cluster.webhook import Webhook
from megascale_jax.config.cluster import ClusterConfig
from megascale_jax.errors import JournalError
from megascale_jax.observe.events import Events

_REPEAT_S = 5.0
"""Time after which a node is told again what it knows."""
_ADVANCED_S = 60.0
"""Time between two events about progress without a new checkpoint."""
_LIMITS_S = 30.0
_OBSERVED = 20
_WATCH_S = 0.5
"""Between two looks at what all processes do, unless one has changed its state."""
_WATCH_PER_NODE_S = 1e-3
"""At least, for each node: a look takes 15 us a node, so all looks take 2 % of a core however many nodes there are."""
_MISS_PER_NODE_S = 3e-4
"""Between two looks for nodes that are silent or dead, for each node."""
_SUPPLY_S = 0.5
"""Between two looks at what the backend should have running, unless the job has changed."""


class Clock(Protocol):
    """Seconds on the journal's axis."""

    def now(self) -> float:
        """Never less than before."""
        ...


class Driver:
    """One job. ``names``: nodes that the backend should have running; ``outbox`` sends to a node, or drops when it is not connected."""

    def __init__(
        self,
        journal: Journal,
        config: ClusterConfig,
        shapes: tuple[Shape, ...],
        names: tuple[str, ...],
        total_steps: int,
        backend: Backend,
        watcher: Watcher,
        clock: Clock,
        outbox: Callable[[str, Desired], None],
        say: Callable[[str], None] = print,
        events: Events | None = None,
        suspects: Suspects | None = None,
        webhook: Webhook | None = None,
    ):
        """Read the journal: the job is where it was. Raises RunFolderError for a journal that cannot be read.

        ``events`` are told what the journal is, and phases; the journal stays the truth. ``suspects``: looks for slow nodes.
        ``webhook``: is told what people should hear.
        """
        self.journal, self.config, self.names, self.total_steps = journal, config, names, total_steps
        self.backend, self.watcher, self.clock, self._outbox, self._say = backend, watcher, clock, outbox, say
        self._events = events or Events(None)
        self._phase_began_ns = self._events.clock()
        self.state = first_state(shapes)
        for event in journal.events():
            self.state = apply(self.state, event, config)
        now = clock.now()
        self.beats: dict[str, Beat] = {}
        self.software: dict[str, Mapping[str, str]] = {}
        self._hellos: dict[str, Hello] = {}
        self._stuck: set[str] = set()
        """Given up because their processes did not end; they come back once these have."""
        self._heard_s = {name: now for name, node in self.state.nodes.items() if node.lost_at_s is None}
        self._told: dict[str, tuple[Desired, float]] = {}
        self._told_state: State | None = None
        self._tell_again_s = now
        self._first_finding_s: float | None = None
        self._said: set[tuple[int, str, str | None]] = set()
        self.observed: deque[tuple[float, str]] = deque(maxlen=_OBSERVED)
        """What rules found that only say so, and when."""
        self._advanced = (0, 0, now)
        self._resumed_step = 0
        self._watch_at, self._miss_at, self._has_news = now, now, True
        self._limits_kept_s = now
        self.supply = Supply(backend, names, say)
        self._supplied, self._supply_at = self.state, now
        self._unwritten = ""
        """Why the journal cannot be written."""
        self.examination: Examination | None = None
        self.webhook = webhook
        self.governor, self._govern_at = Governor(config, suspects), now

    # What arrives.

    def heard(self, name: str, message: Hello | Beat | Diagnosis) -> None:
        """A node said something. ``name`` is the one that its connection was authenticated for."""
        self._heard_s[name] = self.clock.now()
        try:  # thousands a second: no context manager
            self._hear(name, message)
        except JournalError as error:
            self._not_journaled(error)

    def _hear(self, name: str, message: Hello | Beat | Diagnosis) -> None:
        match message:
            case Hello():
                if (before := self._hellos.get(name)) is not None and before.incarnation != message.incarnation:
                    self._stuck.discard(name)  # its processes have ended with the executor before
                self._hellos[name] = message
                if name not in self._stuck:
                    self._present(name, message)
            case Beat():
                before = self.beats.get(name)
                self._has_news |= before is None or _states(before) != _states(message)
                self.beats[name] = message
                if message.is_idle:
                    self._stuck.discard(name)
                hello = self._hellos.get(name)
                is_back = hello is not None and name not in self._stuck and self._is_news(name, hello)
                if hello is not None and is_back and self.backend.is_alive(name) is not False:  # else its last words were late
                    self._present(name, hello)  # it was silent, and its connection has survived
                    self.beats[name] = message
            case Diagnosis():
                self.governor.heard(name, message)
                if self.examination is not None:
                    self.examination.heard(name, message)
            case _:
                pass

    def _is_news(self, name: str, hello: Hello) -> bool:
        node = self.state.nodes.get(name)
        return node is None or node.incarnation != hello.incarnation or node.lost_at_s is not None

    def _present(self, name: str, hello: Hello) -> None:
        if self._is_news(name, hello):
            self.beats.pop(name, None)
            self.record(Joined(at_s=self.clock.now(), **hello.model_dump(include={"node", "incarnation", "address", "ports", "machine"})))
        self.software[name] = hello.software
        self._told.pop(name, None)
        self._told_state = None
        if self.config.rules.software != "off":
            self._observe(odd_software(self.software))

    # What time brings.

    def tick(self) -> None:
        """Look at everything once. Call it every few tenths of a second.

        Without a journal nothing is decided, and all is tried again; what was decided before holds, and nodes go on hearing it.
        """
        with self._journaled():
            self._look()
        with self._journaled():
            self._keep_supplied()
        self.tell()

    def _keep_supplied(self) -> None:
        now = self.clock.now()
        if self.state is self._supplied and now < self._supply_at:
            return
        for name in self.supply.taken_back(self.state):
            self.record(Ordered(at_s=self.clock.now(), action="uncordon", node=name, by="the cluster", step=self.step))
        self._supplied, self._supply_at = self.state, now + _SUPPLY_S
        for name in self.supply.keep(self.state):
            self.record(Restored(at_s=self.clock.now(), node=name))

    @contextmanager
    def _journaled(self) -> Iterator[None]:
        try:
            yield
        except JournalError as error:
            self._not_journaled(error)

    def _not_journaled(self, error: JournalError) -> None:
        if str(error) != self._unwritten:
            self._unwritten = str(error)
            self._say(f"alarm: {error}")

    def _look(self) -> None:
        now = self.clock.now()
        if now >= self._miss_at:
            self._miss_at = now + _MISS_PER_NODE_S * len(self.state.nodes)
            self._miss(now)
        if self._has_news or self._first_finding_s is not None or now >= self._watch_at:
            self._has_news, self._watch_at = False, now + self._watch_s
            if self.state.phase in ACTIVE:
                self._watch(now)
            if self.state.phase in (*ACTIVE, Phase.STOPPING):
                self._follow(now)
        if self.state.phase in (Phase.SUSPENDED, Phase.STOPPING):
            self._confirm(now)
        self._diagnose(now)
        if now >= self._govern_at:
            self._govern_at = now + self._watch_s
            for event in self.governor.look(now, self.state, self.step, self._in_pairs):
                self.record(event)
        limits = [at_s for at_s in (deadline(self.state, self.config), looks_again_at(self.state, self.config)) if at_s is not None]
        if limits and now >= min(limits):
            self.record(Elapsed(at_s=now, phase=self.state.phase, since_s=self.state.since_s))
        if now > self._limits_kept_s + _LIMITS_S:
            self._limits_kept_s = now
            with suppress(JournalError):  # they can be learned again
                self.journal.keep("limits", self.watcher.limits.to_json())

    def record(self, event: Event) -> None:
        """Journal an event, then let it change the job. Raises JournalError: nothing follows from an event that could not be journaled."""
        self.journal.append(event)
        self._unwritten = ""
        before, self.state = self.state, apply(self.state, event, self.config)
        self._note(event, before)
        if isinstance(event, Elapsed):
            self._stuck |= {name for name, node in self.state.nodes.items() if node.lost_at_s != before.nodes[name].lost_at_s}
        for line in told(before, self.state, event):
            self._say(line)
        if self.webhook is not None:
            self.webhook.changed(before, self.state, self.state.best_step)
        if before.phase != self.state.phase:
            self._first_finding_s = None
        if before.attempt != self.state.attempt:
            self._advanced, self._resumed_step = (0, self.state.saved_step, event.at_s), self.state.saved_step

    def _note(self, event: Event, before: State) -> None:
        if self._events.is_on:
            self._events.instant(event.kind, lane="driver", step=self.state.best_step, text=event.model_dump_json())
            if before.phase != self.state.phase:
                began_ns, self._phase_began_ns = self._phase_began_ns, self._events.clock()
                self._events.record(before.phase.value, began_ns, self._phase_began_ns - began_ns, lane="driver", step=before.best_step)

    def tell(self) -> None:
        """Say to each node what it should be doing, when that is new or was said a while ago."""
        now = self.clock.now()
        if self.state is self._told_state and self.examination is None and now < self._tell_again_s:
            return
        is_same = self.state is self._told_state and self.examination is None
        self._told_state, self._tell_again_s = self.state, now + _REPEAT_S
        ranks = ranks_of(self.state)
        for name, node in self.state.nodes.items():
            if node.lost_at_s is not None:
                continue
            said = self._told.get(name)
            # thousands of nodes are told again what they know: it is not made anew each time
            wanted = said[0] if is_same and said is not None else desired(self.state, name, self.config, ranks)
            order = self.examination.order(name) if self.examination is not None else self.governor.order(name)
            if order != wanted.diagnosis:
                wanted = wanted.model_copy(update={"diagnosis": order})
            if said is None or said[0] != wanted or now >= said[1] + _REPEAT_S:
                self._told[name] = (wanted, now)
                self._outbox(name, wanted)

    @property
    def step(self) -> int:
        """Newest step that every rank has done, as far as the beats say; else the best known."""
        steps = [process.step for process in self._processes() if process.step is not None]
        return min(steps) if len(steps) == len(self.state.seats) else self.state.best_step

    @property
    def _watch_s(self) -> float:
        return max(_WATCH_S, _WATCH_PER_NODE_S * len(self.state.nodes))

    def silent_s(self, name: str) -> float:
        """How long nothing was heard of a node, seconds."""
        return self.clock.now() - self._heard_s.get(name, self.clock.now())

    @property
    def is_over(self) -> bool:
        """The job has ended, and every node that can be reached knows."""
        return self.state.phase in ENDS and all(node.lost_at_s is not None for node in self.state.nodes.values())

    def _miss(self, now: float) -> None:
        for name, node in list(self.state.nodes.items()):
            if node.lost_at_s is not None:
                continue
            silent_s = now - self._heard_s.get(name, now)
            if self.backend.is_alive(name) is False:
                reason = "its executor is dead"
            elif silent_s > self.config.lost_after_s and self.config.rules.missed_beats == "act":
                reason = f"no beat for {silent_s:.0f} s"
            else:
                continue
            self.beats.pop(name, None)
            if self.examination is not None:
                self.examination.lost(name)
            self.record(Lost(at_s=now, node=name, incarnation=node.incarnation, reason=reason, step=self.step))

    def _watch(self, now: float) -> None:
        views = [NodeView(name, self.beats.get(name), now - self._heard_s.get(name, now)) for name in self.state.seats if name is not None]
        found: Findings = self.watcher.examine(now, self.state.attempt, views)
        if len(self.state.rewinds) >= self.config.max_rewinds:
            found = found.without_rewinds()
        self._observe(found.observed)
        if not found.acting:
            self._first_finding_s = None
            return
        if self._first_finding_s is None:
            self._first_finding_s = now
        if now >= self._first_finding_s + self.config.settle_s:
            self.record(Anomaly(at_s=now, attempt=self.state.attempt, step=self.step, suspicions=found.acting))

    def _observe(self, suspicions: tuple[Suspicion, ...] | list[Suspicion]) -> None:
        for one in suspicions:
            key = (self.state.attempt, one.rule, one.node)
            if key not in self._said:
                self._said.add(key)
                text = f"{one.rule}{f' on {one.node}' if one.node else ''}: {one.detail}"
                self.observed.append((self.clock.now(), text))
                self._say(f"observed: {text}")

    def _follow(self, now: float) -> None:
        """Steps, checkpoints, and the end."""
        processes = self._processes()
        if len(processes) < len(self.state.seats):
            return
        step = min(process.step or 0 for process in processes)
        if all(process.state == "exited" and process.exit_code == 0 for process in processes):
            self.record(Ended(at_s=now, attempt=self.state.attempt, step=step, is_complete=step >= self.total_steps))
            return
        has_stepped = all(process.passes.get("compile", 0) + process.passes.get("step", 0) for process in processes)
        if not any(process.passes.get("compile", 0) for process in processes) and all(
            process.passes.get("restore", 0) for process in processes
        ):
            self._resumed_step = step
        saved = max(process.durable_step or 0 for process in processes)
        last_step, last_saved, last_s = self._advanced
        is_news = self.state.phase == Phase.RESTORING or saved > last_saved or now > last_s + _ADVANCED_S
        if has_stepped and is_news and (step, saved) != (last_step, last_saved) and self.state.phase in ACTIVE:
            values = {"at_s": now, "attempt": self.state.attempt, "step": step, "saved_step": saved, "resumed_step": self._resumed_step}
            self.record(Advanced.model_validate(values))
            self._advanced = (step, saved, now)

    def _confirm(self, now: float) -> None:
        for name in self.state.seats:
            beat = self.beats.get(name or "")
            if name is None or beat is None or name in self.state.idle:
                continue
            if beat.is_idle and self._knows(name):
                self.record(Idle(at_s=now, node=name, attempt=self.state.attempt))

    def _knows(self, name: str) -> bool:
        """Whether a node's newest beat came after it was told to have no process."""
        said = self._told.get(name)
        return said is not None and said[0].assignment is None and self._heard_s[name] >= said[1]

    def _diagnose(self, now: float) -> None:
        if self.state.phase != Phase.DIAGNOSING:
            self.examination = None
            return
        incident = self.state.incident
        assert incident is not None, "a job without an incident is not diagnosed"
        if self.examination is None:
            nodes = [name for name, node in self.state.nodes.items() if node.lost_at_s is None and node.status != NodeStatus.EVICTED]
            known = {name: self._in_pairs(name) for name in nodes}
            self.examination = Examination(known, Baseline(), self.config.diagnose_s, is_full=not incident.named)
        if (found := self.examination.result()) is not None:
            self.record(Diagnosed(at_s=now, attempt=self.state.attempt, bad=found.bad, findings=found.findings))
            self.examination = None

    def _in_pairs(self, name: str) -> Node:
        node, hello = self.state.nodes[name], self._hellos.get(name)
        switch = (hello.switch if hello is not None else None) or self.backend.switch(node.machine)
        return Node(address=node.address, ports=node.ports[-MOST_ROUNDS:], switch=switch)

    def _processes(self) -> list[ProcessReport]:
        beats = [self.beats.get(name or "") for name in self.state.seats]
        return [process for beat in beats if beat is not None and beat.attempt == self.state.attempt for process in beat.processes]


def _states(beat: Beat) -> tuple[object, ...]:
    return beat.attempt, beat.is_idle, *(process.state for process in beat.processes)

"""One job on virtual time whose every decision is the driver's own: the events of `cluster/state.py` go through `cluster/policy.py`.

Who is suspended, how long a diagnosis may take, which node is evicted and by which rule, which spare takes its seat, how long one is
waited for, when a slow node is isolated and when the driver gives up: none of this is decided here. This module says what happens in the
world (failures, nodes that confirm, machines that come), lets time pass, and books it.

A driver that gave up is started again by a person after ``operator_s``, who has other machines put in the place of broken nodes.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from megascale_jax.cluster.lifecycle import ENDS, NodeStatus, Phase
from megascale_jax.cluster.policy import apply, deadline, looks_again_at
from megascale_jax.cluster.state import (
    CORRUPTION,
    Advanced,
    Anomaly,
    Diagnosed,
    Elapsed,
    Event,
    Idle,
    Joined,
    Lost,
    Node,
    Shape,
    State,
    Suspicion,
)
from megascale_jax.observe.booked import KINDS, Kind
from megascale_jax.sim.faults.case import NEVER_NS, SECOND_NS, Case, run_until, split_run
from megascale_jax.sim.faults.draws import Draws
from megascale_jax.sim.faults.outcome import Outcome
from megascale_jax.sim.faults.slow import SlowWatch

_RULES = {"exit": "exit", "hang": "no_progress", "corrupt": CORRUPTION}
_ADDRESS, _PORTS = "10.0.0.1", (20000, 20001)


@dataclass(frozen=True)
class Decided:
    """What the driver decided in one job. ``outcome``: its time; ``alarms``: what it asked people to look at."""

    outcome: Outcome
    evicted: tuple[str, ...]
    isolated: int
    alarms: tuple[str, ...]
    outcomes: tuple[str, ...]
    """Words of every driver that gave up."""
    state: State


@dataclass(frozen=True)
class _Strike:
    """What ended a run. ``index``: of the draws; ``None``: broken nodes again."""

    index: int | None
    kind: int
    names: tuple[str, ...]
    heals: bool = False
    found: bool = False


class Job:
    """One job, its nodes, and the clock; times in nanoseconds."""

    def __init__(self, case: Case, draws: Draws, end_ns: int, need_steps: float | None = None):
        self.case, self.draws, self.end_ns = case, draws, end_ns
        self.need_steps = need_steps
        self.now = self.gave_up = self.waited = self.replaced = self.incidents = self.isolated = 0
        self.booked: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.steps = 0.0
        self.is_done = False
        self._returns: list[tuple[int, str, str]] = []
        self._broken: dict[str, _Strike] = {}
        """Nodes that fail in every attempt, with how they did first."""
        self._best_step = 0
        self._joins = 0
        self._evicted: list[str] = []
        self._alarms: list[str] = []
        self._outcomes: list[str] = []
        names = [f"node-{number}" for number in range(case.nodes + case.spares)]
        self._slow = SlowWatch(case, {name for name, is_slow in zip(names, draws.slow, strict=True) if is_slow}, draws.seed)
        self.state = self._first(dict.fromkeys(names, "0"))

    def run(self) -> Decided:
        """To the end, or to the last step."""
        extra = number = 0
        while self.now < self.end_ns and not self.is_done:
            strike = self._attempt(extra, number)
            if strike is None and self.state.phase != Phase.SUSPENDED:
                break
            if strike is not None and strike.index is not None:
                number += 1
            extra = self._recover(strike)
        self._alarms += self.state.alarms
        outcome = Outcome(
            booked_ns={kind: np.array([spent]) for kind, spent in self.booked.items()},
            wall_ns=np.array([self.now]),
            steps=np.array([self.steps]),
            incidents=np.array([self.incidents]),
            replaced=np.array([self.replaced]),
            gave_up=np.array([self.gave_up]),
            waited_ns=np.array([self.waited]),
            is_finished=np.array([self.is_done or self.need_steps is None]),
        )
        alarms = tuple(dict.fromkeys(self._alarms))
        return Decided(outcome, tuple(self._evicted), self.isolated, alarms, tuple(self._outcomes), self.state)

    # The driver.

    def _first(self, machines: dict[str, str]) -> State:
        """A driver's job in which all nodes but one have presented themselves; that one's coming makes it begin."""
        node = Node(status=NodeStatus.READY, incarnation="0", address=_ADDRESS, ports=_PORTS)
        nodes = {name: node.model_copy(update={"machine": machine}) for name, machine in list(machines.items())[1:]}
        seats = (None,) * self.case.nodes
        step = int(self.steps)
        state = State(shapes=(Shape(num_nodes=self.case.nodes),), seats=seats, nodes=nodes, since_s=self.now_s, saved_step=step)
        name, machine = next(iter(machines.items()))
        return apply(state, self._joined(name, machine), self.case.cluster)

    def _joined(self, name: str, machine: str) -> Joined:
        self._joins += 1
        return Joined(at_s=self.now_s, node=name, incarnation=f"{self._joins}", address=_ADDRESS, ports=_PORTS, machine=machine)

    def _on(self, event: Event) -> None:
        self.state = apply(self.state, event, self.case.cluster)

    @property
    def now_s(self) -> float:
        """Seconds on the journal's axis."""
        return self.now / SECOND_NS

    # Time.

    def _spend(self, kind: Kind, amount: int) -> None:
        until = min(self.now + amount, self.end_ns)
        self.booked[kind] += until - self.now
        self._pass(until)

    def _pass(self, until: int) -> None:
        """Go on to a moment that is booked elsewhere; machines that come until then present themselves."""
        while self._returns and self._returns[0][0] <= until:
            at, name, machine = heapq.heappop(self._returns)
            self.now = max(self.now, at)
            if (node := self.state.nodes.get(name)) is None or node.machine != machine:
                self._slow.has_new_machine(name)
            self._on(self._joined(name, machine))
        self.now = until

    # An attempt.

    def _attempt(self, extra: int, number: int) -> _Strike | None:
        """Restore and run until something strikes; ``None``: it was the end, the last step, or a slow node is taken out."""
        case, draws = self.case, self.draws
        drawn = max(int(draws.times_ns[number]), self.now) if number < draws.times_ns.size else NEVER_NS
        begins = self.now + case.restore_ns + extra + case.compile_ns
        broken = tuple(name for name in self._broken if name in self.state.seats)
        again = begins + case.recurs_ns if broken else NEVER_NS
        strike = self._drawn(number) if drawn <= again and drawn < NEVER_NS else None
        if strike is None and broken:
            strike = _Strike(None, self._broken[broken[0]].kind, broken)
        stop = min(drawn, again, self.end_ns)
        self._spend("restart", min(case.restore_ns + extra, stop - self.now))
        self._spend("compile", min(case.compile_ns, stop - self.now))
        if stop < begins:
            return strike if stop < self.end_ns else None
        self._on(Advanced(at_s=self.now_s, attempt=self.state.attempt, step=int(self.steps), saved_step=int(self.steps)))
        return self._run(stop, strike)

    def _drawn(self, number: int) -> _Strike:
        draws, kind = self.draws, int(self.draws.kinds[number])
        rank = int(draws.ranks[number])
        names = tuple(name for name in self.state.seats[rank : rank + self.case.events[kind].takes] if name is not None)
        return _Strike(number, kind, names, bool(draws.heals[number]), bool(draws.found[number]))

    def _run(self, stop: int, strike: _Strike | None) -> _Strike | None:
        case, begins = self.case, self.now
        longer = self._slow.longer(self.state)
        interval, step = round(case.interval_ns * longer), round(case.step_ns * longer)
        if self.need_steps is not None:
            rest = ceil((self.need_steps - self.steps) * step)
            finish = begins + int(run_until(np.array(rest), np.array(interval), case.blocking_ns))
            self.is_done = finish <= stop
            stop = min(stop, finish)
        cycle = interval + case.blocking_ns
        for look in self._slow.looks_ns(self.state, cycle, stop - begins):
            self._pass(begins + look)
            for judged in self._slow.judged(self.state, self.now):
                self._on(judged)
            step_number = int(self.steps + look // cycle * interval / step)
            self._on(Advanced(at_s=self.now_s, attempt=self.state.attempt, step=step_number, saved_step=step_number))
            if self.state.phase == Phase.SUSPENDED:
                stop, strike, self.is_done = self.now, None, False
                break
        is_struck = strike is not None and stop < self.end_ns and not self.is_done
        lag = case.events[strike.kind].lag_ns if is_struck and strike is not None else 0
        trained, saved, safe = (int(one) for one in split_run(np.array(stop - begins), np.array(interval), case.blocking_ns, np.array(lag)))
        kept = safe if is_struck else trained
        self._best_step = int(self.steps + trained / step)
        self.booked["training"] += kept
        self.booked["recomputed"] += trained - kept
        self.booked["checkpoint"] += saved
        self.steps += kept / step
        self._pass(stop)
        return strike if is_struck else None

    # A recovery.

    def _recover(self, strike: _Strike | None) -> int:
        """To the begin of the next attempt; what that takes longer for nodes that were replaced."""
        before, gave_up = self.state.seats, self.gave_up
        if strike is None:
            self.isolated += 1
        else:
            self.incidents += 1
            self._strike(strike)
        if self.state.phase == Phase.SUSPENDED:
            self._spend("restart", self.case.suspend_ns)
            self._confirm()
        if self.state.phase == Phase.DIAGNOSING:
            assert strike is not None, "a slow node needs no diagnosis"
            self._spend("diagnosis", self.case.diagnose_ns)
            bad = {name: self.case.events[self._broken[name].kind].name for name in strike.names if self._is_found(name)}
            self._on(Diagnosed(at_s=self.now_s, attempt=self.state.attempt, bad=bad))
        self._replace(strike)
        for rechecked in self._slow.rechecked(self.state, self.now_s):
            self._on(rechecked)
            self._retired((rechecked.node,))
        held = set(self.state.seats)
        gone = sum(name not in held for name in before) if self.gave_up == gave_up else 0  # else all seats were filled anew
        self.replaced += gone
        return self.case.replace_ns if gone else 0

    def _strike(self, strike: _Strike) -> None:
        event, at = self.case.events[strike.kind], self.now
        self._spend("idle", event.detect_ns)
        step = self._best_step
        if event.shows == "silent":
            for name in strike.names:
                node = self.state.nodes[name]
                machine = node.machine if strike.heals else self._new_machine()
                heapq.heappush(self._returns, (at + (event.back_ns if strike.heals else event.away_ns), name, machine))
                self._broken.pop(name, None)
                self._on(Lost(at_s=self.now_s, node=name, incarnation=node.incarnation, reason="no beat", step=step))
            return
        if strike.index is not None and not strike.heals:
            self._broken |= dict.fromkeys(strike.names, strike)
        found = tuple(Suspicion(rule=_RULES[event.shows], node=name, detail=event.name) for name in strike.names)
        self._on(Anomaly(at_s=self.now_s, attempt=self.state.attempt, step=step, suspicions=found))

    def _is_found(self, name: str) -> bool:
        """Whether the checks find something on a node; a copy that was wrong is known without them."""
        broken = self._broken.get(name)
        return broken is not None and broken.found and not (self._is_corrupt(broken) and self.case.cluster.evict_on_corruption)

    def _is_corrupt(self, strike: _Strike) -> bool:
        return self.case.events[strike.kind].shows == "corrupt"

    def _confirm(self) -> None:
        """Every node that can be reached has ended its processes."""
        for name in reversed(self.state.seats):
            if name is not None and name not in self.state.idle and self.state.nodes[name].lost_at_s is None:
                self._on(Idle(at_s=self.now_s, node=name, attempt=self.state.attempt))

    def _replace(self, strike: _Strike | None) -> None:
        """Until all seats are filled; a person starts the driver again where it gives up."""
        began = self.now
        if strike is not None:
            self._retired(strike.names)
        while self.state.phase != Phase.RESTORING and self.now < self.end_ns:
            if self.state.phase in ENDS:
                self._start_again()
                continue
            limits = [
                at for at in (deadline(self.state, self.case.cluster), looks_again_at(self.state, self.case.cluster)) if at is not None
            ]
            due = min((_not_before(at) for at in limits), default=NEVER_NS)
            comes = self._returns[0][0] if self._returns else NEVER_NS
            self._spend("restart", max(min(due, comes), self.now) - self.now)
            if self.state.phase == Phase.REPLACING and self.now >= due:
                self._on(Elapsed(at_s=self.now_s, phase=self.state.phase, since_s=self.state.since_s))
        self.waited += self.now - began

    def _retired(self, names: Sequence[str]) -> None:
        """Have other machines come for those that were evicted just now."""
        for name in names:
            if self.state.nodes[name].status == NodeStatus.EVICTED and not any(name == one for _, one, _ in self._returns):
                self._evicted.append(name)
                self._broken.pop(name, None)
                away = max(event.away_ns for event in self.case.events if event.takes == 1)
                heapq.heappush(self._returns, (self.now + away, name, self._new_machine()))

    def _start_again(self) -> None:
        self.gave_up += 1
        self._outcomes.append(self.state.outcome)
        self._alarms += self.state.alarms
        self._spend("idle", self.case.operator_ns)
        coming = {name for _, name, _ in self._returns}
        for name in [name for name in self._broken if name in self.state.seats]:
            del self._broken[name]
            away = max(event.away_ns for event in self.case.events if event.takes == 1)
            heapq.heappush(self._returns, (self.now + away, name, self._new_machine()))
            coming.add(name)
        there = {name: node.machine for name, node in self.state.nodes.items() if name not in coming}
        self.state = self._first(there)

    def _new_machine(self) -> str:
        self._joins += 1
        return f"machine {self._joins}"


def _not_before(at_s: float) -> int:
    """The first nanosecond that is not before a moment on the journal's axis."""
    at = round(at_s * SECOND_NS)
    return at if at / SECOND_NS >= at_s else at + 1


def decide(case: Case, draws: Draws, end_ns: int, need_steps: float | None = None) -> Decided:
    """One job with the driver's own decisions, until ``end_ns`` or until ``need_steps`` are done."""
    return Job(case, draws, end_ns, need_steps).run()

"""What looks wrong, from the newest beats of all nodes: rules without effects (paper section 4.1).

Two signals are independent: a node is *alive* when it beats, its training *advances* when its process leaves its section in time.
Times are judged on the driver's clock, sections on the node's own monotonic one, so no clock has to be right.

Who holds the others up: in a collective all ranks wait for the last. So only the ranks that are furthest behind (fewest steps, then the
earlier section) are held to their limit; the others wait for them, however long.
"""

import signal
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from megascale_jax.cluster.limits import Limits
from megascale_jax.cluster.messages import Beat
from megascale_jax.cluster.reports import ProcessReport
from megascale_jax.cluster.state import CORRUPTION, LOSS_SPIKE, Suspicion
from megascale_jax.config.cluster import ClusterConfig, Mode
from megascale_jax.observe.marks import DEAF, PREPARATION, SECTION_ORDER

_STEADY_STEPS = 20
"""Steps of a process before its step time is compared."""
_SILENT_S = 5.0
"""Without a pulse for so long, a process that holds the others up is the one to blame."""
_FRESH_BEATS = 3.0
"""Beats after which what a node said last is no word on where its process is now."""
_DRIFTS = 10
"""Looks in a row that must show a drift."""
_TRAFFIC_LOOKS = 60
_NETWORKS, _MOVED = ("nic.", "rdma."), (".rx_bytes", ".tx_bytes")
"""Counters of what a node has sent and received (`counters.py`)."""
_ZOMBIE_S = 5.0
"""For so long the threads of a process may outlive its main thread."""


class NodeView(NamedTuple):
    """A node as it is known now: its newest beat, and how long ago that came on the driver's clock, seconds."""

    name: str
    beat: Beat | None
    age_s: float


@dataclass(frozen=True)
class Findings:
    """``acting`` suspends the run, ``observed`` is only said."""

    acting: tuple[Suspicion, ...] = ()
    observed: tuple[Suspicion, ...] = ()

    def without_rewinds(self) -> "Findings":
        """For a job that may not be rewound again: what would do so is observed."""
        spikes = tuple(one for one in self.acting if one.rewind is not None)
        return Findings(tuple(one for one in self.acting if one.rewind is None), (*self.observed, *spikes))


@dataclass
class Watcher:
    """The rules and what they remember of one attempt."""

    config: ClusterConfig
    limits: Limits
    attempt: int = 0
    _fastest_s: float | None = None
    _drifts: int = 0
    _missing_since: dict[str, float] = field(default_factory=dict)
    _since: dict[tuple[str, int], float] = field(default_factory=dict)
    _zombies: dict[tuple[str, int], float] = field(default_factory=dict)
    _traffic: dict[str, deque[float]] = field(default_factory=dict)
    _totals: dict[str, tuple[float, float]] = field(default_factory=dict)

    def examine(self, now_s: float, attempt: int, views: Iterable[NodeView]) -> Findings:
        """What the rules find among the nodes that have a seat."""
        views = tuple(views)
        if attempt != self.attempt:
            self.attempt, self._fastest_s, self._drifts = attempt, None, 0
            self._traffic.clear()
            self._missing_since.clear()
        placed = [(view, process) for view in views if view.beat and view.beat.attempt == attempt for process in view.beat.processes]
        for _, process in placed:
            self.limits.learn(process.longest_s)
        spikes = list(_spiked(placed))
        can_rewind = any(one.rewind is not None for one in spikes)
        rules: Mapping[str, tuple[Mode, list[Suspicion]]] = {
            CORRUPTION: (self.config.rules.corruption, list(_corrupt(placed))),
            "exit": (self.config.rules.exit, [*_exits(placed), *self._undead(now_s, placed), *self._absent(now_s, attempt, views)]),
            "halted": (self.config.rules.halted, [*self._halted(now_s, placed), *_given_up(placed)]),
            "no_progress": (self.config.rules.no_progress, list(self._stuck(placed))),
            "non_finite": (self.config.rules.non_finite, list(self._non_finite(placed))),
            LOSS_SPIKE: ("observe" if self.config.rules.loss_spike == "act" and not can_rewind else self.config.rules.loss_spike, spikes),
            "keyword": (self.config.rules.keyword, list(_keywords(placed))),
            "step_drift": (self.config.rules.step_drift, list(self._drift(placed))),
            "traffic": (self.config.rules.traffic, list(self._quiet_networks(now_s, views))),
        }
        acting = tuple(one for mode, found in rules.values() if mode == "act" for one in found)
        observed = tuple(one for mode, found in rules.values() if mode == "observe" for one in found)
        return Findings(acting, observed)

    def _absent(self, now_s: float, attempt: int, views: Iterable[NodeView]) -> Iterable[Suspicion]:
        """Nodes that beat and have no process of this attempt, as when it cannot be started there."""
        missing = {view.name for view in views if view.beat and not (view.beat.attempt == attempt and view.beat.processes)}
        self._missing_since = _seen_since(self._missing_since, missing, now_s)
        for name, since_s in self._missing_since.items():
            if now_s > since_s + self.config.stop_s:
                yield Suspicion(rule="exit", node=name, detail=f"has no process of attempt {attempt}; see executor.log there")

    def _undead(self, now_s: float, placed: list[tuple[NodeView, ProcessReport]]) -> Iterable[Suspicion]:
        """Processes whose main thread has ended while others have not, as when one hangs in a driver."""
        zombies = {(view.name, process.pid): process.rank for view, process in placed if process.state == "zombie"}
        self._zombies = _seen_since(self._zombies, zombies, now_s)
        for key, rank in zombies.items():
            if now_s > self._zombies[key] + _ZOMBIE_S:
                detail = f"its main thread ended {now_s - self._zombies[key]:.0f} s ago, others hang"
                yield Suspicion(rule="exit", node=key[0], rank=rank, detail=detail)

    def _halted(self, now_s: float, placed: list[tuple[NodeView, ProcessReport]]) -> Iterable[Suspicion]:
        """Processes that a signal or a debugger has stopped, which no section allows for, or that are frozen.

        That a process is stopped is the kernel's word; frozen is concluded from missing pulses, which a busy machine may delay.
        """
        stopped = {(view.name, process.pid): process.rank for view, process in placed if process.state == "stopped"}
        self._since = _seen_since(self._since, stopped, now_s)
        for key, rank in stopped.items():
            if now_s > self._since[key] + self.config.rules.halted_s:
                yield Suspicion(rule="halted", node=key[0], rank=rank, detail=f"stopped by a signal for {now_s - self._since[key]:.1f} s")
        limit_s = self.limits.limit_s("step", {"step": _STEADY_STEPS})
        for view, process in placed:
            if process.state == "running" and process.section not in DEAF and (silent_s := process.silent_s or 0.0) > limit_s:
                yield Suspicion(rule="halted", node=view.name, rank=process.rank, detail=f"no thread of it has run for {silent_s:.1f} s")

    def _stuck(self, placed: list[tuple[NodeView, ProcessReport]]) -> Iterable[Suspicion]:
        running = [(view, process) for view, process in placed if process.state in ("running", "stopped")]
        if not running or any(view.age_s > _FRESH_BEATS * self.config.beat_s for view, _ in running):
            return  # a silent node is `missed_beats`, and says nothing about its training
        behind = min(_position(process) for _, process in running)
        last = [(view, process) for view, process in running if _position(process) == behind]
        late = [
            (view, process, in_section_s, limit_s)
            for view, process in last
            if (in_section_s := process.in_section_s + view.age_s) > (limit_s := self.limits.limit_s(process.section, process.passes))
        ]
        if not late:
            return
        halted = [(view, process) for view, process in running if process.state == "stopped" or (process.silent_s or 0.0) > _SILENT_S]
        culprits = halted or (last if len(last) < len(running) else [])
        _, process, in_section_s, limit_s = late[0]
        detail = f"{in_section_s:.1f} s in {process.section} of step {_next_step(process)}, limit {limit_s:.1f} s"
        for culprit, its in culprits:
            why = "is stopped by a signal" if its.state == "stopped" else "is frozen" if halted else "is behind the others"
            yield Suspicion(rule="no_progress", node=culprit.name, rank=its.rank, detail=f"{why}: {detail}")
        if not culprits:
            yield Suspicion(rule="no_progress", detail=f"all ranks wait: {detail}")

    def _non_finite(self, placed: list[tuple[NodeView, ProcessReport]]) -> Iterable[Suspicion]:
        worst = max((process.non_finite_in_a_row for _, process in placed), default=0)
        if worst >= self.config.rules.non_finite_steps:
            yield Suspicion(rule="non_finite", detail=f"{worst} steps in a row were skipped")

    def _drift(self, placed: list[tuple[NodeView, ProcessReport]]) -> Iterable[Suspicion]:
        times = [process.step_s for _, process in placed if process.step_s and process.passes.get("step", 0) >= _STEADY_STEPS]
        if not times or len(times) < len(placed):
            return
        now = median(times)
        self._fastest_s = now if self._fastest_s is None else min(self._fastest_s, now)
        self._drifts = self._drifts + 1 if now > self.config.rules.step_drift_ratio * self._fastest_s else 0
        if self._drifts >= _DRIFTS:
            yield Suspicion(rule="step_drift", detail=f"a step takes {now:.3f} s, it took {self._fastest_s:.3f} s")

    def _quiet_networks(self, now_s: float, views: Iterable[NodeView]) -> Iterable[Suspicion]:
        """Nodes whose traffic falls while that of others goes on."""
        fallen, steady = [], 0
        for view in views:
            if view.beat is None:
                continue
            total = sum(value for name, value in view.beat.counters.items() if name.startswith(_NETWORKS) and name.endswith(_MOVED))
            before, self._totals[view.name] = self._totals.get(view.name), (now_s - view.age_s, total)
            if before is None or now_s - view.age_s <= before[0] or total < before[1]:
                continue
            rates = self._traffic.setdefault(view.name, deque(maxlen=_TRAFFIC_LOOKS))
            rate = (total - before[1]) / (now_s - view.age_s - before[0])
            usual = median(rates) if len(rates) == _TRAFFIC_LOOKS else None
            rates.append(rate)
            if usual and rate < self.config.rules.traffic_ratio * usual:
                fallen.append((view.name, rate, usual))
            elif usual:
                steady += 1
        for name, rate, usual in fallen if steady else ():
            yield Suspicion(rule="traffic", node=name, detail=f"{rate / 1e6:.1f} MB/s, usual are {usual / 1e6:.1f} MB/s")


def odd_software(software: Mapping[str, Mapping[str, str]]) -> list[Suspicion]:
    """Nodes that run another version of something than most do."""
    found = []
    for part in sorted({part for versions in software.values() for part in versions}):
        votes = Counter(versions.get(part, "none") for versions in software.values())
        usual, count = votes.most_common(1)[0]
        if len(votes) > 1 and 2 * count > len(software):
            odd = [(node, versions.get(part, "none")) for node, versions in software.items() if versions.get(part, "none") != usual]
            found += [Suspicion(rule="software", node=node, detail=f"{part} {has}, others have {usual}") for node, has in odd]
    return found


def _seen_since[K](before: Mapping[K, float], now: Iterable[K], now_s: float) -> dict[K, float]:
    """Since when each of what is seen now has been seen without a break."""
    return {key: before.get(key, now_s) for key in now}


def _exits(placed: list[tuple[NodeView, ProcessReport]]) -> Iterable[Suspicion]:
    """Processes that ended with an error, those that only followed a peer, or a corrupt state, marked as such."""
    is_corrupt = any(process.odd_ranks is not None for _, process in placed)
    for view, process in placed:
        if process.state != "exited" or (process.exit_code in (0, None) and process.signal is None):
            continue
        what = f"signal {_signal_name(process.signal)}" if process.signal else f"exit code {process.exit_code}"
        last = next((line for line in reversed(process.log) if line.strip()), "")
        yield Suspicion(
            rule="exit",
            node=view.name,
            rank=process.rank,
            detail=f"{what} in {process.section} of step {_next_step(process)}" + (f": {last[:160]}" if last else ""),
            is_primary=not process.is_secondary and not is_corrupt,
        )


def _given_up(placed: list[tuple[NodeView, ProcessReport]]) -> Iterable[Suspicion]:
    """Halted processes that others ended for want of: JAX's own limits may be shorter than ours for a step."""
    exits = list(_exits(placed))
    if not exits or any(exit.is_primary for exit in exits):
        return
    for view, process in placed:
        if process.state == "stopped":
            yield Suspicion(rule="halted", node=view.name, rank=process.rank, detail="stopped by a signal, and the others gave it up")
        elif process.state == "running" and process.section not in DEAF and (silent_s := process.silent_s or 0.0) > _SILENT_S:
            detail = f"no thread of it has run for {silent_s:.1f} s, and the others gave it up"
            yield Suspicion(rule="halted", node=view.name, rank=process.rank, detail=detail)


def _corrupt(placed: list[tuple[NodeView, ProcessReport]]) -> Iterable[Suspicion]:
    """Nodes whose copy of the state is not the others'; where no majority says which it is, none of them is the primary one."""
    said = next((process for _, process in placed if process.odd_ranks is not None), None)
    for view, process in placed if said is not None else ():
        if said is not None and process.rank in (said.odd_ranks or ()):
            what = "its copy of the state is not the others'" if said.is_odd_certain else "its copy of the state or another's is wrong"
            detail = f"{what}, after step {said.step or 0}"
            yield Suspicion(rule=CORRUPTION, node=view.name, rank=process.rank, detail=detail, is_primary=said.is_odd_certain)


def _spiked(placed: list[tuple[NodeView, ProcessReport]]) -> Iterable[Suspicion]:
    """All ranks see the same loss; the one beside the keeper that publishes knows the checkpoints."""
    spikes = [process.spike for _, process in placed if process.spike is not None]
    spike = next((one for one in spikes if one.rewind_step is not None), next(iter(spikes), None))
    if spike is None:
        return
    rewind = None if spike.rewind_step is None else (spike.rewind_step, spike.begin, spike.end)
    detail = f"the loss of steps {spike.first} to {spike.last} is far above what it was"
    yield Suspicion(rule=LOSS_SPIKE, detail=detail if rewind else f"{detail}; no checkpoint from before is known", rewind=rewind)


def _keywords(placed: list[tuple[NodeView, ProcessReport]]) -> Iterable[Suspicion]:
    for view, process in placed:
        for keyword in process.keywords:
            yield Suspicion(rule="keyword", node=view.name, rank=process.rank, detail=keyword)


def _position(process: ProcessReport) -> tuple[int, int]:
    """Where a process is in its run: more is further."""
    is_preparing = process.section == "data" and not process.passes.get("restore", 0)
    section = PREPARATION if is_preparing else process.section
    return process.step or 0, SECTION_ORDER.index(section) if section in SECTION_ORDER else 0


def _next_step(process: ProcessReport) -> int:
    """The step that a process is in; its report counts those that are done."""
    return (process.step or 0) + 1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return str(number)

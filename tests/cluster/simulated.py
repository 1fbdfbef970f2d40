"""A cluster on virtual time around the real driver: nodes obey, training advances in lockstep, and faults happen when they are told to."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascale_jax.cluster.anomaly import Watcher
from megascale_jax.cluster.diagnose.checks import Number, Outcome
from megascale_jax.cluster.driver import Driver
from megascale_jax.cluster.journal import Journal, JournalClock
from megascale_jax.cluster.limits import Limits
from megascale_jax.cluster.messages import Assignment, Beat, Desired, Diagnosis, Hello
from megascale_jax.cluster.reports import ProcessReport
from megascale_jax.cluster.state import Shape
from megascale_jax.config.cluster import ClusterConfig
from megascale_jax.observe.events import Events
from megascale_jax.observe.spike import Spike

START_S, STEP_S, STOP_S, DIAGNOSE_S = 3.0, 0.5, 0.2, 0.5
SAVE_EVERY = 5
TICK_S = 0.1


@dataclass
class SimNode:
    """One node: executor, and at most one training process."""

    name: str
    incarnation: str
    is_alive: bool = True
    is_connected: bool = True
    is_down: bool = False
    """Switched off: the backend cannot start its executor."""
    attempt: int = 0
    wanted: Desired | None = None
    process: str = "none"
    exit_signal: int | None = None
    exit_code: int | None = None
    is_secondary: bool | None = None
    hangs: str = ""
    odd_ranks: tuple[int, ...] | None = None
    is_odd_certain: bool = False
    spike: Spike | None = None
    started_s: float = 0.0
    entered_s: float = 0.0
    ended_s: float = 0.0
    step: int = 0
    passes: int = 0
    diagnosed: tuple[int, float] = (0, 0.0)
    finds: tuple[Outcome, ...] = (Outcome(check="disk", status="pass"),)
    beat_at: float = 0.0


@dataclass
class World:
    """Everything outside of the driver, and the driver itself."""

    folder: Path
    config: ClusterConfig
    nodes: int = 4
    spares: int = 2
    total_steps: int = 200
    shapes: tuple[Shape, ...] = ()
    now: float = 0.0
    lines: list[str] = field(default_factory=list)
    sims: dict[str, SimNode] = field(default_factory=dict)
    saved_step: int = 0
    rewinds: list[tuple[int, int, int]] = field(default_factory=list)
    drops: Callable[[str], bool] = lambda name: False
    events: Events | None = None
    suspects: Any = None
    """What is asked for windows of steps, in place of a process."""
    _numbers: itertools.count = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.names = tuple(f"node-{number}" for number in range(self.nodes + self.spares))
        self.shapes = self.shapes or (Shape(num_nodes=self.nodes),)
        self.start_driver()

    # The driver, and its backend.

    def start_driver(self) -> None:
        self.journal = Journal(self.folder / "journal.sqlite")
        last_s = max((event.at_s for event in self.journal.events()), default=0.0)
        watcher = Watcher(self.config, Limits.of(self.config, self.journal.fact("limits")))
        clock = JournalClock(last_s, lambda: self.now)
        args = (
            self.journal,
            self.config,
            self.shapes,
            self.names,
            self.total_steps,
            self,
            watcher,
            clock,
            self.tell,
            self.lines.append,
            self.events,
            self.suspects,
        )
        self.driver = Driver(*args)
        for sim in self.sims.values():
            if sim.is_alive and sim.is_connected:
                self.greet(sim)

    def kill_driver(self) -> None:
        """SIGKILL, and another one is started."""
        self.journal.close()
        self.start_driver()

    def ensure(self, name: str) -> None:
        sim = self.sims.get(name)
        if sim is None or (not sim.is_alive and not sim.is_down):
            sim = self.sims[name] = SimNode(name, f"executor {next(self._numbers)}")
            self.greet(sim)

    def is_alive(self, name: str) -> bool | None:
        return name in self.sims and self.sims[name].is_alive

    def remove(self, name: str, machine: str, reason: str) -> None:
        if name in self.sims:
            self.sims[name].is_alive = False

    def restore(self, name: str, machine: str) -> None:
        pass

    def taken_back(self) -> dict[str, str]:
        return {}

    def switch(self, machine: str) -> str | None:
        return None

    def release(self, name: str) -> None:
        self.remove(name, "", "")

    def facts(self) -> dict[str, str]:
        return {}

    def tell(self, name: str, wanted: Desired) -> None:
        sim = self.sims.get(name)
        if sim is not None and sim.is_alive and sim.is_connected and not self.drops(name):
            sim.wanted = wanted

    # Faults.

    def crash(self, name: str) -> None:
        """Its training process is killed."""
        sim = self.sims[name]
        if sim.process == "running":
            sim.process, sim.exit_signal, sim.ended_s = "exited", 9, self.now

    def corrupt(self, *names: str, is_certain: bool = True) -> None:
        """A comparison of states fails, which all processes see and end with."""
        ranks = tuple(self.driver.state.seats.index(name) for name in names)
        for name in self.driver.state.seats:
            sim = self.sims[name or ""]
            sim.process, sim.exit_code, sim.ended_s = "exited", 3, self.now
            sim.odd_ranks, sim.is_odd_certain = ranks, is_certain

    def spike(self, first: int, last: int, rewind_step: int | None) -> None:
        """The loss of some steps is too high; only rank 0 knows the checkpoints."""
        for rank, name in enumerate(self.driver.state.seats):
            self.sims[name or ""].spike = Spike(first, last, None if rank else rewind_step, 10 * first, 10 * last)

    def kill_executor(self, name: str) -> None:
        sim = self.sims[name]
        sim.is_alive, sim.process = False, "none"

    def power_off(self, name: str) -> None:
        self.kill_executor(name)
        self.sims[name].is_down = True

    # Time.

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass; whether ``until`` came true."""
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            self._train()
            for sim in list(self.sims.values()):
                self._obey(sim)
                self._beat(sim)
            self.driver.tick()
            if until():
                return True
        return False

    def until_running(self, limit_s: float = 120.0) -> None:
        assert self.run(limit_s, lambda: self.driver.state.phase == "running"), self.lines[-15:]

    def until_step(self, step: int, limit_s: float = 300.0) -> None:
        assert self.run(limit_s, lambda: self.driver.step >= step and self.driver.state.phase == "running"), self.lines[-15:]

    def greet(self, sim: SimNode) -> None:
        hello = Hello(node=sim.name, incarnation=sim.incarnation, address="10.0.0.1", ports=(20000, 20001), software={"jax": "1"})
        self.driver.heard(sim.name, hello)

    def _obey(self, sim: SimNode) -> None:
        wanted = sim.wanted
        if not sim.is_alive or wanted is None:
            return
        if wanted.leave:
            sim.is_alive, sim.process = False, "none"
            return
        order = wanted.assignment
        if sim.process in ("running", "exited") and (order is None or order.attempt != sim.attempt):
            sim.process = "none"
            return
        if order is not None and order.attempt > sim.attempt:
            sim.attempt, sim.process, sim.hangs, sim.passes = order.attempt, "running", "", 0
            sim.exit_code = sim.exit_signal = sim.is_secondary = sim.odd_ranks = sim.spike = None
            self._rewind(order)
            sim.step, sim.started_s, sim.entered_s = self.saved_step, self.now, self.now
        if wanted.diagnosis is not None and sim.diagnosed[0] != wanted.diagnosis.round:
            sim.diagnosed = (wanted.diagnosis.round, self.now + DIAGNOSE_S)
        if wanted.diagnosis is not None and sim.diagnosed[1] and self.now >= sim.diagnosed[1] and sim.is_connected:
            sim.diagnosed = (sim.diagnosed[0], 0.0)
            pair = wanted.diagnosis.pair
            rate = (Number(name="all-reduce", value=1.0, unit="GB/s"),)
            found = sim.finds if pair is None else (Outcome(check="pair", status="pass", numbers=rate, facts=pair.facts),)
            outcomes = tuple(outcome.model_dump(mode="json") for outcome in found)
            self.driver.heard(sim.name, Diagnosis(round=sim.diagnosed[0], outcomes=outcomes))

    def _rewind(self, order: Assignment) -> None:
        """What the trainer does with rewinds that it has not known: back to the newest checkpoint before."""
        given = [json.loads(text.partition("=")[2]) for text in order.overrides if text.startswith("train.rewinds=")]
        for rewind in (tuple(one) for one in (given[0] if given else [])):
            if rewind not in self.rewinds:
                self.rewinds.append(rewind)
                self.saved_step = min(self.saved_step, rewind[0] - rewind[0] % SAVE_EVERY)

    def _train(self) -> None:
        """All processes of an attempt step together, once each has started."""
        by_attempt: dict[int, list[SimNode]] = {}
        for sim in self.sims.values():
            if sim.is_alive and sim.process != "none":
                by_attempt.setdefault(sim.attempt, []).append(sim)
        for sims in by_attempt.values():
            sizes = {sim.wanted.assignment.num_ranks for sim in sims if sim.wanted and sim.wanted.assignment}
            dead = [sim for sim in sims if sim.process == "exited" and sim.exit_code != 0]
            for sim in sims:
                if dead and sim.process == "running" and not sim.hangs and self.now > min(one.ended_s for one in dead) + 0.2:
                    sim.process, sim.exit_code, sim.is_secondary, sim.ended_s = "exited", 1, True, self.now
            running = [sim for sim in sims if sim.process == "running"]
            if sizes != {len(running)} or any(sim.hangs or self.now < sim.started_s + START_S for sim in running):
                continue
            if self.now >= max(sim.entered_s for sim in running) + STEP_S:
                for sim in running:
                    sim.step, sim.entered_s, sim.passes = sim.step + 1, self.now, sim.passes + 1
                    if sim.step >= self.total_steps:
                        sim.process, sim.exit_code, sim.ended_s = "exited", 0, self.now
                if running[0].step % SAVE_EVERY == 0:
                    self.saved_step = max(self.saved_step, running[0].step)

    def _beat(self, sim: SimNode) -> None:
        if not sim.is_alive or not sim.is_connected or self.drops(sim.name):
            return
        changed = sim.process == "exited" and self.now - sim.ended_s < 2 * TICK_S
        if not changed and self.now < sim.beat_at + self.config.beat_s:
            return
        sim.beat_at = self.now
        processes = () if sim.process == "none" else (self._report(sim),)
        self.driver.heard(sim.name, Beat(attempt=sim.attempt, is_idle=sim.process != "running", processes=processes))

    def _report(self, sim: SimNode) -> ProcessReport:
        steps = max(0, sim.passes - 1)
        state = "exited" if sim.process == "exited" else sim.hangs if sim.hangs in ("stopped", "zombie") else "running"
        behind, usual = ("restore", "compile") if sim.passes == 0 else ("data", "step")
        section = behind if sim.hangs == "behind" else usual
        rank = sim.wanted.assignment.rank if sim.wanted and sim.wanted.assignment else 0
        return ProcessReport(
            rank=rank,
            pid=1000 + rank,
            state=state,
            exit_code=sim.exit_code,
            signal=sim.exit_signal,
            step=sim.step,
            section=section,
            in_section_s=self.now - sim.entered_s,
            longest_s={"compile": START_S, "step": STEP_S} if steps else {},
            passes={"compile": min(1, sim.passes), "step": steps},
            loss=3.0,
            non_finite_in_a_row=0,
            saved_step=self.saved_step,
            durable_step=self.saved_step,
            step_s=STEP_S,
            cpu_s=1.0,
            rss_bytes=1,
            log=(),
            keywords=("peer lost",) if sim.is_secondary else (),
            is_secondary=sim.is_secondary,
            odd_ranks=sim.odd_ranks,
            is_odd_certain=sim.is_odd_certain,
            spike=sim.spike,
            silent_s=self.now - sim.entered_s if sim.hangs == "frozen" else 0.5,
        )

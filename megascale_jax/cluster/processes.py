"""The training processes of one node: started, watched and ended, so that nothing of them is left.

Each is the leader of a session of its own, and what it starts belongs to it by that session; the checkpoint keeper has left it on
purpose (`checkpoint/keeper_client.py`). A leader that has ended is not waited for until all of its session are gone: so long the kernel
gives its number to nobody else, and a signal can only reach who is meant.

They die with this process, and with the `TrainingProcesses` that started them (`die_with_parent.py`).
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from megascale_jax.cluster import die_with_parent, warm
from megascale_jax.cluster.attempts import begin_folder
from megascale_jax.cluster.keywords import only_consequences
from megascale_jax.cluster.log_reader import LogReader
from megascale_jax.cluster.reports import ProcessReport, State
from megascale_jax.errors import StuckProcessError
from megascale_jax.observe.marks import ATTEMPT, MARKS, SECTIONS, read_marks

KEPT_ATTEMPTS = 5
"""Attempts whose logs stay."""
KILL_LIMIT_S = 10.0
"""Longest that a killed process may take to be gone; a driver's call that never returns can hold it for ever."""
_WARM_AGAIN_S, _LONGEST_WARM_AGAIN_S = 5.0, 320.0
"""Between two starts of a process that waits: one that cannot be imported is not tried without pause."""
_LOOK_S = 0.02
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """One process to be started: a command without a shell, and its whole environment, to which marks and attempt are added."""

    rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]


class TrainingProcesses:
    """Those of one attempt at a time. `poll` may be called by any thread, also while another one starts or stops."""

    def __init__(self, kept_attempts: int = KEPT_ATTEMPTS):
        self._kept_attempts = kept_attempts
        self._warm: subprocess.Popen[bytes] | None = None
        self._warm_at, self._warm_again_s = 0.0, _WARM_AGAIN_S
        self._children: tuple[_Child, ...] = ()
        self._changing = threading.Lock()
        # The kernel ends them with the thread that started them, so that must be one that stays.
        self._starter = ThreadPoolExecutor(1, "training-processes")

    def start(self, attempt: int, launches: Sequence[Launch], folder: Path) -> None:
        """Start an attempt; what is left of an earlier one is killed first. Logs and marks: ``folder/attempt-NUMBER/rank-NUMBER.*``.

        A command that cannot be run shows as exit code 127 and in the log. Raises OSError, and nothing is started, when a log
        cannot be made or a process not be had; StuckProcessError when an earlier one cannot be killed.
        """
        with self._changing:
            self._stop(0.0)
            self._children = ()
            logs = begin_folder(folder, attempt, self._kept_attempts)
            try:
                for launch in launches:
                    waiting, self._warm = self._warm, None
                    if waiting is not None and waiting.poll() is None:
                        self._warm_again_s = _WARM_AGAIN_S
                    child = self._starter.submit(_Child, launch, attempt, logs, waiting).result()
                    self._children = (*self._children, child)
            except BaseException:
                self._stop(0.0)
                self._children = ()
                raise

    def warm_up(self, environment: Mapping[str, str], log: Path) -> None:
        """Have a process wait whose imports are done, for the next attempt (`warm.py`). Costs nothing when there is one.

        ``log`` gets what it says before it has become an attempt. One that cannot be had, or ends by itself, is tried again after a
        pause that doubles up to `_LONGEST_WARM_AGAIN_S`; nothing is raised.
        """
        now = time.monotonic()
        if (self._warm is not None and self._warm.poll() is None) or now < self._warm_at:
            return
        self._warm_at, self._warm_again_s = now + self._warm_again_s, min(2 * self._warm_again_s, _LONGEST_WARM_AGAIN_S)
        with self._changing:
            if self._warm is not None:
                _logger.warning("the process for the next attempt ended with code %s: %s says why", self._warm.returncode, log)
                self._warm = None
            try:
                self._warm = self._starter.submit(_start_warm, environment, log).result()
            except (OSError, RuntimeError) as error:  # no memory, no process, no thread, no disk: training needs none of them
                _logger.warning("no process for the next attempt: %s; it is tried again in %.0f s", error, self._warm_at - now)

    def cool_down(self) -> None:
        """End the process that waits, if there is one."""
        waiting, self._warm = self._warm, None
        if waiting is not None:
            _end(waiting)

    def poll(self) -> tuple[ProcessReport, ...]:
        """What each process of the newest attempt does; those that have ended stay until the next start."""
        return tuple(child.report() for child in self._children)

    def states(self) -> tuple[State, ...]:
        """Of each process of the newest attempt: cheaper than `poll`, and takes no line of a log away."""
        return tuple(child.state() for child in self._children)

    def stop(self, grace_s: float) -> None:
        """End all: SIGTERM, which lets a training finish its step and save, and after ``grace_s`` SIGKILL, to everything in their sessions.

        Afterwards nothing of them is left. May be called at any time, also again. Raises StuckProcessError when a process is not
        gone `KILL_LIMIT_S` after the kill.
        """
        with self._changing:
            self._stop(grace_s)

    def _stop(self, grace_s: float) -> None:
        leaders = {child.pid for child in self._children if not child.is_reaped}
        if grace_s > 0:
            for number in (signal.SIGTERM, signal.SIGCONT):  # one that is stopped gets the first when it goes on
                _signal(_members(leaders), leaders, number)
            _wait_until_gone(leaders, grace_s)
        limit = time.monotonic() + KILL_LIMIT_S
        while members := _members(leaders):  # looked for again each time: one may have started another in between
            if time.monotonic() > limit:
                raise StuckProcessError(
                    f"processes {', '.join(map(str, members))} are not gone {KILL_LIMIT_S:.0f} s after SIGKILL; they hang in the kernel, "
                    "as with a broken GPU or a dead file system: take this node out and restart it"
                )
            _signal(members, leaders, signal.SIGKILL)
            _wait_until_gone(leaders, _LOOK_S)
        for child in self._children:
            child.reap()


class _Child:
    """One training process. The numbers of one that has ended are the last that were seen."""

    def __init__(self, launch: Launch, attempt: int, logs: Path, waiting: subprocess.Popen[bytes] | None = None):
        self._rank, self._attempt = launch.rank, attempt
        self._marks = logs / f"rank-{launch.rank}.marks"
        self._marks.unlink(missing_ok=True)
        path = logs / f"rank-{launch.rank}.log"
        with path.open("ab") as log:
            self._log = LogReader(path)
            environment = {**launch.environment, MARKS: str(self._marks), ATTEMPT: str(attempt)}
            self._process = _become(waiting, launch.command, environment, path) or _spawn(launch.command, environment, log)
        self.pid = self._process.pid
        self._seen = psutil.Process(self.pid)
        self._started_ns = time.monotonic_ns()
        self._end: tuple[int | None, int | None] | None = None
        self._ended_ns = 0
        self._cpu_s, self._rss_bytes = 0.0, 0
        self._lock = threading.Lock()

    @property
    def is_reaped(self) -> bool:
        return self._process.returncode is not None

    def reap(self) -> None:
        """Of one that has ended, with all of its session: its number is free from here on."""
        with self._lock:
            self._look()
            self._process.wait(KILL_LIMIT_S)

    def state(self) -> State:
        with self._lock:
            return self._look()

    def report(self) -> ProcessReport:
        with self._lock:
            state = self._look()
            marks = read_marks(self._marks)
            if marks is not None and (marks.attempt, marks.rank) != (self._attempt, self._rank):
                marks = None
            now_ns = self._ended_ns if self._end is not None else time.monotonic_ns()
            exit_code, number = self._end or (None, None)
            log = self._log.read(is_final=self._end is not None)
            return ProcessReport(
                rank=self._rank,
                pid=self.pid,
                state=state,
                exit_code=exit_code,
                signal=number,
                step=marks.step if marks else None,
                section=marks.section if marks else SECTIONS[0],
                in_section_s=max(0, now_ns - (marks.entered_ns if marks else self._started_ns)) / 1e9,
                longest_s=dict(marks.longest_s) if marks else {},
                passes=dict(marks.passes) if marks else {},
                loss=marks.loss if marks else None,
                non_finite_in_a_row=marks.non_finite_in_a_row if marks else 0,
                saved_step=marks.saved_step if marks else None,
                durable_step=marks.durable_step if marks else None,
                step_s=marks.step_s if marks else None,
                cpu_s=self._cpu_s,
                rss_bytes=self._rss_bytes,
                log=log,
                keywords=tuple(keyword.name for keyword in self._log.keywords),
                is_secondary=only_consequences(self._log.keywords),
                odd_ranks=marks.odd_ranks if marks else None,
                is_odd_certain=marks.is_odd_certain if marks else False,
                spike=marks.spike if marks else None,
                silent_s=max(0, now_ns - marks.pulse_ns) / 1e9 if marks and marks.pulse_ns else None,
            )

    def _look(self) -> State:
        if self._has_ended():
            return "exited"
        status = psutil.STATUS_RUNNING
        with suppress(psutil.Error), self._seen.oneshot():  # it may end between two questions
            status = self._seen.status()
            times = self._seen.cpu_times()
            self._cpu_s, self._rss_bytes = times.user + times.system, self._seen.memory_info().rss
        if self._has_ended():
            return "exited"
        return "stopped" if status in _STOPPED else "zombie" if status in _DEAD else "running"

    def _has_ended(self) -> bool:
        if self._end is None:
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                self._end = (result.si_status, None) if result.si_code == os.CLD_EXITED else (None, result.si_status)
                self._ended_ns = time.monotonic_ns()
        return self._end is not None


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes], stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """The leader of a new session, which dies with this process."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *command],
        env=dict(environment),
        stdin=stdin,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _start_warm(environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as stream:
        return _spawn((sys.executable, "-m", warm.__name__), environment, stream, stdin=subprocess.PIPE)


def _end(waiting: subprocess.Popen[bytes]) -> None:
    waiting.kill()
    try:
        waiting.wait(KILL_LIMIT_S)
    except subprocess.TimeoutExpired:  # it has touched no device, and has no part in the training
        _logger.warning("process %d, which waited for the next attempt, is not gone %.0f s after SIGKILL", waiting.pid, KILL_LIMIT_S)


def _become(
    waiting: subprocess.Popen[bytes] | None, command: tuple[str, ...], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes] | None:
    """The process that waits, told to be this command; ``None`` when it cannot be, and another one must be started."""
    if waiting is None:
        return None
    if waiting.poll() is None and command[:1] == (sys.executable,) and command[1:3] == warm.COMMAND and waiting.stdin is not None:
        with suppress(OSError):
            warm.request(waiting.stdin, command[3:], environment, str(log))
            return waiting
    _end(waiting)
    return None


def _members(leaders: Collection[int]) -> list[int]:
    """Living processes in the sessions of these leaders, which must not have been reaped."""
    found: list[int] = []
    for pid in psutil.pids() if leaders else ():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(pid) in leaders and not _is_dead(psutil.Process(pid)):
                found.append(pid)
    return found


def _is_dead(process: psutil.Process) -> bool:
    """Ended, though its parent may not have noticed. One whose main thread alone has ended is not."""
    with process.oneshot():
        return process.status() in _DEAD and process.num_threads() <= 1


def _signal(members: Collection[int], leaders: Collection[int], number: int) -> None:
    for pid in members:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                if os.getsid(pid) in leaders:  # else the number is another process's by now
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)


def _wait_until_gone(leaders: Collection[int], limit_s: float) -> None:
    limit = time.monotonic() + limit_s
    while _members(leaders) and (left_s := limit - time.monotonic()) > 0:
        time.sleep(min(_LOOK_S, left_s))

"""The analysis of windows of steps as a process of its own: it may hang, die, or write garbage, and the driver never waits for it.

One process a window, at the lowest priority, that reads the run's events, writes one line and ends (`views/slow_nodes.py`; the layers
put it above the driver, so the driver is given its command). It dies with the driver. One that lasts too long is killed; after
`MOST_FAILURES` in a row none is started any more in this attempt, and that is said.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from megascale_jax.cluster import die_with_parent
from megascale_jax.cluster.slow_windows import MOST_BYTES, Window
from megascale_jax.config.cluster import SlowNodesConfig

LIMIT_S = 600.0
"""Longest that one analysis may take."""
FLUSH_S = 3.0
"""After which the events of a step are on the disk."""
FIRST_STEPS = 2
"""Of an attempt that are in no window: they compile."""
MOST_FAILURES = 5

_PIPE_BYTES = 1 << 20


@dataclass
class _Job:
    """A process at work on a window of an attempt."""

    process: subprocess.Popen[bytes]
    attempt: int
    began_s: float
    line: bytes = b""


class Suspects:
    """Runs the analysis window by window. ``command``: of one analysis, without its window; ``log``: its errors, of the newest one."""

    def __init__(self, command: Sequence[str], config: SlowNodesConfig, log: Path, say: Callable[[str], None]):
        self._command, self._config, self._log, self._say = tuple(command), config, log, say
        self._attempt, self._first = 0, 0
        self._planned: tuple[int, float] | None = None
        """End of the next window, and from when on its events are there."""
        self._ended_s: float | None = None
        self._failures = 0
        self._job: _Job | None = None

    def look(self, now_s: float, attempt: int, step: int) -> Window | None:
        """Call it often while ``attempt`` trains, with the newest step that every rank has done; a window when one has been analyzed."""
        if attempt != self._attempt:
            self._end_job()
            self._attempt, self._first, self._planned, self._failures = attempt, step + FIRST_STEPS, None, 0
        if self._job is not None:
            return self._read(self._job, now_s)
        if self._failures >= MOST_FAILURES:
            return None
        if self._planned is None:
            has_rested = self._ended_s is None or now_s >= self._ended_s + self._config.every_s
            if has_rested and step + 1 >= self._first + self._config.steps:
                self._planned, self._ended_s = (step + 1, now_s + FLUSH_S), now_s
        elif now_s >= self._planned[1]:
            self._start(self._planned[0], now_s)
        return None

    def close(self) -> None:
        """End what is at work."""
        self._end_job()

    def _start(self, end: int, now_s: float) -> None:
        self._planned, self._first = None, end
        window = ["--first", str(end - self._config.steps), "--end", str(end), "--attempt", str(self._attempt)]
        guarded = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *self._command, *window]
        try:
            with self._log.open("wb") as log:
                process = subprocess.Popen(guarded, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
        except OSError as error:
            self._failed(f"it cannot be started: {error}")
            return
        assert process.stdout is not None, "asked for"
        os.set_blocking(process.stdout.fileno(), False)
        with suppress(OSError):  # more at a look; it comes through a smaller one too
            fcntl.fcntl(process.stdout.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._job = _Job(process, self._attempt, now_s)

    def _read(self, job: _Job, now_s: float) -> Window | None:
        has_ended = job.process.poll() is not None  # before what it wrote is read, so that nothing is left after it
        assert job.process.stdout is not None, "asked for"
        while chunk := job.process.stdout.read(1 << 16):
            job.line += chunk
            if len(job.line) > MOST_BYTES:
                return self._failed(f"it wrote more than {MOST_BYTES >> 20} MB")
        if not has_ended:
            return self._failed(f"it took longer than {LIMIT_S:.0f} s") if now_s > job.began_s + LIMIT_S else None
        if job.process.returncode != 0:
            return self._failed(f"it ended with code {job.process.returncode}; see {self._log}")
        try:
            window = Window.model_validate_json(job.line)
        except ValidationError as error:
            return self._failed(f"its line is no window: {error.errors()[0]['msg']}")
        if window.attempt != job.attempt:
            return self._failed(f"its window is of attempt {window.attempt}, expected {job.attempt}")
        self._end_job()
        self._failures = 0
        return window

    def _failed(self, why: str) -> None:
        self._end_job()
        self._failures += 1
        if self._failures in (1, MOST_FAILURES):
            rest = "no more is started in this attempt" if self._failures == MOST_FAILURES else "the next one follows"
            self._say(f"the analysis of slow nodes failed: {why}; {rest}")

    def _end_job(self) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        with suppress(OSError):
            os.killpg(job.process.pid, 9)
        job.process.wait()
        assert job.process.stdout is not None, "asked for"
        job.process.stdout.close()

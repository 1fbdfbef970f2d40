"""A compilation that takes ten times as long as the one before, for real: the processes that compile get a sliver of the time.

Nothing in them knows of it. Where they are is read from their marks, as the node's executor does; the kernel's freezer holds them, so
that they are neither stopped nor silent for long. Only the first step is held: imports, meeting and restoring take what they take.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from megascale_jax.cluster.attempts import attempt_folder
from megascale_jax.cluster.executor_file import executor_process, has_started
from megascale_jax.cluster.freezer import slowed
from megascale_jax.errors import UsageError
from megascale_jax.observe.marks import MarksReading, read_marks

CACHE = "JAX_ENABLE_COMPILATION_CACHE"
"""Environment variable of JAX; with ``false`` a process takes no program that an earlier one has compiled."""
TIMES = 10.0
SHARE, PERIOD_S = 0.01, 1.0
"""Of the time, while a compilation is held: so little that it is far from done when it is let go, also where the one before had to
share its processors with many others. Slices are seldom, since a late end of each makes it longer."""
LONGEST_S = 900.0


class SlowCompile:
    """Slows the first step of the next attempt until it has taken `TIMES` as long as that of the present one."""

    def __init__(self, nodes: Path, attempt: int):
        """``nodes``: folders of the job's nodes, on this machine; ``attempt``: the one that goes on now.

        Raises UsageError when no process has compiled, or its compilation took so long that ten times of it are too long.
        """
        self._nodes, self._attempt = nodes, attempt + 1
        self._held = ExitStack()
        self._slow: set[int] = set()
        self.before_s = first_step_s(nodes, attempt) or 0.0
        if not 0 < TIMES * self.before_s <= LONGEST_S:
            raise UsageError(
                f"the first step took {self.before_s:.1f} s, expected more than 0 and at most {LONGEST_S / TIMES:.0f} s: it is to take "
                f"{TIMES:.0f} times that, and a drill does not wait longer than {LONGEST_S:.0f} s for it"
            )

    def is_enough(self, status: object) -> bool:
        """Hold what compiles now; whether that has lasted long enough, or is over."""
        found = list(readings(self._nodes, self._attempt))
        compiling = [one for node, one in found if one.section == "compile" and not one.passes.get("compile") and runs(node, one.pid)]
        for pid in {one.pid for one in compiling} - self._slow:
            self._slow.add(pid)
            with suppress(OSError):  # it may have been ended meanwhile
                self._held.enter_context(slowed(pid, SHARE, PERIOD_S))
        lasted_s = max(((time.monotonic_ns() - one.entered_ns) / 1e9 for one in compiling), default=0.0)
        is_over = any(one.passes.get("compile") for _, one in found) or any(readings(self._nodes, self._attempt + 1))
        return is_over or lasted_s > TIMES * self.before_s

    def release(self) -> None:
        """Let all go on as fast as they can."""
        self._held.close()

    def lasted_s(self) -> float | None:
        """What the first step took then; ``None`` where it was not completed."""
        return first_step_s(self._nodes, self._attempt)


def readings(nodes: Path, attempt: int) -> Iterator[tuple[Path, MarksReading]]:
    """Where the processes of an attempt are, or were when they ended, with their nodes' folders."""
    for node in nodes.glob("*"):
        for path in attempt_folder(node, attempt).glob("rank-*.marks"):
            if (reading := read_marks(path)) is not None and reading.attempt == attempt:
                yield node, reading


def runs(node: Path, pid: int) -> bool:
    """Whether a process that has left marks goes on: it is there, and below the executor of its node."""
    executor = executor_process(node)
    return executor is not None and has_started(executor.pid, pid)


def first_step_s(nodes: Path, attempt: int) -> float | None:
    """The longest compilation of an attempt, with the step that follows it, seconds; ``None`` before one is complete."""
    return max((one.longest_s["compile"] for _, one in readings(nodes, attempt) if "compile" in one.longest_s), default=None)

"""How long a drill holds a compilation, against marks that are written here and a freezer that notes whom it holds."""

import os
import subprocess
import time
from contextlib import contextmanager

import pytest

from megascale_jax.cluster import slow_compile
from megascale_jax.cluster.attempts import attempt_folder
from megascale_jax.cluster.executor_file import record_executor
from megascale_jax.cluster.slow_compile import SlowCompile
from megascale_jax.errors import UsageError
from megascale_jax.observe.marks import Marks


class Clock:
    """Nanoseconds, set by hand."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self) -> int:
        return int(self.now_s * 1e9)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic_ns", clock)
    return clock


@pytest.fixture
def held(monkeypatch):
    held: list[int] = []

    @contextmanager
    def slowed(pid: int, share: float, period_s: float):
        assert share < 1 / slow_compile.TIMES, "else the work is done before the time has passed"
        held.append(pid)
        yield
        held.remove(pid)

    monkeypatch.setattr(slow_compile, "slowed", slowed)
    monkeypatch.setattr(slow_compile, "runs", lambda node, pid: True)
    return held


def begin(nodes, clock: Clock, node: str, attempt: int, rank: int) -> Marks:
    folder = attempt_folder(nodes / node, attempt)
    folder.mkdir(parents=True)
    return Marks(folder / f"rank-{rank}.marks", rank=rank, attempt=attempt, clock=clock)


def compiled(nodes, clock: Clock, seconds: float) -> None:
    marks = begin(nodes, clock, "node-0", 1, 0)
    marks.enter("compile")
    clock.now_s += seconds
    marks.enter("step")


def test_every_first_step_is_held_until_it_has_lasted_ten_times_as_long(tmp_path, clock, held):
    compiled(tmp_path, clock, 4.0)
    slow = SlowCompile(tmp_path, 1)
    assert slow.before_s == 4.0 and not slow.is_enough(None), "the next attempt has not begun"
    both = [begin(tmp_path, clock, f"node-{rank}", 2, rank) for rank in range(2)]
    assert not slow.is_enough(None) and not held, "imports are not held"
    for marks in both:
        marks.enter("compile")
    for _ in range(2):
        clock.now_s += 20.0
        assert not slow.is_enough(None) and len(held) == 1, "both are of this process, which is held once"
    assert slow.lasted_s() is None
    clock.now_s += 0.5
    assert slow.is_enough(None)
    slow.release()
    assert not held
    clock.now_s += 1.0
    both[0].enter("step")
    assert slow.lasted_s() == 41.5


def test_it_ends_where_the_step_is_done_too_early_or_another_attempt_has_begun(tmp_path, clock, held):
    compiled(tmp_path, clock, 4.0)
    slow = SlowCompile(tmp_path, 1)
    marks = begin(tmp_path, clock, "node-0", 2, 0)
    marks.enter("compile")
    clock.now_s += 5.0
    assert not slow.is_enough(None)
    begin(tmp_path, clock, "node-0", 3, 0)
    assert slow.is_enough(None) and slow.lasted_s() is None
    other = SlowCompile(tmp_path, 1)
    marks.enter("step")
    assert other.is_enough(None) and other.lasted_s() == 5.0


def test_marks_of_processes_that_are_gone_hold_nobody(tmp_path, clock, held, monkeypatch):
    compiled(tmp_path, clock, 4.0)
    slow = SlowCompile(tmp_path, 1)
    begin(tmp_path, clock, "node-0", 2, 0).enter("compile")
    monkeypatch.setattr(slow_compile, "runs", lambda node, pid: (node, pid) != (tmp_path / "node-0", os.getpid()))
    clock.now_s += 100.0
    assert not slow.is_enough(None) and not held


def test_a_process_that_ends_while_it_is_looked_for_is_passed_over(tmp_path, clock, held, monkeypatch):
    @contextmanager
    def slowed(pid: int, share: float, period_s: float):
        raise FileNotFoundError(f"/proc/{pid}/cgroup")
        yield

    monkeypatch.setattr(slow_compile, "slowed", slowed)
    compiled(tmp_path, clock, 4.0)
    slow = SlowCompile(tmp_path, 1)
    begin(tmp_path, clock, "node-0", 2, 0).enter("compile")
    assert not slow.is_enough(None)


def test_only_what_an_executor_has_started_runs_below_it(tmp_path):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:  # ends when its input is closed, on the way out
        assert not slow_compile.runs(tmp_path, process.pid), "the node has no executor"
        record_executor(tmp_path)
        assert slow_compile.runs(tmp_path, process.pid)
        assert not slow_compile.runs(tmp_path, os.getpid()) and not slow_compile.runs(tmp_path, os.getppid()), "others with such a number"
    assert not slow_compile.runs(tmp_path, process.pid), "it has ended"


@pytest.mark.parametrize("seconds", [None, 91.0])
def test_what_was_never_compiled_or_takes_too_long_is_refused(tmp_path, clock, seconds):
    if seconds is not None:
        compiled(tmp_path, clock, seconds)
    with pytest.raises(UsageError, match="expected more than 0 and at most 90 s"):
        SlowCompile(tmp_path, 1)

"""The analysis as a process that may do anything, against scripts in its place."""

import sys
import time

import pytest

from megascale_jax.cluster import suspects as suspects_module
from megascale_jax.cluster.suspects import FIRST_STEPS, FLUSH_S, MOST_FAILURES, Suspects
from megascale_jax.config.cluster import SlowNodesConfig

CONFIG = SlowNodesConfig(steps=8, every_s=60.0)
GOOD = (
    "import json, sys; a = dict(zip(sys.argv[1::2], map(int, sys.argv[2::2])));"
    "print(json.dumps({'attempt': a['--attempt'], 'first': a['--first'], 'end': a['--end'], 'step_s': 1.0, 'ranks': []}))"
)


class Watched:
    """An analysis whose process runs ``script``, and the clock of the driver."""

    def __init__(self, tmp_path, script: str):
        self.said: list[str] = []
        self.suspects = Suspects((sys.executable, "-I", "-S", "-c", script), CONFIG, tmp_path / "log", self.said.append)
        self.now_s = 100.0

    def look(self, step: int, attempt: int = 1, seconds: float = 0.0):
        self.now_s += seconds
        return self.suspects.look(self.now_s, attempt, step)

    def until_over(self, step: int, attempt: int = 1):
        """The window of the process that is started now, once that has ended."""
        self.look(step, attempt)
        self.look(step, attempt, FLUSH_S)
        assert self.suspects._job is not None, self.said
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            found = self.look(step, attempt)
            if self.suspects._job is None:
                return found
            time.sleep(0.02)
        raise AssertionError("it is not over")


@pytest.fixture
def watched(tmp_path):
    made: list[Watched] = []

    def make(script: str) -> Watched:
        made.append(Watched(tmp_path, script))
        return made[-1]

    yield make
    for one in made:
        one.suspects.close()


def test_windows_follow_each_other_without_the_first_steps_and_with_a_pause(watched):
    one = watched(GOOD)
    one.look(10)
    assert one.look(10 + FIRST_STEPS + CONFIG.steps - 2) is None and one.suspects._planned is None, "the window is not full"
    found = one.until_over(19)
    assert (found.attempt, found.first, found.end) == (1, 12, 20)
    one.look(200, seconds=CONFIG.every_s - FLUSH_S - 1)
    assert one.suspects._planned is None, "a pause lies between two"
    one.now_s += 2
    assert one.until_over(200).end == 201
    one.look(201, attempt=2)
    one.now_s += 100
    assert one.until_over(211, attempt=2).first == 204


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("raise SystemExit(3)", "ended with code 3"),
        ("print('{}')", "no window"),
        ("print('x' * 100_000)", "no window"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\0' * 50)", "no window"),
        (GOOD.replace("a['--attempt']", "7"), "of attempt 7"),
    ],
)
def test_what_is_no_window_is_said_and_after_some_in_a_row_none_is_started_until_the_next_attempt(watched, script, word):
    one = watched(script)
    one.look(0)
    for number in range(MOST_FAILURES):
        one.now_s += CONFIG.every_s
        assert one.until_over(10 + 10 * number) is None
    assert len(one.said) == 2 and word in one.said[0] and "no more is started" in one.said[1]
    one.look(1000, seconds=1000)
    assert one.suspects._planned is None and one.suspects._job is None
    one.look(1000, attempt=2)
    one.look(1010, attempt=2, seconds=100)
    assert one.suspects._planned is not None


def test_one_that_hangs_or_never_stops_writing_is_killed(watched, monkeypatch):
    one = watched("import time; time.sleep(1000)")
    one.look(0)
    one.look(20)
    one.look(20, seconds=FLUSH_S)
    process = one.suspects._job.process
    one.look(20, seconds=suspects_module.LIMIT_S + 1)
    assert process.returncode == -9 and "longer than" in one.said[0]
    monkeypatch.setattr(suspects_module, "MOST_BYTES", 1 << 18)
    endless = watched("import sys\nwhile True: sys.stdout.write('x' * 1000)")
    endless.look(0)
    assert endless.until_over(20) is None and "wrote more" in endless.said[0]


def test_a_new_attempt_ends_what_is_at_work_on_the_old_one(watched):
    one = watched("import time; time.sleep(1000)")
    one.look(0)
    one.look(20)
    one.look(20, seconds=FLUSH_S)
    process = one.suspects._job.process
    one.look(20, attempt=2)
    assert process.returncode == -9 and one.suspects._job is None


def test_a_command_that_is_not_there_is_a_failure(tmp_path):
    said: list[str] = []
    one = Suspects(("/nowhere/python",), CONFIG, tmp_path / "no-folder" / "log", said.append)
    for now_s, step in ((0.0, 0), (1.0, 20), (10.0, 20)):
        one.look(now_s, 1, step)
    assert "cannot be started" in said[0]

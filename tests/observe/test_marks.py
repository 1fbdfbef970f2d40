"""Marks read from outside: whole at every moment, also in the middle of a write, of stopped and of killed processes."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.errors import UsageError
from megascale_jax.observe.marks import ATTEMPT, INSTANTS, MARKS, PULSE_S, SECTIONS, UNTAUGHT_PASSES, Marks, read_marks
from megascale_jax.observe.pulse import ALIVE
from megascale_jax.observe.spike import Spike

LIMIT_S = 30
OPENED = "import sys, pathlib; from megascale_jax.observe.marks import Marks; marks = Marks(pathlib.Path(sys.argv[1]), rank=3, attempt=7)\n"


class Clock:
    def __init__(self):
        self.now = 5_000_000_000

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += round(seconds * 1e9)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank-0.marks"


def child(path, code):
    """A process that has run ``code`` and waits for ever."""
    code = f"{OPENED}{code}\nprint('there', flush=True)\nimport time; time.sleep({LIMIT_S})"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "there\n"
    return process


def test_nothing_happens_when_the_variable_is_not_set(tmp_path):
    marks = Marks.from_environment(0, {})
    with marks.section("checkpoint"):
        marks.enter("step")
    marks.step_done(1, 2.0)
    marks.saved(1)
    assert list(tmp_path.iterdir()) == []


class Told:
    """What an `Events` is told."""

    is_on = True

    def __init__(self):
        self.spans, self.instants, self.facts, self.is_closed = [], [], {}, False

    def each_pulse(self, tell):
        self.pulse = tell

    def record(self, name, begin_ns, duration_ns, *, step):
        self.spans.append((name, begin_ns, duration_ns, step))

    def instant(self, name, *, step, text):
        self.instants.append((name, step, text))

    def describe(self, **facts):
        self.facts |= facts

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("has_file", [False, True])
def test_passes_are_spans_and_all_else_instants(path, has_file):
    clock, told = Clock(), Told()
    marks = Marks(path if has_file else None, events=told, clock=clock)
    begin = clock.now
    clock.wait(1)
    marks.enter("data", 7)
    clock.wait(2)
    marks.enter("step", 7)
    clock.wait(3)
    with marks.section("checkpoint", 7):
        clock.wait(4)
    clock.wait(5)
    with pytest.raises(OSError, match="x"), marks.section("checkpoint", 8):
        clock.wait(6)
        raise OSError("x")
    marks.close()
    s = 1_000_000_000
    assert told.spans == [
        ("start", begin, s, -1),
        ("data", begin + s, 2 * s, 7),
        ("checkpoint", begin + 6 * s, 4 * s, 7),
        ("step", begin + 3 * s, 18 * s, 7),
    ]
    assert told.is_closed
    for _ in range(2):  # told anew, but nothing new
        marks.saved(7)
        marks.durable(6)
        marks.spiked(Spike(3, 4, None, 30, 40))
    marks.resumed(5, is_durable=True)
    marks.step_done(8, 2.5, is_skipped=True)
    marks.step_done(9, 2.5)
    marks.corrupt([1, 2], is_certain=False)
    assert [(name, step) for name, step, _ in told.instants] == [
        *(("saved", 7), ("published", 6), ("spike", 4), ("resume", 5), ("skip", 8), ("corrupt", 9))
    ]
    assert {name for name, _, _ in told.instants} < set(INSTANTS)


def test_the_pulse_of_events_tells_the_pass_that_goes_on():
    clock, told = Clock(), Told()
    marks = Marks(events=told, clock=clock)
    clock.wait(2)
    marks.enter("data", 3)
    began = clock.now
    clock.wait(4)
    told.pulse()
    with marks.section("checkpoint", 2):
        told.pulse()
    told.pulse()
    found = [(name, step, json.loads(text)) for name, step, text in told.instants]
    sections = [("data", 3, began), ("checkpoint", 2, clock.now), ("data", 3, began)]
    assert found == [(ALIVE, step, {"section": section, "since_ns": since}) for section, step, since in sections]


def test_file_and_attempt_are_those_of_the_environment(path):
    Marks.from_environment(2, {MARKS: str(path), ATTEMPT: "4"})
    assert (read_marks(path).rank, read_marks(path).attempt) == (2, 4)
    told = Told()
    Marks.from_environment(2, {ATTEMPT: "4"}, told)
    assert told.facts == {"attempt": 4}


def test_everything_is_read_as_written(path):
    clock = Clock()
    marks = Marks(path, rank=2, attempt=4, clock=clock)
    fresh = read_marks(path)
    assert (fresh.section, fresh.step, fresh.loss, fresh.passes, fresh.step_s) == ("start", 0, None, {}, None)
    assert (fresh.saved_step, fresh.durable_step) == (None, None)
    clock.wait(2)
    marks.resumed(10, is_durable=True)
    marks.enter("step")
    for step, seconds, loss in ((11, 8, 3.0), (12, 1, 2.0), (13, 3, 1.0)):
        clock.wait(seconds)
        marks.step_done(step, loss, step_s=seconds)
        marks.enter("step")
    marks.saved(12)
    clock.wait(0.5)
    reading = read_marks(path)
    assert (reading.rank, reading.attempt, reading.step, reading.loss) == (2, 4, 13, 1.0)
    assert (reading.section, clock.now - reading.entered_ns) == ("step", 500_000_000)
    assert reading.passes == {"start": 1, "step": 3}
    assert reading.longest_s == {"start": 2.0, "step": 3.0}, "the first step of a process may compile once more"
    assert reading.last_s == {"start": 2.0, "step": 3.0}
    assert (reading.saved_step, reading.durable_step) == (12, 10)
    assert reading.step_s == pytest.approx((8 * 0.9 + 1 * 0.1) * 0.9 + 3 * 0.1)


def test_skipped_steps_are_counted_in_a_row_and_in_all(path):
    marks = Marks(path)
    seen = []
    for step, is_skipped in enumerate((True, True, False, True), start=1):
        marks.step_done(step, math.nan if is_skipped else 1.0, is_skipped=is_skipped)
        reading = read_marks(path)
        seen.append((reading.non_finite_in_a_row, reading.non_finite))
    assert seen == [(1, 1), (2, 2), (0, 2), (1, 3)]
    assert math.isnan(read_marks(path).loss)


def test_time_inside_a_section_is_not_the_outer_ones(path):
    clock = Clock()
    marks = Marks(path, clock=clock)
    clock.wait(1)
    with marks.section("checkpoint"):
        clock.wait(30)
        assert read_marks(path).section == "checkpoint"
    assert (read_marks(path).section, clock.now - read_marks(path).entered_ns) == ("start", 1_000_000_000)
    clock.wait(1)
    marks.enter("end")
    assert read_marks(path).longest_s == {"checkpoint": 30.0, "start": 2.0}


def test_pass_is_not_complete_when_it_ends_in_an_exception(path):
    marks = Marks(path)
    with pytest.raises(OSError), marks.section("checkpoint"):
        raise OSError
    assert read_marks(path).passes == {} and read_marks(path).section == "start"


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SECTIONS), st.integers(0, 10**12), st.booleans()), max_size=30))
def test_passes_are_those_of_a_simple_count(tmp_path_factory, moves):
    path, clock = tmp_path_factory.mktemp("marks") / "marks", Clock()
    marks = Marks(path, clock=clock)
    lasted, current, since = {name: [] for name in SECTIONS}, "start", 0
    for name, ns, is_inside in moves:
        clock.now += ns
        since += ns
        if is_inside:
            with marks.section(name):
                clock.now += 7
            lasted[name].append(7)
        else:
            marks.enter(name)
            lasted[current].append(since)
            current, since = name, 0
    reading = read_marks(path)
    assert (reading.section, clock.now - reading.entered_ns) == (current, since)
    assert reading.passes == {name: len(times) for name, times in lasted.items() if times}
    assert reading.last_s == {name: times[-1] / 1e9 for name, times in lasted.items() if times}
    taught = {name: times[UNTAUGHT_PASSES.get(name, 0) :] for name, times in lasted.items()}
    assert reading.longest_s == {name: max(times) / 1e9 for name, times in taught.items() if times}


def test_reading_is_whole_when_a_write_is_cut_anywhere(path):
    marks = Marks(path)
    marks.step_done(1, 1.0)
    before = path.read_bytes()
    marks.step_done(2, 2.0)
    after = path.read_bytes()
    seen = set()
    for cut in range(len(after) + 1):
        for torn in (after[:cut] + before[cut:], before[:cut] + after[cut:]):
            path.write_bytes(torn)
            reading = read_marks(path)
            assert reading.loss == reading.step
            seen.add(reading.step)
    assert seen == {1, 2}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_never_raises_nor_shows_what_was_not_written(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("marks") / "marks"
    marks = Marks(path)
    marks.step_done(1, 1.0)
    marks.step_done(2, 2.0)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content) + 1))])
    reading = read_marks(path)
    assert reading is None or (reading.step, reading.loss) in {(1, 1.0), (2, 2.0)}


@settings(deadline=None)
@given(st.binary(max_size=1000))
def test_other_files_are_no_marks(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("marks") / "marks"
    path.write_bytes(content)
    assert read_marks(path) is None


def test_no_file_and_a_folder_are_no_marks(tmp_path):
    assert read_marks(tmp_path / "none") is None and read_marks(tmp_path) is None


def test_process_is_read_while_it_is_stopped_and_after_it_was_killed(path):
    process = child(path, "marks.enter('step'); marks.step_done(5, 1.25); marks.durable(4)")
    with process:
        process.send_signal(signal.SIGSTOP)
        stopped = read_marks(path)
        process.kill()
        process.wait()
    assert (stopped.pid, stopped.rank, stopped.attempt, stopped.step, stopped.section) == (process.pid, 3, 7, 5, "step")
    assert read_marks(path) == stopped


def test_a_process_that_waits_has_a_pulse_and_a_stopped_one_has_none(tmp_path):
    path = tmp_path / "rank-0.marks"
    code = "from megascale_jax.observe.marks import Marks\nimport threading\nMarks.from_environment(0)\nthreading.Event().wait()"
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARKS: str(path)}) as process:
        first = _pulse_after(path, 0)
        second = _pulse_after(path, first)
        assert 0 < (second - first) / 1e9 < 30 * PULSE_S and second <= time.monotonic_ns()
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        (last,) = {read_marks(path).pulse_ns for _ in range(3) if time.sleep(0.5 * PULSE_S) is None}
        assert last is not None
        process.kill()


def _pulse_after(path, before) -> int:
    limit = time.monotonic() + 30.0
    while time.monotonic() < limit:
        if (reading := read_marks(path)) is not None and reading.pulse_ns is not None and reading.pulse_ns > before:
            return reading.pulse_ns
        time.sleep(0.01)
    raise AssertionError("no pulse")


def test_readings_are_whole_while_a_process_writes_without_pause(path):
    write = "threading.Thread(target=lambda: [marks.step_done(i, i) for i in itertools.count()]).start()"
    process = child(path, f"import itertools, threading; {write}")
    with process:
        readings = [read_marks(path) for _ in range(3000)]
        process.kill()
    assert all(reading.loss in (None, reading.step) for reading in readings)
    assert [reading.step for reading in readings] == sorted(reading.step for reading in readings)
    assert readings[-1].step > readings[0].step


def test_file_of_an_earlier_process_is_replaced_and_left_to_it(path):
    old = Marks(path, attempt=1)
    new = Marks(path, attempt=2)
    old.step_done(9, 9.0)
    assert (read_marks(path).attempt, read_marks(path).step) == (2, 0)
    new.step_done(1, 1.0)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("environment", "words"),
    [({MARKS: "/proc/none/marks"}, "folder that this process can write"), ({ATTEMPT: "one"}, "expected the number")],
)
def test_impossible_settings_are_refused(environment, words):
    with pytest.raises(UsageError, match=words):
        Marks.from_environment(0, environment)

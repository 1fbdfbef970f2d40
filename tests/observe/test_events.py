"""Events: what is written is read, whatever kills the process or fills its disk, and the caller never notices."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest

from megascale_jax.observe import event_segments, events
from megascale_jax.observe.event_files import is_over, read_stream
from megascale_jax.observe.event_segments import FACTS, Facts
from megascale_jax.observe.events import ANCHOR, DROPPED, LANES, OTHER_NAME, PULSE_S, Events

LIMIT_S = 60
NOTES = (ANCHOR, DROPPED)


def segments(folder):
    return sorted((folder / "events").glob("*.arrows"))


def batches(path):
    """Whole batches of a file up to where it is cut."""
    found = []
    with pa.ipc.open_stream(pa.BufferReader(path.read_bytes())) as reader, suppress(OSError, pa.ArrowInvalid):
        found.extend(reader)
    return found


def rows(folder, *, notes=False):
    found = [row for path in segments(folder) for batch in batches(path) for row in batch.to_pylist()]
    return found if notes else [row for row in found if row["name"] not in NOTES]


def facts(path):
    with pa.ipc.open_stream(path) as reader:
        return Facts.model_validate_json(reader.schema.metadata[FACTS])


@pytest.fixture
def opened(tmp_path):
    """A writer that is closed after the test."""
    made = []

    def make(**given):
        made.append(Events(tmp_path / "events", **given))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_nothing_happens_without_a_folder(tmp_path):
    off = Events(None)
    off.record("step", 1, 2)
    off.instant("stop")
    off.many(name="a", begin_ns=np.arange(3))
    with off.span("data"):
        pass
    off.describe(mesh=(1, 1, 1))
    off.begin()
    assert off.flush() and not off.is_on
    off.close()
    assert list(tmp_path.iterdir()) == []


def test_every_column_is_read_as_written(tmp_path, opened):
    out = opened(role="keeper", rank=7, attempt=3, run="ab", clock=lambda: 50)
    out.record("step", 10, 5, lane="compute", device=1, step=2, tick=3, microbatch=4, chunk=5, text='{"a": 1}')
    out.instant("stop", step=9)
    with pytest.raises(KeyError), out.span("data", step=4):
        raise KeyError
    out.flush()
    assert rows(tmp_path) == [
        {
            "name": "step",
            "lane": "compute",
            "device": 1,
            "step": 2,
            "tick": 3,
            "microbatch": 4,
            "chunk": 5,
            "begin_ns": 10,
            "duration_ns": 5,
        }
        | {"is_instant": False, "text": '{"a": 1}'},
        *(
            {"name": name, "lane": "host", "device": -1, "step": step, "tick": -1, "microbatch": -1, "chunk": -1, "begin_ns": 50}
            | {"duration_ns": 0, "is_instant": is_instant, "text": None}
            for name, step, is_instant in (("stop", 9, True), ("data", 4, False))
        ),
    ]
    (path,) = segments(tmp_path)
    found = facts(path)
    assert (found.role, found.rank, found.attempt, found.run, found.pid, found.segment) == ("keeper", 7, 3, "ab", os.getpid(), 0)
    assert path.name.startswith("keeper-00007-") and path.name.endswith(f"-{os.getpid()}.00000.arrows")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_bulk_rows_are_read_as_written(tmp_path, opened):
    out = opened()
    out.record("b", 0, 0)
    out.many(
        name=(np.array([1, 0, 1]), ("a", "b")), lane=("compute"), begin_ns=np.array([3, 1, 2]), duration_ns=9, device=np.arange(3),
        is_instant=np.array([True, False, False]), text=["x", None, "z"],
    )  # fmt: skip
    out.many(name="c", begin_ns=np.array([4]), lane=(np.array([0]), ("pipe",)), text="all")
    out.flush()
    found = [
        (row["name"], row["lane"], row["begin_ns"], row["duration_ns"], row["device"], row["is_instant"], row["text"])
        for row in rows(tmp_path)
    ]
    assert found == [
        ("b", "host", 0, 0, -1, False, None),
        ("b", "compute", 3, 9, 0, True, "x"),
        ("a", "compute", 1, 9, 1, False, None),
        ("b", "compute", 2, 9, 2, False, "z"),
        ("c", "pipe", 4, 0, -1, False, "all"),
    ]


@pytest.mark.parametrize("columns", [{"device": np.arange(2)}, {"text": ["x"]}, {"name": (np.arange(4), ("a",) * 4)}])
def test_bulk_rows_of_different_lengths_are_refused(opened, columns):
    with pytest.raises(ValueError, match="expected arrays of one length"):
        opened().many(**({"name": "a", "begin_ns": np.arange(3)} | columns))


def test_what_comes_before_begin_is_written_then(tmp_path, opened):
    out = opened(begins=False)
    out.instant("early")
    assert not (tmp_path / "events").exists()
    out.begin()
    assert out.flush() and [row["name"] for row in rows(tmp_path)] == ["early"]


def test_a_removed_run_does_not_come_back(tmp_path):
    out = Events(tmp_path / "gone" / "events")
    out.instant("a")
    assert out.flush() and out.dropped == 1 and list(tmp_path.iterdir()) == []
    out.close()


def test_what_is_known_later_is_in_the_next_segment(tmp_path, opened):
    out = opened()
    out.instant("a")
    out.flush()
    out.describe(mesh=(1, 2, 1), devices=[0, 1])
    out.instant("b")
    out.flush()
    out.instant("c")
    out.flush()
    first, second = segments(tmp_path)
    assert (facts(first).mesh, facts(second).mesh, facts(second).devices, facts(second).segment) == (None, (1, 2, 1), (0, 1), 1)
    assert [row["name"] for row in rows(tmp_path)] == ["a", "b", "c"]


def test_a_large_segment_is_followed_by_another(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(event_segments, "SEGMENT_BYTES", 4000)
    out = opened()
    for number in range(20):
        out.record(f"new {number}", number, 0)
        out.flush()
    assert len(segments(tmp_path)) > 1 and all(path.stat().st_size < 8000 for path in segments(tmp_path))
    assert [row["name"] for row in rows(tmp_path)] == [f"new {number}" for number in range(20)]


KILLED = """
import sys, time
from pathlib import Path
from megascale_jax.observe.events import Events
out = Events(Path(sys.argv[1]))
for number in range(1000):
    out.record("flushed", number, 1)
out.flush()
print("flushed", flush=True)
number = 0
while True:
    out.record("later", number, 1)
    number += 1
    if number % 1000 == 0:
        print(number, flush=True)
        time.sleep(0.05)
"""


def test_a_killed_process_loses_at_most_what_was_not_flushed(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "events")], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "flushed\n"
    while int(child.stdout.readline()) < 3000:
        pass
    child.kill()
    assert child.wait(LIMIT_S) == -signal.SIGKILL
    found = rows(tmp_path)
    assert [row["begin_ns"] for row in found if row["name"] == "flushed"] == list(range(1000))
    later = [row["begin_ns"] for row in found if row["name"] == "later"]
    assert later == list(range(len(later))), "a prefix, whatever was going on"


def test_a_process_that_ends_by_itself_loses_nothing(tmp_path):
    code = (
        "import sys, pathlib; from megascale_jax.observe.events import Events; Events(pathlib.Path(sys.argv[1])).instant('a'); sys.exit(3)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "events")], timeout=LIMIT_S, check=False, capture_output=True)
    assert (ended.returncode, ended.stderr, [row["name"] for row in rows(tmp_path)]) == (3, b"", ["a"])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_writes_nothing(tmp_path, opened):
    out = opened()
    out.instant("parent")
    if (child := os.fork()) == 0:
        out.instant("child")
        os._exit(0 if out.flush(1.0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert out.flush() and [row["name"] for row in rows(tmp_path)] == ["parent"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_does_not_hold_the_lock(tmp_path):
    """Its parent may be killed: what it wrote is over then, however long the child lives."""
    code = (
        "import os, signal, sys, time, pathlib\n"
        "from megascale_jax.observe.events import Events\n"
        "out = Events(pathlib.Path(sys.argv[1]))\n"
        "out.instant('a')\n"
        "out.flush(60)\n"
        "if os.fork() == 0:\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(120)\n"
        "    os._exit(0)\n"
        "time.sleep(120)\n"
    )
    parent = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "events")], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    try:
        (path,) = segments(tmp_path)
        assert not is_over(path), "the parent still has it"
        parent.kill()
        parent.wait(LIMIT_S)
        assert is_over(path)
    finally:
        parent.kill()
        os.kill(child, signal.SIGKILL)


class FullDisk:
    """`os.write` of the segments, which takes ``room`` bytes and then no more."""

    def __init__(self, monkeypatch):
        self.room, self._write = 1 << 40, os.write
        monkeypatch.setattr(event_segments.os, "write", self)

    def __call__(self, descriptor, data):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(descriptor, bytes(data)[: self.room])
        self.room -= written
        return written


@pytest.fixture
def disk(monkeypatch):
    return FullDisk(monkeypatch)


@pytest.mark.parametrize("room", [0, 100])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_full_disk_stops_events_and_nothing_else(tmp_path, opened, disk, caplog, room, has_begun):
    out = opened()
    if has_begun:
        out.record("before", 0, 0)
        out.flush()
    disk.room = room
    for number in range(3):
        for _ in range(10):
            out.record("lost", number, 0)
        assert out.flush()
        disk.room = 0
    assert out.dropped == 30
    disk.room = 1 << 40
    out.record("after", 0, 0)
    out.flush()
    out.close()
    found = rows(tmp_path, notes=True)
    assert [row["name"] for row in found if row["name"] not in NOTES] == ["before"] * has_begun + ["after"]
    assert [row["text"] for row in found if row["name"] == DROPPED] == ['{"count": 30}']
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "cannot be written" in said[0] and "30 were lost" in said[1]
    assert not list((tmp_path / "events").glob(".*")), "no piece of a segment stays"
    assert [read_stream(path).note for path in segments(tmp_path)] == [""] * (1 + has_begun), "nor of a batch"


def test_a_disk_that_hangs_costs_no_memory_and_no_time(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(events, "ROWS", 8)
    monkeypatch.setattr(events, "BULK_ROWS", 100)
    goes_on, hangs = threading.Event(), threading.Event()
    write = os.write

    def hanging(descriptor, data):
        hangs.set()
        goes_on.wait(LIMIT_S)
        return write(descriptor, data)

    monkeypatch.setattr(event_segments.os, "write", hanging)
    out = opened()
    out.instant("first")
    assert not out.flush(limit_s=0.01) and hangs.wait(LIMIT_S)
    for _ in range(20):
        out.instant("more")
    out.many(name="bulk", begin_ns=np.arange(101))
    assert out.dropped == 12 + 101
    goes_on.set()
    assert out.flush(LIMIT_S)
    assert [row["name"] for row in rows(tmp_path)] == ["first"] + ["more"] * 8


def test_a_number_that_is_none_is_dropped(tmp_path, opened):
    out = opened()
    out.record("a", 0.5, 1)
    out.record("a", 1, 1, step=1 << 40)
    assert out.dropped == 2 and out.flush()


def test_the_text_of_a_dropped_record_goes_with_it(tmp_path, opened):
    out = opened(begins=False)
    out.record("bad", 1, 1, step=1 << 40, text="its own")
    out.record("good", 1, 1)
    out.begin()
    assert out.flush(LIMIT_S) and [(row["name"], row["text"]) for row in rows(tmp_path)] == [("good", None)]


def test_hostile_names_and_texts_are_text(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(events, "MOST_NAMES", len(LANES) + 3 + 5)
    out = opened()
    hostile = ["\x1b[31m[red]", "\udc80 no UTF-8", "a" * 5000, "'; drop table events --\0"]
    for text in hostile:
        out.record(text, 1, 1, text=text)
    out.many(name=(np.arange(3), ("n1", "n2", "n3")), begin_ns=np.arange(3), text=["\udcff", None, "x" * 5000])
    assert out.flush() and out.dropped == 0
    found = rows(tmp_path)
    assert [row["text"] for row in found[:4]] == [hostile[0], "\\udc80 no UTF-8", "a" * 4096, hostile[3]]
    assert [row["name"] for row in found] == [hostile[0], "\\udc80 no UTF-8", "a" * 256, hostile[3], "n1", OTHER_NAME, OTHER_NAME]
    assert [row["text"] for row in found[4:]] == ["\\udcff", None, "x" * 5000]


def test_the_clocks_are_noted_again_and_again(tmp_path, opened, monkeypatch):
    now = [0]
    out = opened(clock=lambda: now[0])
    for seconds in (0, 30, 90):
        now[0] = round(seconds * 1e9)
        out.instant("a")
        out.flush()
    anchors = [row for row in rows(tmp_path, notes=True) if row["name"] == ANCHOR]
    assert [row["begin_ns"] for row in anchors] == [0, 90_000_000_000]
    assert all(abs(int(row["text"]) - time.time_ns()) < LIMIT_S * 1e9 for row in anchors)


def test_threads_lose_nothing(tmp_path, opened):
    out = opened()

    def work(name):
        for number in range(5000):
            out.record(name, number, 0)

    threads = [threading.Thread(target=work, args=(f"thread {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert out.flush() and out.dropped == 0
    found = rows(tmp_path)
    for number in range(4):
        assert [row["begin_ns"] for row in found if row["name"] == f"thread {number}"] == list(range(5000))


def test_a_pulse_comes_at_once_and_then_every_few_seconds_whatever_else_happens(tmp_path):
    now = [10**12]
    out = Events(tmp_path / "events", begins=False, clock=lambda: now[0])
    out.each_pulse(lambda: out.instant("pulse"))
    out.begin()
    for wait_s in (0.0, PULSE_S - 1, 1.0, 3 * PULSE_S):
        now[0] += int(wait_s * 1e9)
        assert out.flush(LIMIT_S)
    out.close()
    assert [row["begin_ns"] - 10**12 for row in rows(tmp_path)] == [0, int(PULSE_S * 1e9), int(4 * PULSE_S * 1e9)]

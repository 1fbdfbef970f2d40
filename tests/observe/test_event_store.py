"""Files of events as a reader finds them: growing, cut, damaged, compacted, old; and what a query may do."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from filelock import FileLock
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megascale_jax.errors import RunFolderError, UsageError
from megascale_jax.observe import compactor, event_compaction, event_segments, event_store
from megascale_jax.observe.compactor import Compactor
from megascale_jax.observe.event_compaction import DELETIONS, LOCK, compact
from megascale_jax.observe.event_files import is_over, read_stream
from megascale_jax.observe.event_paths import DETAIL, PARQUET
from megascale_jax.observe.event_store import read_events
from megascale_jax.observe.event_sums import STEPS_SUMS
from megascale_jax.observe.events import ANCHOR, STEP_END, Events

LIMIT_S = 60
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
NUMBERS = ("device", "step", "tick", "microbatch", "chunk")


def write(folder, *, closed=True, devices_ns=20, **given):
    """One process with two host spans and 100 rows of devices."""
    out = Events(folder / "events", **given)
    out.record("data", 10, 5, step=1)
    out.many(
        name="forward",
        lane="compute",
        begin_ns=np.arange(100) + devices_ns,
        duration_ns=1,
        device=np.arange(100) % 4,
        step=np.arange(100) // 50 + 1,
    )
    out.many(name=STEP_END, lane="compute", begin_ns=np.arange(4) + 200, device=np.arange(4), step=1, is_instant=True)
    out.record("step", 15, 200, step=1, text="done")
    assert out.flush(LIMIT_S)
    if closed:
        out.close()
    return out


def files(run, pattern="*"):
    return sorted(path for path in (run / "events").glob(pattern) if path.name not in (DELETIONS, LOCK, STEPS_SUMS))


def names(run, **given):
    with read_events(run, **given) as store:
        found = store.sql("select name, count(*) as n from events group by name").to_pylist()
        return {row["name"]: row["n"] for row in found if row["name"] != ANCHOR}


WHOLE = {"data": 1, "forward": 100, STEP_END: 4, "step": 1}


def test_a_folder_without_events_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="has no folder events"):
        read_events(tmp_path)


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_run_is_read_whole_and_in_part(tmp_path, is_compacted):
    write(tmp_path, rank=0, run="r")
    write(tmp_path, rank=3, attempt=2, role="keeper")
    if is_compacted:
        assert compact(tmp_path).segments == 2
    assert names(tmp_path) == {name: 2 * number for name, number in WHOLE.items()}
    assert names(tmp_path, ranks=[3]) == WHOLE
    assert names(tmp_path, ranks=[3], steps=range(2, 3)) == {"forward": 50}
    with read_events(tmp_path) as store:
        (row,) = store.sql("select * from events where name = 'step' and rank = 3").to_pylist()
        assert store.notes == () and all(file.writer == "none" for file in store.files)
    assert (row["role"], row["rank"], row["attempt"], row["lane"], row["text"]) == ("keeper", 3, 2, "host", "done")
    assert row["process"].startswith("keeper-00003-") and row["host"]
    uptime_ns = time.time_ns() - time.monotonic_ns()
    assert abs(row["unix_ns"] - (15 + uptime_ns)) < LIMIT_S * 1e9


def test_compaction_splits_sorts_and_keeps_facts(tmp_path):
    write(tmp_path, run="r").close()
    done = compact(tmp_path)
    assert (done.segments, done.rows, done.notes, done.deleted) == (1, sum(WHOLE.values()) + 1, [], [])
    host, detail = files(tmp_path, "*")[::-1]
    assert host.name.endswith(PARQUET) and detail.name.endswith(DETAIL)
    assert set(pq.read_table(detail)["name"].to_pylist()) == {"forward"}
    begins = pq.read_table(host)["begin_ns"].to_pylist()
    assert begins == sorted(begins)
    with read_events(tmp_path) as store:
        (file,) = (file for file in store.files if file.path == host)
    assert (file.facts.run, file.facts.pid, file.summary.rows, file.summary.dropped) == ("r", os.getpid(), 7, 0)
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path)} == {0o600}
    again = compact(tmp_path)
    assert (again.segments, again.rows) == (0, 0) and names(tmp_path) == WHOLE


def test_a_living_writer_is_read_and_left_alone(tmp_path):
    out = write(tmp_path, closed=False)
    (path,) = files(tmp_path)
    assert not is_over(path) and compact(tmp_path).segments == 0 and names(tmp_path) == WHOLE
    out.record("later", 300, 1)
    out.flush(LIMIT_S)
    with read_events(tmp_path) as store:
        assert store.files[0].writer == "alive" and store.sql("select count(*) as n from events where name = 'later'").to_pylist() == [
            {"n": 1}
        ]
    out.describe(devices=[0])
    out.record("last", 400, 1)
    out.flush(LIMIT_S)
    assert is_over(path) and compact(tmp_path).segments == 1
    assert names(tmp_path) == {**WHOLE, "later": 1, "last": 1}
    out.close()
    assert compact(tmp_path).segments == 1 and names(tmp_path) == {**WHOLE, "later": 1, "last": 1}


def test_the_first_batches_of_a_growing_file_are_no_damage(tmp_path):
    out = write(tmp_path, closed=False)
    (path,) = files(tmp_path)
    with path.open("ab") as file:
        file.write(b"\xff\xff\xff\xff\x10")
    with read_events(tmp_path) as store:
        assert store.notes == ()
    out.close()
    with read_events(tmp_path) as store:
        assert "107 events, then the file is cut" in store.notes[0] and store.sql("select count(*) as n from events").to_pylist() == [
            {"n": 107}
        ]


CHILD = """
import sys, time
from pathlib import Path
from megascale_jax.observe.events import Events
out = Events(Path(sys.argv[1]))
out.instant("a")
out.flush()
print("there", flush=True)
time.sleep(60)
"""


def test_a_killed_process_is_over_and_is_compacted(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / "events")], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "there\n"
    (path,) = files(tmp_path)
    assert not is_over(path)
    child.kill()
    child.wait(LIMIT_S)
    assert is_over(path) and compact(tmp_path).notes == [] and names(tmp_path) == {"a": 1}


def test_a_file_of_another_host_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(event_segments, "boot_id", lambda: "another")
    out = write(tmp_path, closed=False)
    monkeypatch.undo()
    (path,) = files(tmp_path)
    content = path.read_bytes()
    out.close()
    path.write_bytes(content)  # killed there, and its lock is not seen here
    assert not is_over(path)
    path.write_bytes(content + b"\xff\xff\xff\xff\x10")
    with read_events(tmp_path) as store:
        assert store.files[0].writer == "unknown" and "then the file is cut" in store.notes[0]
    os.utime(path, (0, 0))
    assert is_over(path)


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    """Name and bytes of a segment of four flushes, with rows of devices in the last two."""
    run = tmp_path_factory.mktemp("whole")
    out = Events(run / "events")
    for number in range(4):
        out.record(f"name {number}", number, 1, device=-1 if number < 2 else 0)
        out.flush(LIMIT_S)
    out.close()
    (path,) = files(run)
    return path.name, path.read_bytes()


def put(run, name, content):
    (run / "events").mkdir()
    path = run / "events" / name
    path.write_bytes(content)
    os.utime(path, (0, 0))
    return path


@given(st.floats(0, 1), st.binary(max_size=40) | st.just(bytes(64)))
@example(1.0, b"")
@example(1.0, b"a")
@settings(max_examples=25, deadline=None)
def test_a_cut_file_gives_its_whole_batches_and_says_so(tmp_path_factory, whole_file, share, garbage):
    run, (name, content) = tmp_path_factory.mktemp("run"), whole_file
    stream = read_stream(put(run, name, content[: round(share * len(content))] + garbage))
    found = [name for name in stream.table["name"].to_pylist() if name != ANCHOR]
    assert found == [f"name {number}" for number in range(len(found))]
    if share == 1:
        assert len(found) == 4 and bool(garbage) == bool(stream.note) and stream.is_closed == (not garbage)
    compact(run)
    with read_events(run) as store:
        assert store.sql("select count(*) as n from events").to_pylist() == [{"n": stream.table.num_rows}]
        assert bool(store.notes) == bool(stream.note)


@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_never_breaks_the_reader(tmp_path_factory, whole_file, changes):
    run, name, content = tmp_path_factory.mktemp("run"), whole_file[0], bytearray(whole_file[1])
    for share, value in changes:
        content[int(share * len(content))] = value
    stream = read_stream(put(run, name, bytes(content)))
    assert len(stream.table.to_pylist()) == stream.table.num_rows == stream.summary.rows
    compact(run)


WORDS = {"name": st.text(max_size=20), "lane": st.text(max_size=5), "text": st.none() | st.text(max_size=20)}
ROWS = st.fixed_dictionaries(WORDS | {"begin_ns": INT64, "duration_ns": INT64} | dict.fromkeys(NUMBERS, INT32))


@given(st.lists(st.lists(ROWS, min_size=1, max_size=5), max_size=4), st.booleans())
@settings(max_examples=40, deadline=None)
def test_whatever_is_written_is_read(tmp_path_factory, flushes, is_bulk):
    run = tmp_path_factory.mktemp("run")
    out = Events(run / "events")
    for rows in flushes:
        if is_bulk:
            words = {name: (np.arange(len(rows)), tuple(row[name] for row in rows)) for name in ("name", "lane")}
            numbers = {name: np.array([row[name] for row in rows]) for name in (*NUMBERS, "begin_ns", "duration_ns")}
            out.many(**words, **numbers, text=[row["text"] for row in rows])
        else:
            for row in rows:
                out.record(**row)
        assert out.flush(LIMIT_S)
    out.close()
    assert out.dropped == 0
    expected = [row for rows in flushes for row in rows]
    found = [row for path in files(run) for row in read_stream(path).table.to_pylist() if row["name"] != ANCHOR]
    assert [{name: row[name] for name in expected[0]} for row in found] == expected


@pytest.mark.parametrize("kill_at", [0, 1, 2])
def test_a_compaction_that_is_killed_loses_and_doubles_nothing(tmp_path, kill_at):
    """Before the first rename, between the two, and before the segment is removed."""
    write(tmp_path)
    code = (
        "import os, sys, pathlib\n"
        "from megascale_jax.observe.event_compaction import compact\n"
        f"left = [{kill_at}]\n"
        "def dying(function):\n"
        "    def wrapped(*given):\n"
        "        if left[0] == 0: os.kill(os.getpid(), 9)\n"
        "        left[0] -= 1\n"
        "        return function(*given)\n"
        "    return wrapped\n"
        "pathlib.Path.rename, pathlib.Path.unlink = dying(pathlib.Path.rename), dying(pathlib.Path.unlink)\n"
        "compact(pathlib.Path(sys.argv[1]))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=LIMIT_S, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(files(tmp_path, "*.arrows")) == 1 and names(tmp_path) == WHOLE
    done = compact(tmp_path)
    assert done.segments == (0 if kill_at == 2 else 1)
    assert names(tmp_path) == WHOLE and len(files(tmp_path)) == 2 and not files(tmp_path, ".*.parquet")


def test_a_compaction_on_a_full_disk_leaves_the_segment(tmp_path, monkeypatch):
    write(tmp_path)

    def refused(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(event_compaction.pq, "write_table", refused)
    with pytest.raises(OSError, match="No space"):
        compact(tmp_path)
    assert [path.suffix for path in files(tmp_path)] == [".arrows"] and names(tmp_path) == WHOLE


def test_only_one_compaction_works(tmp_path):
    write(tmp_path)
    with FileLock(tmp_path / "events" / LOCK):
        assert compact(tmp_path).is_busy and names(tmp_path) == WHOLE
    assert compact(tmp_path).segments == 1


def test_rows_of_devices_go_first_and_deletions_are_on_record(tmp_path):
    for attempt in range(3):
        write(tmp_path, attempt=attempt, devices_ns=time.monotonic_ns() + 10**12)  # newer than all else, and go first all the same
    compact(tmp_path)
    host, detail = files(tmp_path, f"*0{PARQUET}"), files(tmp_path, f"*{DETAIL}")
    sums = (tmp_path / "events" / STEPS_SUMS).stat().st_size
    size = sum(path.stat().st_size for path in (*host, *detail)) + sums
    done = compact(tmp_path, keep_mb=(size - detail[0].stat().st_size - 1) / 1e6)
    assert len(done.deleted) == 2 and set(done.deleted) < set(detail)
    assert set(compact(tmp_path, keep_mb=sum(path.stat().st_size for path in host) / 1e6 - 1e-6).deleted) >= set(detail) - set(done.deleted)
    lines = [json.loads(line) for line in (tmp_path / "events" / DELETIONS).read_text().splitlines()]
    assert len(lines) == 4 and all(line["num_bytes"] and "more than" in line["reason"] for line in lines)
    assert lines[0]["file"] == done.deleted[0].name
    assert len(files(tmp_path)) == 2


def test_living_writers_leave_half_of_the_limit_to_what_is_over(tmp_path):
    write(tmp_path)
    compact(tmp_path)
    over = sum(path.stat().st_size for path in (*files(tmp_path), tmp_path / "events" / STEPS_SUMS))
    out = write(tmp_path, rank=1, closed=False)
    (path,) = files(tmp_path, "*.arrows")
    growing = path.stat().st_size
    done = compact(tmp_path, keep_mb=(growing + over + 1) / 1e6)  # one to spare for the division
    assert done.deleted == [] and done.notes == []
    with path.open("ab") as file:  # more than the limit alone
        file.truncate(10 * over)
    done = compact(tmp_path, keep_mb=(2 * over + 1) / 1e6)
    assert done.deleted == [] and len(done.notes) == 1 and "are still written to" in done.notes[0]
    done = compact(tmp_path, keep_mb=(2 * over - 2) / 1e6)
    assert [path.name.endswith(DETAIL) for path in done.deleted] == [True] and path.exists()
    out.close()


def test_old_files_go(tmp_path):
    write(tmp_path)
    compact(tmp_path, keep_days=1)
    assert len(files(tmp_path)) == 2
    time.sleep(0.01)
    done = compact(tmp_path, keep_days=1e-9)
    assert len(done.deleted) == 2 and files(tmp_path) == [] and names(tmp_path) == {}


def test_a_file_that_is_none_of_ours_is_noted(tmp_path):
    write(tmp_path)
    garbage = tmp_path / "events" / "garbage-1.00000.arrows"
    garbage.write_bytes(b"no arrow at all")
    os.utime(garbage, (0, 0))
    (tmp_path / "events" / "garbage-2.00000.parquet").write_bytes(b"no parquet at all")
    done = compact(tmp_path)
    assert done.segments == 1 and "no events can be read" in done.notes[0]
    with read_events(tmp_path) as store:
        assert len(store.notes) == 2 and all("no events can be read" in note for note in store.notes)
    assert names(tmp_path) == WHOLE


def test_what_was_dropped_is_counted(tmp_path):
    out = write(tmp_path, closed=False)
    out.record("a", 1, 1, step=1 << 40)
    out.record("b", 1, 1)
    out.close()
    for _ in range(2):
        with read_events(tmp_path) as store:
            assert sum(file.summary.dropped for file in store.files) == 1
        compact(tmp_path)


def test_a_clock_that_was_set_shows_from_the_next_anchor_on(tmp_path, monkeypatch):
    now = {"monotonic": 0, "unix": 10**18}
    monkeypatch.setattr("megascale_jax.observe.events.time.time_ns", lambda: now["unix"])
    out = Events(tmp_path / "events", clock=lambda: now["monotonic"])
    for monotonic_s, unix_s in ((0, 0), (100, 100), (200, 5000)):
        now.update(monotonic=monotonic_s * 10**9, unix=10**18 + unix_s * 10**9)
        out.instant("a", step=unix_s)
        out.flush(LIMIT_S)
    out.close()
    (path,) = files(tmp_path)
    table = read_stream(path).table
    found = [(row["unix_ns"] - 10**18) // 10**9 for row in table.to_pylist() if row["name"] == "a"]
    assert found == [0, 100, 5000]


@pytest.mark.parametrize(
    "query",
    [
        "select * from '/etc/passwd'",
        "select * from read_csv('/etc/passwd')",
        "copy (select 1) to 'x.csv'",
        "copy (select 1) to '.tmp/x.csv'",
        "select * from read_text('.tmp/secret')",
        "set memory_limit = '1TB'",
        "attach 'x.db'",
        "install httpfs",
        "set enable_external_access = true",
        "select * from store",
        "select nothing from events",
    ],
)
def test_a_query_reads_events_and_nothing_else(tmp_path, monkeypatch, query):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    (tmp_path / ".tmp").mkdir()
    (tmp_path / ".tmp" / "secret").write_text("a")
    before = sorted(tmp_path.rglob("*"))
    with read_events(tmp_path) as store, pytest.raises(UsageError, match="the view events has the columns name, lane"):
        store.sql(query)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_query_gets_a_part_of_the_machine_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(event_store, "MOST_MEMORY", 64_000_000)
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    with read_events(tmp_path) as store:
        settings = "current_setting('temp_directory') as folder, current_setting('threads') as threads"
        (row,) = store.sql(f"select {settings}").to_pylist()
        assert row["folder"] == "" and 1 <= row["threads"] <= event_store.MOST_THREADS
        with pytest.raises(UsageError, match=r"could not allocate|failed to pin|failed to allocate|Out of Memory"):
            store.sql("select count(*) from (select distinct a.begin_ns, b.range from events a, range(100000) b)")
    assert {path.name for path in tmp_path.iterdir()} == {"events"}


def test_a_compactor_starts_for_what_rests_only(tmp_path):
    write(tmp_path)
    one = Compactor(tmp_path, 100.0, None)
    one.start()
    assert one._process is None
    os.utime(files(tmp_path)[0], (0, 0))
    one.start()
    assert one._process is not None and one._process.wait(LIMIT_S) == 0
    assert names(tmp_path) == WHOLE and len(files(tmp_path, "*.parquet")) == 2


def test_a_compactor_starts_in_time_and_at_the_end_and_never_twice_at_once(tmp_path, monkeypatch):
    started: list[list[str]] = []

    class Process:
        is_at_work = True

        def __init__(self, command, **_):
            started.append(command)

        def poll(self):
            return None if self.is_at_work else 0

    now_s = [0.0]
    monkeypatch.setattr(compactor, "subprocess", SimpleNamespace(Popen=Process, DEVNULL=subprocess.DEVNULL))
    monkeypatch.setattr(compactor, "time", SimpleNamespace(time=time.time, monotonic=lambda: now_s[0]))
    one = Compactor(tmp_path, 100.0, None)
    write(tmp_path)
    os.utime(files(tmp_path)[0], (0, 0))
    for now_s[0], number in ((compactor.PERIOD_S - 1, 0), (compactor.PERIOD_S, 1), (3 * compactor.PERIOD_S, 1)):
        one.start_in_time()
        assert len(started) == number
    Process.is_at_work = False
    one.start_in_time()
    assert len(started) == 1, "it has just looked"
    now_s[0] *= 2
    one.start_in_time()
    assert len(started) == 2
    out = Events(tmp_path / "events", rank=1, on_close=one.finish)
    out.instant("a")
    out.close(LIMIT_S)
    assert len(started) == 3 and started[-1][-2:] == ["--keep-mb", "100.0"]

"""Times out of files of sums are those out of the rows, whatever was done to either; the reference asks the rows in SQL."""

import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.observe import event_sums, sums_file
from megascale_jax.observe.event_compaction import compact
from megascale_jax.observe.event_paths import DETAIL
from megascale_jax.observe.event_store import read_events
from megascale_jax.observe.event_sums import STEPS_SUMS, SumsReader
from megascale_jax.observe.events import Events
from megascale_jax.observe.step_sums import COLUMNS, FIELDS, NONE, PASSES, STEP_NAMES, STEP_SPAN, joined
from megascale_jax.observe.sums_file import read_frames
from megascale_jax.views.step_times import read_step_times
from tests.views.made_run import made_run

LIMIT_S = 60
STEPS = st.lists(st.integers(0, 5), max_size=4)


def by_sql(run):
    """The sums as SQL gives them, by process, step and device."""
    once = {*STEP_NAMES, STEP_SPAN}
    terms = [
        f"coalesce({'max' if name in once else 'sum'}(duration_ns) filter (name = '{name}' and lane = '{lane}'), {NONE})::bigint as c{at}"
        for at, (name, lane) in enumerate(COLUMNS)
    ]
    passes = ", ".join(f"'{name}'" for name in (*PASSES, "idle"))
    pairs = ", ".join(f"('{name}', '{lane}')" for name, lane in COLUMNS)
    query = (
        f"select process::varchar as process, step, device, min(unix_ns) as began, "
        f"count(*) filter (lane = 'compute' and name in ({passes})) as computes, "
        f"count(*) filter (lane = 'compute' and name = '{STEP_SPAN}') as spans, {', '.join(terms)} "
        f"from events where step >= 0 and device >= 0 and (name, lane) in ({pairs}) group by all"
    )
    with read_events(run) as store:
        return {(row["process"], row["step"], row["device"]): [*row.values()][3:] for row in store.sql(query).to_pylist()}


def by_reader(run, *, reader=None, steps=(None, None)):
    read = (reader or SumsReader(run)).read(*steps)
    found = {}
    for process, column in zip(read.process, read.sums.T.tolist(), strict=True):
        key = (read.processes[process], *column[:2])
        assert key not in found
        found[key] = column[2:]
    return found


def assert_same(one, other):
    assert (one.mesh, one.hosts, one.ranks, one.notes) == (other.mesh, other.hosts, other.ranks, other.notes)
    pairs = [(one.steps, other.steps), (one.whole, other.whole), (one.idle, other.idle)]
    for ours, theirs in ((one.computed, other.computed), (one.waits, other.waits)):
        assert list(ours) == list(theirs)
        pairs += [(ours[name], theirs[name]) for name in ours]
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours, theirs)
    assert (one.processes is None) == (other.processes is None)
    assert one.processes is None or (one.processes == other.processes).all()


def sums_path(run):
    return run / "events" / STEPS_SUMS


def rows_read(monkeypatch):
    """Names of the files whose rows are read from now on."""
    found, real = [], event_sums._of_parquet
    monkeypatch.setattr(event_sums, "_of_parquet", lambda path: found.append(path.name) or real(path))
    return found


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A run of two processes, the second of which did steps again; all of it is Parquet, with sums."""
    run = tmp_path_factory.mktemp("stored")
    made_run(run, steps=range(1, 10), scale=lambda of, p, d, t, s: 1 + 0.1 * p + 0.01 * s)
    made_run(run, steps=range(7, 12), attempt=1)
    compact(run)
    return run


@pytest.fixture
def run(stored, tmp_path):
    return shutil.copytree(stored, tmp_path / "run")


def test_sums_are_those_of_the_rows_in_files_and_out_of_them(tmp_path, monkeypatch):
    made_run(tmp_path, steps=range(1, 10))
    made_run(tmp_path, steps=range(7, 12), attempt=1, lost={(8, 3)})
    growing, expected = read_step_times(tmp_path), by_sql(tmp_path)
    assert by_reader(tmp_path) == expected and len(expected) == 8 * 14 - 1
    compact(tmp_path)
    read = rows_read(monkeypatch)
    assert by_reader(tmp_path) == expected and read == []
    assert_same(read_step_times(tmp_path), growing)
    sums_path(tmp_path).unlink()
    assert by_reader(tmp_path) == expected and len(read) == 2
    assert_same(read_step_times(tmp_path), growing)


@pytest.mark.parametrize("steps", [(None, None), (3, 8), (9, None), (None, 2), (40, 50)])
def test_a_window_of_sums(stored, steps):
    first, end = -1 if steps[0] is None else steps[0], 99 if steps[1] is None else steps[1]
    assert by_reader(stored, steps=steps) == {key: row for key, row in by_sql(stored).items() if first <= key[1] < end}


def test_another_mesh(run, monkeypatch):
    made_run(run, mesh=(2, 1, 2), steps=range(10, 14), attempt=2)
    from_rows = [read_step_times(run, steps) for steps in ((None, None), (None, 10))]
    compact(run)
    read = rows_read(monkeypatch)
    for steps, expected in zip(((None, None), (None, 10)), from_rows, strict=True):
        assert_same(read_step_times(run, steps), expected)
    assert read == []


@given(st.lists(st.tuples(STEPS, st.booleans()), min_size=1, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=12, deadline=None)
def test_any_order_of_writing_compacting_losing_and_damaging(tmp_path_factory, stages, random):
    """Processes write some sums of some steps, in several flushes; compactions, lost and damaged files of sums come between."""
    run = tmp_path_factory.mktemp("run")
    (run / "events").mkdir()
    for number, (steps, compacts) in enumerate(stages):
        out = Events(run / "events", rank=number)
        out.describe(mesh=(1, 1, 2), devices=[0, 1])
        for step in steps:
            for name, lane in random.sample(COLUMNS, 6):
                times = {"begin_ns": random.randrange(10**9), "duration_ns": random.randrange(-5, 10**12)}
                out.many(name=name, lane=lane, device=np.array([0, 1, 1]), step=step, **times)
            if random.random() < 0.3:
                assert out.flush(LIMIT_S)
        out.close()
        if compacts:
            compact(run)
        path = run / "events" / STEPS_SUMS
        if path.exists() and random.random() < 0.7:
            content = bytearray(path.read_bytes())
            match random.randrange(3):
                case 0:
                    path.unlink()
                case 1:
                    path.write_bytes(content[: random.randrange(len(content) + 1)])
                case _:
                    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
                    path.write_bytes(content)
        assert by_reader(run) == by_sql(run)
    compact(run)
    expected = by_sql(run)
    assert by_reader(run) == expected and len(read_frames(run / "events" / STEPS_SUMS)[0]) == len([*(run / "events").glob(f"*{DETAIL}")])


@pytest.mark.parametrize("damage", ["cut", "changed sums", "changed head", "other format", "garbage behind"])
def test_damaged_sums_are_not_used_and_made_again(run, monkeypatch, damage):
    path, expected = sums_path(run), by_sql(run)
    content, first = bytearray(path.read_bytes()), read_frames(path)[0][0]
    match damage:
        case "cut":
            content = content[:-1]
        case "changed sums":
            content[first.begin + first.num_bytes // 2] ^= 1
        case "changed head":
            content[first.begin - 5] ^= 1
        case "other format":
            content[content.index(b'"format": ') + 10 : content.index(b'"format": ') + 11] = b"9"
        case _:
            content += b"SUMS"
    path.write_bytes(content)
    read = rows_read(monkeypatch)
    assert by_reader(run) == expected
    lost = {"cut": 1, "changed sums": 1, "garbage behind": 0}.get(damage, 2)
    assert len(read) == lost
    compact(run)
    read.clear()
    assert by_reader(run) == expected and read == [] and len(read_frames(path)[0]) == 2 and path.stat().st_size == read_frames(path)[1]


def test_sums_of_a_file_that_changed_are_not_used(run, monkeypatch):
    """Such as one of the same name from another disk."""
    detail = sorted((run / "events").glob(f"*{DETAIL}"))[0]
    with detail.open("ab") as file:
        file.write(b" ")
    read = rows_read(monkeypatch)
    times = read_step_times(run)
    assert read == [detail.name] and len(times.notes) >= 1 and "no events can be read" in times.notes[0]


def test_sums_go_with_their_rows(run):
    details = sorted((run / "events").glob(f"*{DETAIL}"))
    done = compact(run, keep_mb=(sum(path.stat().st_size for path in (run / "events").iterdir()) - 10) / 1e6)
    assert done.deleted == details[:1]
    assert by_reader(run) == by_sql(run) != {}
    assert [one.frame.source for one in read_frames(sums_path(run))[0]] == [details[1].name]
    compact(run, keep_days=1e-9)
    assert by_reader(run) == {} and not sums_path(run).exists()


def test_a_few_dead_frames_are_left_until_it_pays(run, monkeypatch):
    monkeypatch.setattr(sums_file, "MOST_DEAD", 0.9)
    sorted((run / "events").glob(f"*{DETAIL}"))[0].unlink()
    compact(run)
    assert len(read_frames(sums_path(run))[0]) == 2 and by_reader(run) == by_sql(run)
    monkeypatch.setattr(sums_file, "MOST_DEAD", 0.1)
    compact(run)
    assert len(read_frames(sums_path(run))[0]) == 1 and by_reader(run) == by_sql(run)


@pytest.mark.parametrize("kill_at", range(8))
def test_killed_at_any_moment(tmp_path, stored, kill_at):
    """Before a file is opened, gets its name, or goes."""
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    made_run(tmp_path, steps=range(10, 12), attempt=2)
    sums_path(tmp_path).write_bytes(sums_path(tmp_path).read_bytes()[:-1])
    expected = by_sql(tmp_path)
    code = (
        "import os, sys, pathlib\n"
        "from megascale_jax.observe.event_compaction import compact\n"
        f"left = [{kill_at}]\n"
        "def dying(function):\n"
        "    def wrapped(*given, **options):\n"
        "        if left[0] == 0: os.kill(os.getpid(), 9)\n"
        "        left[0] -= 1\n"
        "        return function(*given, **options)\n"
        "    return wrapped\n"
        "os.fdopen, pathlib.Path.rename, pathlib.Path.unlink = map(dying, (os.fdopen, pathlib.Path.rename, pathlib.Path.unlink))\n"
        "compact(pathlib.Path(sys.argv[1]))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=LIMIT_S, check=False)
    assert ended.returncode == (-signal.SIGKILL if kill_at < 7 else 0)
    assert by_reader(tmp_path) == expected
    compact(tmp_path)
    assert by_reader(tmp_path) == expected and len(read_frames(sums_path(tmp_path))[0]) == 3


def test_a_reader_reads_again_only_what_grew(run, monkeypatch):
    out = Events(run / "events", rank=1, attempt=2)
    out.describe(mesh=(2, 2, 2), devices=[0])
    reader, read, real = SumsReader(run), [], event_sums._of_segment
    monkeypatch.setattr(event_sums, "_of_segment", lambda path: read.append(path.name) or real(path))
    for step in (20, 20, 21):
        out.record(STEP_SPAN, step, 7, lane="compute", device=0, step=step)
        assert out.flush(LIMIT_S)
        assert by_reader(run, reader=reader) == by_sql(run) == by_reader(run, reader=reader)
    assert len(read) == 3
    out.close()
    compact(run)
    assert by_reader(run, reader=reader) == by_sql(run) and len(read) == 3


def test_the_file_is_replaced_while_it_is_read(run):
    expected, frames = by_sql(run), read_frames(sums_path(run))[0]
    os.truncate(shutil.copy(sums_path(run), run / "other"), 10)
    (run / "other").rename(sums_path(run))
    assert sum(one.sums().shape[1] for one in frames) == len(expected)


@given(st.integers(0, 40), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_sums_of_parts_are_joined(rows, parts, random):
    """Columns of the same process, step and device become one, absent sums stay absent."""
    sums = np.array([[random.randrange(3), random.randrange(2)] for _ in range(rows)], np.int64).reshape(rows, 2).T
    values = [[random.choice([NONE, random.randrange(1 << 40)]) for _ in range(rows)] for _ in COLUMNS]
    counts = [[random.randrange(5) for _ in range(rows)] for _ in range(3)]
    table = np.concatenate([sums, np.array([*counts, *values], np.int64).reshape(3 + len(COLUMNS), rows)])
    process = np.array([random.randrange(parts) for _ in range(rows)], np.int64)
    found, of = joined(table, process)
    keys = {(p, *column[:2]) for p, column in zip(process.tolist(), table.T.tolist(), strict=True)}
    assert sorted(keys) == sorted((p, *column[:2]) for p, column in zip(of.tolist(), found.T.tolist(), strict=True))
    for p, column in zip(of.tolist(), found.T.tolist(), strict=True):
        same = [one for one, q in zip(table.T.tolist(), process.tolist(), strict=True) if (q, *one[:2]) == (p, *column[:2])]
        assert column[2:5] == [min(one[2] for one in same), *(sum(one[row] for one in same) for row in (3, 4))]
        for row, (name, _) in zip(range(len(FIELDS) - len(COLUMNS), len(FIELDS)), COLUMNS, strict=True):
            known = [one[row] for one in same if one[row] != NONE]
            combine = max if name in {*STEP_NAMES, STEP_SPAN} else sum
            assert column[row] == (combine(known) if known else NONE)

"""Why a run stands still, from written event files: who is named, and when it cannot be told."""

import json
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from megascale_jax.cli.main import app
from megascale_jax.cli.why import print_judgement
from megascale_jax.errors import RunFolderError
from megascale_jax.observe.event_segments import FACTS, SCHEMA, Facts
from megascale_jax.observe.events import ANCHOR, EVENTS_FOLDER, PULSE_S
from megascale_jax.observe.marks import SECTIONS
from megascale_jax.observe.pulse import Passed
from megascale_jax.views.cube import MOST_LINES, WIDTH, cube
from megascale_jax.views.progress import SKEW_S, DevicePosition, Progress, RankProgress, read_progress
from megascale_jax.views.why import SILENT_S, first_behind, judge
from tests.views.fake_ranks import STAMPS, ranks_of

MESH = (2, 2, 2)
STEPS = 20
LONG_S = 200.0
"""Longer than any limit of a section that ends."""


def judged(run):
    return judge(read_progress(run))


@pytest.fixture
def hung(tmp_path):
    """Eight ranks that trained; where each stands since then is up to the test: ``stand(ranks, {rank: (section, step, device)})``."""

    def stand(ranks, places, others=("step", STEPS + 2, None), until=LONG_S, silent=()):
        for rank in ranks.events:
            ended = ranks.train(rank, STEPS)
            if rank not in silent:
                ranks.stand(rank, ended, until, *places.get(rank, others))
        ranks.flush()

    return tmp_path / "run", stand


def test_a_rank_whose_rows_do_not_come_is_named(hung):
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {5: ("data", STEPS + 1, None)})
        found = judged(run)
    assert (found.verdict, found.named, found.suspects) == ("hang", (5,), ())
    assert "rank 5" in found.reason and "in data of step 21" in found.reason and "pipe 1 data 0 tensor 1" in found.reason
    assert {one.state for one in found.ranks if one.rank != 5} == {"waiting"}
    (named,) = (one for one in found.ranks if one.rank == 5)
    assert named.state == "stuck" and named.since_s == pytest.approx(LONG_S - STEPS, abs=PULSE_S) and named.coordinates == ((1, 0, 1),)


def test_two_ranks_whose_rows_do_not_come_are_both_named(hung):
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {2: ("data", STEPS + 1, None), 5: ("data", STEPS + 1, None)})
        assert judged(run).named == (2, 5)


def test_a_rank_in_its_checkpoint_is_named_and_two_of_them_are_suspects(hung):
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {3: ("checkpoint", STEPS, None)})
        found = judged(run)
        assert (found.verdict, found.named) == ("hang", (3,)) and "in checkpoint of step 20" in found.reason
    with ranks_of(run, MESH, attempt=1) as ranks:
        stand(ranks, {3: ("checkpoint", STEPS, None), 4: ("checkpoint", STEPS, None)})
        found = judged(run)
    assert (found.verdict, found.named, found.suspects, found.attempt) == ("hang", (), (3, 4), 1), "each may wait for the other"
    assert "it cannot be told" in found.reason


@pytest.mark.parametrize("place", [("step", STEPS + 2, None), ("data", STEPS + 1, None)])
def test_all_equally_far_cannot_be_told(hung, place):
    """Not even if each is in something of its own: then it is what they share."""
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {}, others=place)
        found = judged(run)
    assert (found.verdict, found.named, found.suspects) == ("hang", (), tuple(range(8))) and "all ranks are equally far" in found.reason


def test_a_rank_in_its_step_is_behind_those_that_save_after_it(hung):
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {3: ("step", STEPS, None)}, others=("checkpoint", STEPS, None))
        assert judged(run).named == (3,)


def test_silence_while_it_compiles_says_nothing(hung):
    run, _ = hung
    with ranks_of(run, MESH) as ranks:
        for rank in ranks.events:
            ranks.stand(rank, 1.0, 20.0 if rank == 4 else LONG_S, "compile", 1)
        ranks.flush()
        found = judged(run)
    assert found.verdict == "running" and {one.state for one in found.ranks} == {"running"}


WAITS, COMPUTES = (STEPS + 1, 3, 17, "F0.gather", "tensor"), (STEPS + 1, 3, 16, "F0.in", "compute")


def test_inside_a_step_the_device_with_the_fewest_stamps_is_named(hung):
    run, stand = hung
    host = ("step", STEPS + 2)
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {6: (*host, COMPUTES), 7: (*host, WAITS)}, others=(*host, (STEPS + 1, 5, 30, "P.send_y", "pipe")))
        found = judged(run)
    assert found.named == (6,) and "computing F0.in in tick 3 of step 21, stamp 16 of 40" in found.reason
    (other,) = (one for one in found.ranks if one.rank == 7)
    assert other.operation == "waiting over tensor for F0.gather in tick 3 of step 21, stamp 17 of 40"


def test_devices_that_wait_alike_for_a_collective_are_suspects_those_that_compute_are_named(hung):
    run, stand = hung
    host, rest = ("step", STEPS + 2), ("step", STEPS + 2, (STEPS + 1, 5, 30, "P.send_y", "pipe"))
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {6: (*host, WAITS), 7: (*host, WAITS)}, others=rest)
        found = judged(run)
        assert (found.named, found.suspects) == ((), (6, 7))
    with ranks_of(run, MESH, attempt=1) as ranks:
        stand(ranks, {6: (*host, COMPUTES), 7: (*host, COMPUTES)}, others=rest)
        assert judged(run).named == (6, 7)


def test_a_device_that_has_nothing_to_do_is_behind_for_its_host(hung):
    """The stall is the host's: its device has done all it was given."""
    run, stand = hung
    done, first = (STEPS, -1, STAMPS, "", ""), (STEPS + 1, -1, 1, "gather first chunk", "data")
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {1: ("data", STEPS + 1, done)}, others=("step", STEPS + 2, first))
        found = judged(run)
    assert found.named == (1,) and "in data of step 21" in found.reason


def test_a_rank_that_died_is_named_silent(hung):
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {}, silent=(4,))
        ranks.end(4)
        found = judged(run)
    assert (found.verdict, found.named) == ("hang", (4,)) and "is silent, last seen after step of step 20" in found.reason
    assert [one.state for one in found.ranks if one.rank == 4] == ["silent"]


def test_a_frozen_rank_is_named_silent_though_its_process_is_there(hung):
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {}, silent=(4,))
        assert judged(run).named == (4,)


def test_a_rank_that_died_waiting_for_another_is_not_named(hung):
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {5: ("data", STEPS + 1, None)}, silent=(4,))
        ranks.stand(4, STEPS, STEPS + 30, "step", STEPS + 2)
        ranks.end(4)
        found = judged(run)
    assert found.named == (5,) and {one.rank: one.state for one in found.ranks}[4] == "silent"


def test_a_rank_without_a_file_is_named_if_nothing_else_is_behind(hung):
    run, stand = hung
    with ranks_of(run, MESH, absent=(3,)) as ranks:
        stand(ranks, {})
        found = judged(run)
    assert found.named == (3,) and "left no events" in found.reason
    (missing,) = (one for one in found.ranks if one.rank == 3)
    assert (missing.state, missing.coordinates, missing.last_seen) == ("silent", ((0, 1, 1),), None)
    with ranks_of(run, MESH, absent=(3,), attempt=1) as ranks:
        stand(ranks, {6: ("data", STEPS + 1, None)})
        found = judged(run)
    assert found.named == (6,) and "of rank 3" in found.reason, "its own rows are its own business"
    with ranks_of(run, MESH, absent=(3,), attempt=2) as ranks:
        stand(ranks, {6: ("checkpoint", STEPS, None)})
        found = judged(run)
    assert (found.named, found.suspects) == ((), (3, 6)), "it may wait for the one of which nothing is known"


@pytest.mark.parametrize("share", [0.0, 0.4, 0.9])
def test_a_cut_file_makes_its_rank_a_suspect_never_the_culprit(hung, share):
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {})
        for rank in ranks.events:
            ranks.end(rank)
    (path,) = (run / EVENTS_FOLDER).glob("trainer-00002-*")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    found = judged(run)
    assert found.verdict == "hang" and found.named in ((), (2,)) and 2 in (*found.named, *found.suspects)
    assert (found.named == (2,)) == (share == 0.0), "an empty file is as good as none"


def test_a_run_that_goes_on_is_not_judged(hung):
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {5: ("data", STEPS + 1, None)}, until=STEPS + PULSE_S)
        found = judged(run)
    assert (found.verdict, found.named, found.suspects) == ("running", (), ())
    assert {one.state for one in found.ranks} == {"running"}


def test_what_takes_longer_than_ever_but_not_too_long_is_slow(hung):
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {5: ("data", STEPS + 1, None)}, until=STEPS + 60.0)
        found = judged(run)
    assert (found.verdict, found.named) == ("slow", (5,)), "rows may take two minutes"


def test_a_run_that_has_finished_has_ended_and_one_that_was_killed_says_who_went_first(hung):
    run, _ = hung
    with ranks_of(run, MESH) as ranks:
        for rank, events in ranks.events.items():
            ended = ranks.train(rank, STEPS)
            events.record("end", ranks.at(ended), 10**9)
            ranks.end(rank)
        found = judged(run)
    assert (found.verdict, found.named) == ("ended", ()) and {one.state for one in found.ranks} == {"ended"}
    with ranks_of(run, MESH, attempt=1) as ranks:
        for rank in ranks.events:
            ranks.train(rank, STEPS - (rank == 6))
            ranks.end(rank)
        found = judged(run)
    assert found.verdict == "ended" and "rank 6" in found.reason


def test_a_hang_is_seen_after_the_job_was_killed(hung):
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {5: ("data", STEPS + 1, None)})
        for rank in ranks.events:
            ranks.end(rank)
    found = judged(run)
    assert (found.verdict, found.named) == ("hang", (5,))


def test_processes_of_a_start_before_do_not_count(hung):
    """Without a driver every start is attempt 0."""
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        ranks.begin_ns -= 10**12
        stand(ranks, {}, until=STEPS + 1)
        ranks.end(0)
    with ranks_of(run, MESH, absent=(0,)) as ranks:
        stand(ranks, {})
        found = judged(run)
    assert found.named == (0,) and found.ranks[0].last_seen is None


def test_a_folder_without_events_is_said(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        done = CliRunner().invoke(app, ["why", str(path)])
        assert isinstance(done.exception, RunFolderError) and "events" in str(done.exception)
    (tmp_path / EVENTS_FOLDER).mkdir()
    (tmp_path / EVENTS_FOLDER / "trainer-00000-1-1.00000.arrows").write_bytes(b"\0" * 100)
    with pytest.raises(RunFolderError, match="can be read"):
        read_progress(tmp_path)


def test_the_command_prints_a_verdict_and_json(hung):
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {5: ("data", STEPS + 1, None)})
        done, as_json = (CliRunner().invoke(app, ["why", str(run), *more]) for more in ([], ["--json"]))
    assert done.exit_code == as_json.exit_code == 1
    lines = done.output.splitlines()
    assert lines[0].startswith("Verdict: hang (attempt 0") and "pipe 1        wX ww" in lines and len(lines) < 40
    found = json.loads(as_json.output)
    assert (found["verdict"], found["named"], found["mesh"]) == ("hang", [5], [2, 2, 2])
    assert set(found["ranks"][5]) >= {"rank", "host", "coordinates", "state", "step", "section", "operation", "since_s", "last_seen"}


def test_words_from_anywhere_are_text(hung):
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        ranks.events[0].describe(host="[red]evil[/]\x1b[31m")
        stand(ranks, {0: ("data", STEPS + 1, None)})
        ranks.pulse(0, LONG_S, "no section\x1b", 5, 0.0)
        output = CliRunner().invoke(app, ["why", str(run)]).output
    assert "\x1b" not in output and "[red]evil[/]" in output


def progress_of(places, mesh=None):
    """Ranks ``(section, step, is_past, device stamps or None, is silent)`` as they are judged."""
    ranks = []
    for rank, (section, step, is_past, stamps, _) in enumerate(places):
        passed = Passed(stamps=stamps, of=8, name="F0.in", lane="compute" if stamps % 2 else "pipe") if stamps is not None else None
        devices = () if passed is None else (DevicePosition(rank, step, 0, passed),)
        completed = step if section in ("evaluate", "checkpoint", "end") else max(step - 1, 0)
        ranks.append(RankProgress(rank, "h", (), section, step, 1, is_past, completed, devices, 1, 10**12))
    return Progress(0, mesh, tuple(ranks), 10**12)


PLACES = st.tuples(st.sampled_from(SECTIONS), st.integers(0, 3), st.booleans(), st.none() | st.integers(0, 8), st.booleans())


@settings(deadline=None, max_examples=300)
@given(st.lists(PLACES, min_size=1, max_size=8))
@example([("step", 1, False, None, False), ("data", 1, False, None, True), ("data", 1, False, None, False)])
def test_nobody_is_named_who_is_ahead_of_another(places):
    progress = progress_of(places)
    alive = [one for one, place in zip(progress.ranks, places, strict=True) if not place[-1]]
    silent = [one for one in progress.ranks if one not in alive]
    if not alive:
        return
    behind = first_behind(alive, silent)
    assert bool(behind.named) != bool(behind.suspects), "somebody, or a doubt"
    by_device = all(one.device_order is not None for one in alive)
    for named in behind.named:
        for other in (one for one in alive if one not in behind.named):
            if by_device and named.device_order is not None:
                assert (named.device_order, named.host_order) <= (other.device_order, other.host_order)
            elif not by_device or named in silent:
                assert named.host_order <= other.host_order
    found = judge(progress)
    assert set(found.named).isdisjoint(found.suspects)


@pytest.mark.parametrize("mesh", [(2, 2, 2), (12, 128, 8), (64, 1, 1), (1, 1, 9), None])
def test_the_cube_fits_a_terminal_and_shows_the_worst(mesh):
    count = 24 if mesh is None else mesh[0] * mesh[1] * mesh[2]
    ranks = []
    for rank in range(count):
        places = () if mesh is None else ((rank // (mesh[1] * mesh[2]), rank // mesh[2] % mesh[1], rank % mesh[2]),)
        section = "data" if rank == count - 1 else "step"
        one = RankProgress(rank, f"host-{rank}", places, section, 3, 1, False, 2, (), 1, 10**12)
        ranks.append(replace(one, longest_s={"step": 1.0, "data": 1.0}, passes={"step": 5}))
    found = judge(Progress(0, mesh, tuple(ranks), 10**12))
    assert found.named == (count - 1,)
    lines = cube(found).plain.splitlines()
    assert len(lines) <= MOST_LINES + 2 and max(map(len, lines)) <= WIDTH + 20
    assert sum(line.count("X") for line in lines[1:-1]) == 1 and lines[-2].endswith("X")
    console = Console(width=120, record=True, file=None, quiet=True)
    print_judgement(found, console)
    assert len(console.export_text().splitlines()) <= 40


def test_a_run_whose_files_have_not_changed_for_long_is_not_said_to_run(hung):
    """Its processes died on hosts whose locks are not seen here."""
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        stand(ranks, {}, until=STEPS + PULSE_S)
        progress = read_progress(run)
    fresh, old = (judge(progress, now=progress.until_ns / 1e9 + later) for later in (SILENT_S, 3600.0))
    assert (fresh.verdict, fresh.age_s) == ("running", pytest.approx(SILENT_S, abs=0.01))
    assert old.verdict == "unknown" and old.reason.startswith("all ranks are silent since") and old.age_s == pytest.approx(3600.0, abs=0.01)
    assert {one.state for one in old.ranks} == {"silent"}
    written = replace(progress, changed_ns=progress.until_ns + int(3600e9))
    assert judge(written, now=written.changed_ns / 1e9).verdict == "running", "the clock here is ahead, its files are written"


def test_a_run_that_compiles_everywhere_may_be_silent_for_long(hung):
    run, _ = hung
    with ranks_of(run, MESH) as ranks:
        for rank in ranks.events:
            ranks.stand(rank, 1.0, 5.0, "compile", 1)
        ranks.flush()
        progress = read_progress(run)
    assert judge(progress, now=progress.until_ns / 1e9 + 100.0).verdict == "running"


@pytest.mark.parametrize("ahead_s", [-45.0, 25.0, 100.0])
@pytest.mark.parametrize("early", [False, True])
def test_a_clock_that_is_wrong_makes_nobody_silent(hung, ahead_s, early):
    """Ranks 0 to 3 and 4 to 7 are hosts of their own; where no step was ended, when they met tells."""
    run, stand = hung
    with ranks_of(run, MESH) as ranks:
        for rank, events in ranks.events.items():
            events.describe(boot_id=f"host {rank // 4}", host=f"host {rank // 4}")
            if early:
                ranks.stand(rank, 1.0, LONG_S, *(("data", 1) if rank == 5 else ("restore", 1)))
        if not early:
            stand(ranks, {5: ("data", STEPS + 1, None)})
        ranks.flush()
        for path in (run / EVENTS_FOLDER).glob("trainer-*"):
            if int(path.name.split("-")[1]) >= 4:
                set_ahead(path, int(ahead_s * 1e9))
        found = judged(run)
    assert {one.state for one in found.ranks} == ({"running"} if early else {"waiting", "stuck"}), "none is silent"
    assert found.named == (() if early else (5,))


@pytest.mark.parametrize(("behind_s", "counts"), [(25.0, True), (SKEW_S + 60.0, False)])
def test_a_rank_that_has_just_begun_by_a_slow_clock_counts(hung, behind_s, counts):
    """But not one of a start before."""
    run, _ = hung
    with ranks_of(run, MESH) as ranks:
        for rank, events in ranks.events.items():
            events.describe(boot_id=f"host {rank}", host=f"host {rank}")
            ranks.stand(rank, 0.0, 5.0, "data", 1)
        ranks.flush()
        (path,) = (run / EVENTS_FOLDER).glob("trainer-00003-*")
        set_ahead(path, -int(behind_s * 1e9))
        found = judged(run)
    assert {one.rank for one in found.ranks if one.last_seen is None} == (set() if counts else {3})


def set_ahead(path, ahead_ns):
    """A file as of a host whose wall clock is ahead."""
    with pa.OSFile(str(path)) as source:
        reader = pa.ipc.open_stream(source)
        facts, batches = Facts.model_validate_json(reader.schema.metadata[FACTS]), []
        with suppress(pa.ArrowInvalid, StopIteration):
            while True:
                batches.append(reader.read_next_batch())
    anchors = tuple((begin_ns, unix_ns + ahead_ns) for begin_ns, unix_ns in facts.anchors)
    schema = SCHEMA.with_metadata({FACTS: facts.model_copy(update={"anchors": anchors}).model_dump_json().encode()})
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema, options=options) as stream:
        for batch in batches:
            pairs = zip(batch.column("name").to_pylist(), batch.column("text").to_pylist(), strict=True)
            texts = pa.array([str(int(text) + ahead_ns) if name == ANCHOR else text for name, text in pairs], pa.string())
            number = schema.get_field_index("text")
            stream.write_batch(pa.record_batch([*batch.columns[:number], texts], schema=schema))
    path.write_bytes(path.read_bytes()[:-8])  # without the end: its process is there


def test_silence_is_longer_than_a_few_pulses():
    assert SILENT_S >= 3 * PULSE_S

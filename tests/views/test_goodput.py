"""Where the time of a job went, from written event files; every answer is computed by hand."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from megascale_jax.cli.goodput import FORMULA
from megascale_jax.cli.main import app
from megascale_jax.cluster.state import Anomaly, Suspicion
from megascale_jax.errors import RunFolderError, UsageError
from megascale_jax.observe.booked import KINDS
from megascale_jax.observe.event_store import read_events
from megascale_jax.observe.events import EVENTS_FOLDER
from megascale_jax.observe.step_sums import STEP_SPAN
from megascale_jax.views.booking import HANG, NOTHING, UNSEEN
from megascale_jax.views.goodput import lost_passes, read_goodput
from megascale_jax.views.passes import chosen_ranks, read_passes
from megascale_jax.views.step_seconds import step_seconds
from tests.views.fake_job import EPOCH_NS, STEP_S, Job, ns

BEGUN_S = 10.0
"""From the begin of a process to its first wait for rows."""


def seconds(found):
    """Booked seconds by class, without those of none; the sum is checked."""
    assert sum(found.booked_ns.values()) == found.wall_ns == sum(one.end_ns - one.begin_ns for one in found.timeline.segments())
    return {kind: lasted / 1e9 for kind, lasted in found.booked_ns.items() if lasted}


def whole_run(told):
    """Five steps, an evaluation, a save within the fifth step's pass, the end: 22.25 s."""
    at = told.begin(0.0)
    at = told.steps(at, 1, 4)  # 10.0 to 18.25
    data = told.span("data", at, at + 0.25, 5)
    told.span("checkpoint", data + 1.0, data + 1.5, 5)
    at = told.span("step", data, data + 2.0, 5)
    at = told.span("evaluate", at, at + 1.0)
    return told.span("end", at, at + 0.5)


def test_every_pass_of_a_run_is_booked_as_by_hand(job):
    with job() as told:
        end = whole_run(told)
    found = read_goodput(job.run)
    assert seconds(found) == {
        "training": 3 * 0.75 + 1.5,
        "data wait": 5 * 0.25,
        "checkpoint": 0.5 + 0.5,
        "evaluation": 1.0,
        "compile": 5.0,
        "restart": BEGUN_S,
    }
    assert found.wall_ns == ns(end) and found.timeline.edges_ns[0] == EPOCH_NS
    assert found.effective == pytest.approx(3.75 / end) and (found.steps, found.recomputed_steps) == (5, 0)
    assert found.incidents == () and found.idle_ns == {} and found.is_over
    assert not found.trend.is_alarm and "too few" in found.trend.notes[0]


def test_the_job_waits_for_the_rank_whose_rows_are_late(job):
    for rank in range(3):
        with job(rank=rank) as told:
            at = told.begin(0.0)
            at = told.steps(at, 1, 2)  # to 16.25
            wait = 3.0 if rank == 1 else 0.25
            at = told.span("data", at, at + wait, 3)
            told.span("step", at, 20.0, 3)
    found = read_goodput(job.run)
    assert seconds(found)["data wait"] == 2 * 0.25 + 3.0
    assert seconds(found)["training"] == 0.75 + (20.0 - 19.25 + 0.25) - 0.25
    assert found.ranks == (0, 1, 2)


def test_a_wait_for_rows_costs_what_the_devices_wait_too(job):
    with job() as told:
        at = told.begin(0.0)
        told.steps(at, 1, 4, data=0.5, step=0.5)  # the waits of steps 2 to 4 begin at 15.5, 16.5, 17.5
        for step, end in ((1, 15.75), (2, 16.25), (3, 18.25)):  # 0.25 s, all and nothing of them is left
            for device, early in ((0, 0.0), (1, 0.125)):
                told.span(STEP_SPAN, end - 1.0, end - early, step, lane="compute", device=device)
    found = read_goodput(job.run)
    assert seconds(found)["data wait"] == 0.5 + 0.25 + 0.5 + 0.0
    assert seconds(found)["training"] == 3 * 0.5 + 0.25 + 0.0 + 0.5
    assert found.notes == ()


def killed_and_resumed(job, driver=True):
    """Two ranks do 12 steps and are killed in the 13th; another attempt goes on after step 8."""
    for rank in range(2):
        with job(rank=rank) as told:
            at = told.steps(told.begin(1.0), 1, 12)  # 11.0 to 27.25
            at = told.span("data", at, at + 0.25, 13)
            told.pulse(28.0, "step", at, 13)  # 0.5 s are known of it
    for rank in range(2):
        with job(rank=rank, attempt=1) as told:
            at = told.begin(40.0, resume=8)
            told.steps(at, 9, 14)  # 50.0 to 60.25
    if driver:
        with job(role="driver") as told:
            last = 0.0
            for phase, end in (
                ("replacing", 1.5), ("restoring", 16.5), ("running", 31.0), ("suspended", 33.0), ("diagnosing", 38.0),
                ("replacing", 39.0), ("restoring", 55.5), ("running", 62.0),
            ):  # fmt: skip
                last = told.span(phase, last, end, lane="driver")
            one = Suspicion(rule="process_exited", node="node-1", rank=1, detail="killed by SIGKILL")
            cause = Anomaly(at_s=30.0, attempt=0, step=12, suspicions=(one,)).model_dump_json()
            told.instant("anomaly", 31.0, 12, lane="driver", text=cause)


def test_a_driven_run_that_is_killed_loses_what_it_did_in_vain(job):
    killed_and_resumed(job)
    found = read_goodput(job.run)
    assert seconds(found) == {
        "training": 7 * 0.75 + 5 * 0.75,  # steps 2 to 8, then 10 to 14
        "recomputed": 4 * 0.75 + 0.5,  # 9 to 12, and what was done of 13
        "data wait": 13 * 0.25 + 6 * 0.25,
        "compile": 2 * 5.0,
        "restart": 1.0 + BEGUN_S + 2.0 + 1.0 + 1.0 + BEGUN_S,  # the driver's phases where no process tells anything
        "diagnosis": 5.0,
        "idle": 3.0 + 1.75,
    }
    assert found.idle_ns == {UNSEEN: ns(4.75)}
    assert (found.steps, found.recomputed_steps) == (14, 4)
    (incident,) = found.incidents
    assert (incident.begin_ns - EPOCH_NS, incident.end_ns - EPOCH_NS) == (ns(27.25), ns(55.25))
    assert (incident.step, incident.resumed_step, incident.recomputed_steps) == (12, 8, 4)
    assert incident.cause == "process_exited: node-1 (rank 1): killed by SIGKILL"
    assert {kind: cost / 1e9 for kind, cost in incident.lost_ns.items()} == {
        "recomputed": 3.5, "data wait": 0.5, "idle": 3.0, "restart": 4.0 + BEGUN_S, "diagnosis": 5.0, "compile": 5.0,
    }  # fmt: skip


def test_without_a_driver_nobody_knows_what_was_between(job):
    killed_and_resumed(job, driver=False)
    found = read_goodput(job.run)
    assert found.idle_ns == {NOTHING: ns(12.0)} and seconds(found)["recomputed"] == 3.5
    assert "diagnosis" not in seconds(found) and found.incidents[0].cause == ""
    assert found.wall_ns == ns(60.25 - 1.0)


def test_the_order_of_files_is_irrelevant(job):
    killed_and_resumed(job)
    before = read_goodput(job.run)
    for number, path in enumerate(sorted((job.run / EVENTS_FOLDER).glob("*.arrows"), reverse=True)):
        role, rank, _, _ = path.name.partition(".")[0].split("-")
        path.rename(path.with_name(f"{role}-{rank}-{number}-1.00000.arrows"))
    after = read_goodput(job.run)
    assert after.booked_ns == before.booked_ns and after.incidents == before.incidents
    assert np.array_equal(after.timeline.edges_ns, before.timeline.edges_ns)


def test_starts_of_one_attempt_are_told_apart(job):
    with job() as told:
        told.steps(told.begin(0.0), 1, 6)  # 10.0 to 20.25
    with job() as told:
        told.steps(told.begin(30.0, resume=4), 5, 6)
    with job() as told:
        told.steps(told.begin(60.0), 1, 2)  # from the start again
    found = read_goodput(job.run)
    assert (found.steps, found.recomputed_steps) == (2, 8)
    assert seconds(found)["training"] == 0.75 and seconds(found)["recomputed"] == 5 * 0.75 + 0.75
    assert [(one.step, one.resumed_step, one.recomputed_steps) for one in found.incidents] == [(6, 4, 6), (6, 0, 2)]


def test_a_process_that_came_to_no_step_says_from_where_it_would_have_gone_on(job):
    with job() as told:
        told.steps(told.begin(0.0), 1, 6)  # to 20.25
    with job(attempt=1) as told:
        told.begin(30.0, resume=4)
    found = read_goodput(job.run)
    assert (found.steps, found.recomputed_steps) == (4, 2)
    (incident,) = found.incidents
    assert not incident.is_over and incident.recomputed_steps == 2
    assert incident.lost_ns == {"recomputed": ns(2 * STEP_S), "restart": ns(BEGUN_S), "idle": ns(30.0 - 20.25)}


def test_a_hang_is_idle_beyond_a_steps_time(job):
    for rank in range(2):
        with job(rank=rank) as told:
            at = told.steps(told.begin(0.0), 1, 4)
            at = told.span("data", at, at + 0.25, 5)
            for second in range(5, 300, 5):
                told.pulse(at + second, "step", at, 5)
    found = read_goodput(job.run)
    assert seconds(found)["training"] == 4 * STEP_S, "of the fifth as long as the longest that ended"
    assert found.idle_ns == {HANG: ns(295 - STEP_S)} and not found.incidents[0].is_over
    assert found.incidents[0].lost_ns == {"data wait": ns(0.25), "idle": ns(295 - STEP_S)}


def test_a_hang_in_the_wait_for_rows_is_that(job):
    for rank, section in enumerate(("step", "data")):
        with job(rank=rank) as told:
            at = told.steps(told.begin(0.0), 1, 4)
            if section == "step":
                told.span("data", at, at + 0.25, 5)
            told.pulse(at + 200.25, section, at + 0.25 * (section == "step"), 5)
    found = read_goodput(job.run)
    assert seconds(found)["data wait"] == 4 * 0.25 + 200.25 and found.idle_ns == {}


def test_what_a_newer_process_of_the_rank_does_counts(job):
    with job() as told:
        at = told.steps(told.begin(0.0), 1, 4)
        told.pulse(at + 500.0, "checkpoint", at, 4)
    with job(attempt=1) as told:
        end = told.steps(told.begin(100.0, resume=4), 5, 8)
    found = read_goodput(job.run)
    assert seconds(found)["checkpoint"] == 100.0 - 18.25 and found.wall_ns == ns(end)


def test_hosts_whose_clocks_differ_are_aligned(job, monkeypatch, tmp_path_factory):
    other = Job(tmp_path_factory.mktemp("alone"), monkeypatch)
    with other() as told:
        whole_run(told)
    alone = seconds(read_goodput(other.run))
    for rank, ahead_s in enumerate((0.0, 0.0, 40.0)):
        with job(rank=rank, host=f"host-{rank}", ahead_s=ahead_s) as told:
            whole_run(told)
    found = read_goodput(job.run)
    assert seconds(found) == alone and found.wall_ns == ns(22.0)


def test_damaged_files_are_booked_with_notes(job):
    for rank in range(3):
        with job(rank=rank) as told:
            whole_run(told)
    paths = sorted((job.run / EVENTS_FOLDER).glob("*.arrows"))
    whole = seconds(read_goodput(job.run))
    paths[1].write_bytes(paths[1].read_bytes()[:-200])
    (job.run / EVENTS_FOLDER / "trainer-00007-1-1.00000.arrows").write_bytes(b"no events at all")
    found = read_goodput(job.run)
    assert seconds(found) == whole and any("no events can be read" in note for note in found.notes)
    assert any("cut" in note for note in found.notes)
    for path in paths:
        path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(RunFolderError, match="no events of a process's passes"):
        read_goodput(job.run)


def test_a_run_without_events_or_with_the_drivers_alone(job):
    with pytest.raises(RunFolderError, match="no folder events"):
        read_goodput(job.run)
    with job(role="driver") as told:
        told.span("replacing", 0.0, 5.0, lane="driver")
        told.span("restoring", 5.0, 9.0, lane="driver")
        told.span("running", 9.0, 10.0, lane="driver")
    found = read_goodput(job.run)
    assert seconds(found) == {"restart": 9.0, "idle": 1.0} and found.effective == 0.0 and found.steps == 0


def test_a_run_that_goes_on_is_booked_up_to_its_newest_event(job):
    with job() as told:
        at = told.steps(told.begin(0.0), 1, 4)
        told.pulse(at + 0.125, "data", at, 5)
        assert told.out.flush(30)
        found = read_goodput(job.run)
        assert found.wall_ns == ns(18.375) and not found.is_over and found.incidents == ()


def test_of_many_ranks_some_are_read_and_a_note_says_so(job):
    end = 0.0
    for rank in range(6):
        with job(rank=rank) as told:
            end = whole_run(told)
            if rank == 0:
                told.span("data", 11.0, 14.0, 1)
    with job(role="driver") as told:
        told.span("diagnosing", end, end + 3.0, lane="driver")
    found = read_goodput(job.run, [1, 5])
    assert found.ranks == (1, 5) and "2 of 6 ranks" in found.notes[0]
    assert seconds(found)["data wait"] == 5 * 0.25 and seconds(found)["diagnosis"] == 3.0, "rank 0's are left out, the driver's are not"
    with pytest.raises(UsageError, match=r"--ranks 6: .* there are those of 6 ranks"):
        read_goodput(job.run, [1, 6])
    assert chosen_ranks(range(12_288)) == [0, 1755, 3510, 5265, 7021, 8776, 10531, 12287]


def test_tokens_are_of_steps_that_count(job):
    killed_and_resumed(job)
    lines = [{"step": step, "kind": "train", "wall_s": 1.0, "tokens": 1000 * step} for step in range(1, 15)]
    (job.run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_goodput(job.run)
    assert found.tokens_per_s == pytest.approx(14_000 / 62.0)


HOSTILE = "\x1b]0;gone\x07[red]\u202ename"


def test_times_that_cannot_be_are_left_out(job):
    killed_and_resumed(job)
    before = seconds(read_goodput(job.run))
    for role, name, lane in (("trainer", "restore", "host"), ("driver", "diagnosing", "driver")):
        with job(rank=0, attempt=1, role=role) as told:
            told.out.record(name, -(1 << 61), 5, lane=lane)
            told.out.record(name, ns(41.0), 1 << 61, lane=lane)
            told.out.record(name, ns(41.0), -ns(3.0), lane=lane)
    assert seconds(read_goodput(job.run)) == before


def test_hostile_names_and_texts_are_shown_and_not_obeyed(job, tmp_path):
    killed_and_resumed(job, driver=False)
    with job(role="driver") as told:
        told.span(HOSTILE, 0.0, 5.0, lane="driver")
        told.span("running", 1.0, 27.5, lane="driver")
        told.instant("anomaly", 28.5, lane="driver", text="{" * 4000)
        one = Suspicion(rule=HOSTILE, detail=HOSTILE)
        told.instant("anomaly", 28.0, lane="driver", text=Anomaly(at_s=1, attempt=0, step=1, suspicions=(one,)).model_dump_json())
    with job(rank=1) as told:
        told.instant("alive", 20.0, text='{"section": "' + HOSTILE.encode("unicode_escape").decode() + '", "since_ns": 1}')
        told.span("step", 20.0, 21.0, -7)
    done = CliRunner().invoke(app, ["goodput", str(job.run)])
    assert done.exit_code == 0, done.output
    assert "\x1b]" not in done.output and "\u202e" not in done.output and "\x07" not in done.output
    seconds(read_goodput(job.run))


def test_the_command_prints_writes_and_draws(job, tmp_path):
    killed_and_resumed(job)
    data, picture = tmp_path / "goodput.json", tmp_path / "goodput.png"
    done = CliRunner().invoke(app, ["goodput", str(job.run), "--json", str(data), "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    assert "14.52%" in done.output and "1. after step 12: process_exited: node-1 (rank 1)" in done.output and FORMULA in done.output
    written = json.loads(data.read_text())
    assert set(written["booked_ns"]) == set(KINDS) and sum(written["booked_ns"].values()) == written["wall_ns"] == ns(62.0)
    assert written["effective_training_time_ratio"] == pytest.approx(9 / 62) and len(written["incidents"]) == 1
    assert sum(one["end_ns"] - one["begin_ns"] for one in written["segments"]) == written["wall_ns"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options", [["--picture", "a.txt"], ["--picture", "/nowhere/a.png"], ["--json", "/nowhere/a"], ["--ranks", "x"]])
def test_a_request_that_cannot_be_carried_out_is_refused_first(job, options):
    whole = CliRunner().invoke(app, ["goodput", str(job.run), *options])
    assert isinstance(whole.exception, Exception) and type(whole.exception).__name__ == "UsageError"


def test_step_times_are_without_saves_and_evaluations(job):
    with job() as told:
        whole_run(told)
    with read_events(job.run) as store:
        passes = read_passes(store, {0})
        found = step_seconds(passes, lost_passes(passes))
    assert found.steps.tolist() == [3, 4, 5], "the first is compiled, and the second may be"
    assert found.seconds == pytest.approx(np.array([1.0, 1.0, 1.75])) and found.rows == pytest.approx(np.array([0.25] * 3))

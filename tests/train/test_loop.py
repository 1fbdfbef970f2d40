"""The loop in one process: stop and resume anywhere, a full disk, an extended run, a changed layout."""

import json
import resource
import shutil
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from megascale_jax.checkpoint.manifest import published_steps, read_manifest
from megascale_jax.cli.main import app
from megascale_jax.config.cluster import ClusterConfig, RulesConfig
from megascale_jax.config.schema import CheckpointConfig, DataConfig, EvaluationConfig, LoggingConfig
from megascale_jax.errors import CheckpointError, CorruptStateError, RunFolderError
from megascale_jax.observe.event_store import read_events
from megascale_jax.observe.events import Events
from megascale_jax.observe.marks import INSTANTS, MARKS, Marks, read_marks
from megascale_jax.observe.metrics import read_metrics
from megascale_jax.observe.profile_request import Request, ask
from megascale_jax.observe.pulse import ALIVE
from megascale_jax.observe.spike import SpikeWatch
from megascale_jax.train import profiles
from megascale_jax.train.flip import DRILL
from megascale_jax.train.folder import RunFolder
from megascale_jax.train.loop import Trainer
from megascale_jax.views.goodput import read_goodput
from megascale_jax.views.xplane import read_xplane
from tests.build import experiment

STEPS = 9
MODEL = {"num_layers": 2, "window": (3, "full"), "vocab_size": 257, "dropout": 0.1}


class StopAt:
    """Asks to stop when the loop looks for the ``step``-th time; ``hook`` is called with the count at each look."""

    def __init__(self, step=None, hook=lambda count: None):
        self.step, self.hook, self.count = step, hook, 0

    @property
    def asked(self):
        self.count += 1
        self.hook(self.count)
        return self.step is not None and self.count >= self.step


class Killed(Exception):
    """What ends a loop in the middle of a step."""


def kill_at_7(count):
    if count == 7:
        raise Killed


def tiny(data=2, tensor=2, **train):
    settings = {
        "steps": STEPS,
        "checkpoint": CheckpointConfig(every=4, keep=2),
        "evaluation": EvaluationConfig(every=5, batches=1),
        "logging": LoggingConfig(tensorboard=False),
    }
    return experiment(data, tensor, train=settings | train, **MODEL)


def run(config, prepared, path, stop=None, **options):
    return Trainer(config, RunFolder(path), prepared, **options).run(stop or StopAt())


def until_published(path, step, limit_s=60.0):
    """Steps on storage once this one is: a keeper goes on when its run has failed."""
    limit = time.monotonic() + limit_s
    while step not in (steps := published_steps(path / "checkpoints")) and time.monotonic() < limit:
        time.sleep(0.05)
    return steps


def losses(path, kind="train"):
    return [(line["step"], line["loss"]) for line in read_metrics(path, kind)]


def valid_tokens(path):
    return [line["valid_tokens"] for line in read_metrics(path, "train")]


@pytest.fixture(scope="module")
def unbroken(prepared, tmp_path_factory):
    path = tmp_path_factory.mktemp("unbroken") / "run"
    outcome = run(tiny(), prepared, path)
    return losses(path), outcome.summary, valid_tokens(path)


@pytest.mark.parametrize("stop_at", [1, 2, 4, 7])
def test_losses_are_bit_equal_when_stopped_and_resumed(stop_at, prepared, unbroken, tmp_path):
    path = tmp_path / "run"
    first = run(tiny(), prepared, path, StopAt(stop_at))
    assert first.summary is None and first.step < STEPS
    assert published_steps(path / "checkpoints")[-1] == first.step
    second = run(tiny(), prepared, path)
    assert losses(path) == unbroken[0]
    assert second.summary.validation_loss == unbroken[1].validation_loss
    assert second.summary.resumed_from == first.step
    assert [line["step"] for line in read_metrics(path, "train")] == list(range(1, STEPS + 1))


def test_losses_are_bit_equal_when_the_newest_checkpoint_is_older_than_the_last_step(prepared, unbroken, tmp_path):
    """What a kill between steps leaves: metrics beyond the newest checkpoint."""

    path = tmp_path / "run"
    with pytest.raises(Killed):
        run(tiny(), prepared, path, StopAt(hook=kill_at_7))
    assert losses(path)[-1][0] > published_steps(path / "checkpoints")[-1] == 4
    run(tiny(), prepared, path)
    assert losses(path) == unbroken[0]


def test_run_goes_on_with_another_layout(prepared, unbroken, tmp_path, capsys):
    path = tmp_path / "run"
    run(tiny(), prepared, path, StopAt(4))
    other = tiny(data=4, tensor=1)
    RunFolder(path).check(other)
    assert run(other, prepared, path).step == STEPS
    assert "goes on with another layout" in capsys.readouterr().out
    assert losses(path)[:4] == unbroken[0][:4]
    assert valid_tokens(path) == unbroken[2], "the same rows"
    assert [loss for _, loss in losses(path)] == pytest.approx([loss for _, loss in unbroken[0]], rel=0.03)


def test_run_killed_after_a_save_goes_on_from_memory(prepared, unbroken, tmp_path, capsys):
    """Megatron-LM #5281 and dlrover #1065 turned round: what is in memory has its checksums, and is the newest."""

    path = tmp_path / "run"
    with pytest.raises(Killed):
        run(tiny(), prepared, path, StopAt(hook=kill_at_7))
    shutil.rmtree(path / "checkpoints/4")
    second = run(tiny(), prepared, path)
    assert "resumed from step 4" in (said := capsys.readouterr().out) and "(memory of this host)" in said
    assert second.summary.resumed_from == 4
    assert losses(path) == unbroken[0]


def test_a_flipped_bit_is_never_saved_and_the_run_goes_on_bit_equal(prepared, unbroken, tmp_path, monkeypatch):
    config, path, marks = tiny(digest_every=100), tmp_path / "run", tmp_path / "rank-0.marks"
    monkeypatch.setenv(DRILL, "1")
    monkeypatch.setenv(MARKS, str(marks))

    def inject(count):
        if count == 6:
            (tmp_path / "rank-0.flip").touch()

    with pytest.raises(CorruptStateError, match=r"after step 8, .* on data \d .*rank 0.* start again from the newest checkpoint"):
        run(config, prepared, path, StopAt(hook=inject), marks=Marks(marks))
    reading = read_marks(marks)
    assert (reading.odd_ranks, reading.is_odd_certain, reading.saved_step) == ((0,), True, 4)
    assert until_published(path, 4) == [4]
    assert run(config, prepared, path).summary.resumed_from == 4, "and not from step 8 in memory"
    assert losses(path) == unbroken[0]


def test_a_rewound_run_equals_one_that_never_saw_the_samples_and_what_it_gave_up_never_comes_back(prepared, tmp_path, monkeypatch):
    path, other, marks = tmp_path / "run", tmp_path / "other", tmp_path / "marks"
    checkpoints = {"checkpoint": CheckpointConfig(every=2, keep=9)}
    with pytest.raises(Killed):
        run(tiny(**checkpoints), prepared, path, StopAt(hook=kill_at_7))
    assert published_steps(path / "checkpoints")[:2] == [2, 4] and losses(path)[-1][0] >= 5
    with pytest.raises(CheckpointError, match=r"rewound to step 1, and .* has no checkpoint of that step or before, only 2, 4"):
        run(tiny(rewinds=((1, 0, 24),), **checkpoints), prepared, path)
    rewind = (5, 4 * 24 + 12, 6 * 24 + 7)  # samples that neither begin nor end with a batch
    stopped = run(tiny(rewinds=(rewind,), **checkpoints), prepared, path, StopAt(2))
    assert stopped.step == 6, "from step 4 in storage: what is in memory was of the line that was given up"
    storage = RunFolder(path).storage()
    late = replace(read_manifest(storage, 4), step=8, description={**RunFolder(path).description(4), "rewinds": []})
    storage.write("8/manifest.json", late.to_bytes())  # published late by a keeper of the line that was given up
    assert run(tiny(**checkpoints), prepared, path).summary.resumed_from == 6, "the new step 6, by a command that does not know of it"
    reasons = [json.loads(line)["reason"] for line in (path / "checkpoints/deletions.jsonl").read_text().splitlines()]
    assert [reason for reason in reasons if "rewound" in reason] == 2 * ["given up when the run was rewound to step 5"]
    assert RunFolder(path).experiment().train.rewinds == (rewind,)
    never = tiny(**checkpoints)
    never = never.model_copy(update={"train": never.train.model_copy(update={"data": DataConfig(skip=(rewind[1:],))})})
    rules = RulesConfig(loss_spike_window=8, loss_spike_steps=1, loss_spike_margin=2)
    monkeypatch.setattr(SpikeWatch, "limit", 0.0)  # whatever loss follows a full window is a spike
    run(never.model_copy(update={"cluster": ClusterConfig(rules=rules)}), prepared, other, marks=Marks(marks))
    assert losses(path) == losses(other)
    spike = read_marks(marks).spike
    assert (spike.first, spike.last, spike.begin, spike.end) == (9, 9, 6 * 24 + 43, 9 * 24 + 43), "from two steps before it"
    assert [line["step"] for line in read_metrics(other, "event") if line["event"] == "spike"] == [9]


def test_run_that_was_removed_leaves_nothing_to_resume_from(prepared, tmp_path):
    path = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        run(tiny(), prepared, path, StopAt(hook=lambda count: 1 // (7 - count)))
    until_published(path, 4)  # else the keeper goes on writing what is removed
    shutil.rmtree(path)
    assert run(tiny(steps=1), prepared, path).summary.resumed_from is None


def kept_by_keeper(path):
    with read_events(path) as store:
        rows = store.sql("select name, step, text from events where lane = 'keeper'").to_pylist()
        return {(row["name"], row["step"]): row["text"] for row in rows}


def test_events_tell_the_way_of_a_run_and_of_its_continuation(prepared, tmp_path):
    path, config = tmp_path / "run", tiny()
    for number, stop_at in enumerate((7, None)):
        marks = Marks(attempt=number, events=Events(path / "events", attempt=number, begins=False))
        run(config, prepared, path, StopAt(stop_at), marks=marks, fresh=number == 0)
        marks.close()
    saves = {(name, step) for name in ("copying", "writing", "publication") for step in (4, 8, 9)}
    limit = time.monotonic() + 30
    while not saves <= (told := kept_by_keeper(path)).keys() and time.monotonic() < limit:
        time.sleep(0.1)  # the keeper writes each second, and when it ends
    assert told.keys() == saves and all(json.loads(text)["bytes"] > 0 for text in told.values())
    with read_events(path) as store:
        rows = store.sql(
            "select * from events where role = 'trainer' and device < 0 and name <> 'clock anchor' order by begin_ns"
        ).to_pylist()
        facts = [file.facts for file in store.files if file.facts.role == "trainer"]
        assert store.notes == ()

    def steps(name, attempt):
        return [row["step"] for row in rows if (row["name"], row["attempt"]) == (name, attempt)]

    assert steps("data", 0) == [1, 2, 3, 4, 5, 6, 7, 8] and steps("data", 1) == [9]
    assert steps("compile", 0)[0] == 1 and steps("step", 0) == [2, 3, 4, 5, 6, 7, 8] and steps("compile", 1)[0] == 9
    assert steps("checkpoint", 0) == [4, 8] and steps("saved", 0) == [4, 8] and steps("published", 0)[-1] == 8
    assert (steps("stop", 0)[0], steps("resume", 0), steps("resume", 1)) == (7, [], [8])
    assert {row["name"] for row in rows if row["attempt"] == 1} >= {"start", "restore", "compile", "end", "resume"}
    assert all(row["is_instant"] == (row["name"] in (*INSTANTS, ALIVE)) for row in rows)
    assert {(fact.mesh, fact.devices, fact.run) for fact in facts} == {((1, 2, 2), (0, 1, 2, 3), RunFolder(path).identity())}
    spent = read_goodput(path)
    assert sum(spent.booked_ns.values()) == spent.wall_ns == int(spent.timeline.edges_ns[-1] - spent.timeline.edges_ns[0])
    assert (spent.steps, spent.recomputed_steps) == (STEPS, 0) and (spent.tokens_per_s or 0) > 0
    booked = {kind for kind, lasted in spent.booked_ns.items() if lasted}
    assert booked >= {"training", "checkpoint", "compile", "restart", "data wait"} and "recomputed" not in booked
    assert [(one.step, one.resumed_step) for one in spent.incidents] == [(8, 8)]


def test_a_profile_of_a_real_run_is_taken_and_analyzed(prepared, unbroken, tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "look_s", lambda ranks: 0.05)
    path, places = tmp_path / "run", []

    def ask_in_step_2(count):
        if count == 2:
            places.append(ask(path, Request(first=5, end=7, ranks=(0,), expires_unix_s=time.time() + 600)))
            limit = time.monotonic() + 60
            while places[0].answer(0) is None and time.monotonic() < limit:
                time.sleep(0.01)

    marks = Marks(events=Events(path / "events", begins=False))
    run(tiny(), prepared, path, StopAt(hook=ask_in_step_2), marks=marks)
    marks.close()
    (place,) = places
    answer = place.answer(0)
    assert (answer.state, answer.text) == ("done", "") and answer.num_bytes == place.profile(0).stat().st_size
    assert losses(path) == unbroken[0], "nothing else changed"
    assert read_xplane(place.profile(0)).steps.tolist()[:2] == [5, 6]
    output = tmp_path / "times.json"
    result = CliRunner().invoke(app, ["analyze", str(place.folder), "--json", str(output), "--steps", "5:7"])
    assert result.exit_code == 0, result.output
    told = json.loads(output.read_text())
    assert {one["device"] for one in told["devices"]} == {f"CPU:{number}" for number in range(4)}
    assert {one["source"] for one in told["devices"]} == {"rank-00000"} and 0 < told["exposed_share"] <= 1
    assert {one["kind"] for one in told["operations"]} >= {"compute", "collective"}
    with read_events(path) as store:
        (row,) = store.sql("select text from events where name = 'profile'").to_pylist()
    assert json.loads(row["text"]) == {"name": "steps-5-7", "state": "done", "text": "", "bytes": answer.num_bytes}
    RunFolder(path).clear(tiny())
    assert not (path / "profiles").exists(), "it is a part of the run"


def test_marks_show_the_way_of_a_run_and_of_its_continuation(prepared, tmp_path):
    path, marks = tmp_path / "run", tmp_path / "marks"
    seen = []
    first = run(tiny(), prepared, path, StopAt(7, hook=lambda _: seen.append(read_marks(marks))), marks=Marks(marks))
    reading = read_marks(marks)
    assert [(seen[0].section, seen[0].step), (seen[3].section, seen[3].step)] == [("compile", 0), ("step", 2)]
    assert (reading.section, reading.step, reading.saved_step, reading.durable_step) == ("end", first.step, first.step, first.step)
    assert reading.loss == losses(path)[-1][1] and reading.step_s
    saves = len(published_steps(path / "checkpoints"))
    counts = {"start": 1, "restore": 1, "data": first.step, "step": first.step - 1, "checkpoint": saves}
    assert reading.passes == counts | {"compile": 2}, "the first step and the first held-out batch"
    assert set(reading.longest_s) == set(reading.passes)
    run(tiny(), prepared, path, StopAt(1, hook=lambda _: seen.append(read_marks(marks))), marks=Marks(marks))
    assert (seen[-1].section, seen[-1].step, seen[-1].saved_step) == ("compile", first.step, first.step), "it came from memory"
    assert read_marks(marks).durable_step == STEPS


def test_run_goes_on_when_steps_are_raised_after_the_end(prepared, tmp_path):
    path = tmp_path / "run"
    assert run(tiny(steps=4), prepared, path).step == 4
    folder = RunFolder(path)
    assert folder.finished(tiny(steps=4)) is not None
    longer = tiny(steps=6)
    folder.check(longer)
    assert folder.finished(longer) is None
    assert run(longer, prepared, path).summary.resumed_from == 4


def test_training_goes_on_when_the_disk_is_full(prepared, unbroken, tmp_path):
    path = tmp_path / "run"
    trainer = Trainer(tiny(), RunFolder(path), prepared)

    def fill(count):
        # A limit on file size makes the kernel refuse what stage 2 writes, as a full disk would; step 8 saves.
        if count == 6:
            resource.prlimit(trainer.store.keeper_pid, resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))

    outcome = trainer.run(StopAt(hook=fill))
    assert outcome.summary.checkpoint_errors == trainer.store.errors >= 1
    assert losses(path) == unbroken[0]
    assert published_steps(path / "checkpoints") == [4]
    assert {entry.name for entry in (path / "checkpoints").iterdir()} == {"4", "deletions.jsonl", "run.json", ".lock"}
    resource.prlimit(trainer.store.keeper_pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert run(tiny(), prepared, path).summary.resumed_from == STEPS, "what did not reach the disk stayed in memory"
    assert losses(path) == unbroken[0]
    assert published_steps(path / "checkpoints") == [4, STEPS]


def test_folder_is_refused_with_the_difference_when_the_configuration_changed(prepared, tmp_path):
    path = tmp_path / "run"
    run(tiny(steps=2), prepared, path)
    before = sorted(entry.name for entry in path.rglob("*"))
    with pytest.raises(RunFolderError, match=r"train.seed: 0 -> 3"):
        RunFolder(path).check(tiny(steps=2, seed=3))
    with pytest.raises(RunFolderError, match=r"model.num_layers: 2 -> 1"):
        RunFolder(path).check(experiment(2, 2, **(MODEL | {"num_layers": 1, "window": "full"})))
    assert sorted(entry.name for entry in path.rglob("*")) == before


def test_checkpoint_of_another_model_is_refused_before_any_device_work(prepared, tmp_path):
    ours, other = tmp_path / "ours", tmp_path / "other"
    run(tiny(steps=1), prepared, ours)
    config = experiment(2, 2, train=tiny(steps=1).train.model_dump(), **(MODEL | {"mlp_size": 48}))
    run(config, prepared, other)
    (ours / "checkpoints" / "1").rename(tmp_path / "aside")
    (other / "checkpoints" / "1").rename(ours / "checkpoints" / "1")
    with pytest.raises(RunFolderError, match="holds step 1 of another run"):
        RunFolder(ours).check(tiny(steps=1))
    (ours / ".identity").write_text((other / ".identity").read_text())
    with pytest.raises(RunFolderError, match=r"model.mlp_size: 48 -> 40"):
        RunFolder(ours).check(tiny(steps=1))


def test_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    folder = RunFolder(tmp_path)
    with pytest.raises(RunFolderError, match="not a run folder"):
        folder.check(tiny())
    with pytest.raises(RunFolderError, match=r"holds 'thesis\.txt', which is not a run's"):
        folder.clear(tiny())
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_description_says_what_the_checkpoint_belongs_to(prepared, tmp_path):
    run(tiny(steps=1), prepared, tmp_path / "run")
    description = RunFolder(tmp_path / "run").description(1)
    assert description["data"]["samples"] == 24
    assert json.loads(description["experiment"])["model"]["num_layers"] == 2
    assert description["versions"]["jax"]


def test_second_process_in_one_run_folder_is_refused(prepared, tmp_path, monkeypatch):
    """Before it speaks to the first one's keeper, or removes anything."""
    folder, keepers = RunFolder(tmp_path / "run"), tmp_path / "keepers"
    first = Trainer(tiny(steps=1), folder, prepared)
    monkeypatch.setenv("MEGASCALE_KEEPER", str(keepers))
    for fresh in (False, True):
        with pytest.raises(RunFolderError, match="another process trains in"):
            Trainer(tiny(steps=1), folder, prepared, fresh=fresh)
    assert not keepers.exists()
    monkeypatch.undo()
    assert first.run(StopAt()).summary is not None
    assert run(tiny(steps=2), prepared, folder.path).summary.resumed_from == 1, "the lock is gone with the run"


def test_damaged_configuration_or_summary_of_a_run_is_no_dead_end(prepared, tmp_path):
    folder = RunFolder(tmp_path / "run")
    run(tiny(steps=1), prepared, folder.path)
    (folder.path / "summary.json").write_text("{")
    assert folder.finished(tiny(steps=1)) is None
    (folder.path / "config.yaml").write_text("model:")
    with pytest.raises(RunFolderError, match=r"damaged: start anew with --fresh"):
        folder.check(tiny(steps=1))
    assert run(tiny(steps=1), prepared, folder.path, fresh=True).summary.resumed_from is None


def test_refused_resume_changes_nothing(prepared, tmp_path):
    path = tmp_path / "run"
    run(tiny(steps=1), prepared, path)
    for file in (path / "checkpoints/1").rglob("*"):
        if file.is_file() and "/d/" in str(file):
            file.unlink()
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        run(tiny(steps=3), prepared, path)
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()} == before

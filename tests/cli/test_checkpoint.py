"""`megascale checkpoint`: lists, verifies, compares, reshards and deletes, with exit codes that scripts can use."""

import json
import os

import pytest
import tensorstore as ts
from typer.testing import CliRunner

from megascale_jax.checkpoint.manifest import published_steps, read_manifest
from megascale_jax.checkpoint.restore import load_arrays
from megascale_jax.cli.main import app
from megascale_jax.comm.storage import Storage
from megascale_jax.errors import CheckpointError, ConfigError, UsageError
from tests.checkpoint.states import check_state, plan, published


def megascale(*arguments):
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


@pytest.fixture
def run(tmp_path):
    """A run folder with steps 3 and 7."""
    for step in (3, 7):
        published(tmp_path / "run/checkpoints", plan(data=2), step)
    return tmp_path / "run"


def flip(run, step):
    victim = max((run / f"checkpoints/{step}").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)


def test_ls_shows_good_damaged_and_incomplete_ones(run, tmp_path):
    (run / "checkpoints/9/abc").mkdir(parents=True)
    (run / "checkpoints/3/manifest.json").write_text("{}")
    result = megascale("ls", run, "--json", tmp_path / "list.json")
    assert result.exit_code == 0 and "incomplete" in result.output and "damaged" in result.output
    rows = json.loads((tmp_path / "list.json").read_text())
    assert [(row["step"], row["state"]) for row in rows] == [(3, "damaged"), (7, "good"), (9, "incomplete")]
    assert rows[1]["samples"] == 168 and rows[1]["ranks"] == 1


def test_verify_finds_a_flipped_byte_and_marks_on_request(run):
    assert megascale("verify", run).exit_code == 0
    flip(run, 7)
    result = megascale("verify", run / "checkpoints", "--step", 7)
    assert result.exit_code == 1 and "damaged" in result.output and published_steps(run / "checkpoints") == [3, 7]
    assert megascale("verify", run, "--mark").exit_code == 1
    assert published_steps(run / "checkpoints") == [3]
    assert megascale("verify", run).exit_code == 0


def test_diff_of_the_same_state_on_two_meshes_is_nothing(run, tmp_path):
    published(tmp_path / "other", plan(pipe=2, tensor=2), 7)
    same = megascale("diff", run, tmp_path / "other", "--json", tmp_path / "diff.json")
    assert same.exit_code == 0 and "hold the same bits" in same.output
    assert "parallel.pipe: 1 -> 2" in json.loads((tmp_path / "diff.json").read_text())["configuration"]


def test_diff_names_what_differs(run, tmp_path):
    published(tmp_path / "other", plan(data=2, activation="swiglu"), 7)
    database = Storage(tmp_path / "other").database("7/launch")
    array = ts.open({"driver": "zarr3"}, kvstore=database / "params.embedding/", open=True).result()
    array[2, 3].write(-9.0).result()
    result = megascale("diff", run, tmp_path / "other", "--json", tmp_path / "diff.json")
    found = {item["name"]: item for item in json.loads((tmp_path / "diff.json").read_text())["arrays"]}
    assert result.exit_code == 1
    assert found["params.embedding"]["elements"] == 1 and found["params.embedding"]["largest"] > 8
    assert found["params.gate"]["note"] == "only in the second"


def test_resharded_checkpoint_is_the_same_bits_in_other_blocks(run, tmp_path):
    result = megascale("reshard", run, "parallel.data=1", "parallel.tensor=2", "parallel.pipe=2", "-o", tmp_path / "new")
    assert result.exit_code == 0, result.output
    target = plan(pipe=2, tensor=2)
    check_state(target, load_arrays(Storage(tmp_path / "new"), 7, target))
    assert megascale("verify", tmp_path / "new").exit_code == 0
    assert megascale("diff", run, tmp_path / "new").exit_code == 0
    assert len([path for path in (tmp_path / "new/7").rglob("ocdbt.process_*") if path.is_dir()]) == 4


def test_impossible_requests_are_refused(run, tmp_path):
    refused = {
        (UsageError, "is no folder"): ("ls", tmp_path / "nothing"),
        (CheckpointError, "is not complete"): ("verify", run, "--step", 5),
        (UsageError, "only the layout may change"): ("reshard", run, "model.num_layers=2", "-o", tmp_path / "new"),
        (ConfigError, "not divisible"): ("reshard", run, "parallel.tensor=3", "-o", tmp_path / "new"),
        (UsageError, "is the newest complete checkpoint"): ("delete", run, "--step", 7, "--reason", "x"),
        (CheckpointError, "has no folder of step 4"): ("delete", run, "--step", 4, "--reason", "x"),
    }
    for (kind, text), arguments in refused.items():
        error = megascale(*arguments).exception
        assert isinstance(error, kind) and text in str(error), (arguments, error)
    assert published_steps(run / "checkpoints") == [3, 7]


def test_deletion_by_command_is_on_record(run):
    assert megascale("delete", run, "--step", 3, "--reason", "diverged here").exit_code == 0
    assert published_steps(run / "checkpoints") == [7]
    line = json.loads((run / "checkpoints/deletions.jsonl").read_text())
    assert (line["folder"], line["reason"], line["by"]) == ("3", "diverged here", "megascale checkpoint delete")


def test_verify_of_a_damaged_manifest_is_a_verdict_that_can_be_marked(run):
    (run / "checkpoints/7/manifest.json").write_text("{}")
    assert megascale("verify", run, "--step", 7, "--mark").exit_code == 1
    assert published_steps(run / "checkpoints") == [3]


def test_only_good_checkpoint_is_not_deleted_when_the_newest_one_is_damaged(run):
    (run / "checkpoints/7/manifest.json").write_text("{}")
    error = megascale("delete", run, "--step", 3, "--reason", "x").exception
    assert isinstance(error, UsageError) and "step 3 is the newest complete checkpoint" in str(error)


def test_resharded_checkpoint_stays_encrypted(run, tmp_path, monkeypatch):
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    published(tmp_path / "sealed", plan(data=2), 7, key_file=str(key))
    refused = megascale("reshard", tmp_path / "sealed", "parallel.data=1", "-o", tmp_path / "new")
    assert isinstance(refused.exception, CheckpointError) and "is encrypted" in str(refused.exception)
    monkeypatch.setenv("MEGASCALE_KEY_FILE", str(key))
    old = os.umask(0o022)
    try:
        assert megascale("reshard", tmp_path / "sealed", "parallel.data=1", "-o", tmp_path / "new").exit_code == 0
    finally:
        os.umask(old)
    assert read_manifest(Storage(tmp_path / "new"), 7).key_id
    assert not [path for path in (tmp_path / "new").rglob("*") if path.stat().st_mode & 0o077]
    check_state(plan(), load_arrays(Storage(tmp_path / "new"), 7, plan()))

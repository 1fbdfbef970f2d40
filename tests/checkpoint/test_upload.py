"""A further copy through fsspec: whole, verified, and only then may the first copy go."""

import json
import os
import shutil
import time

import psutil
import pytest

from megascale_jax.checkpoint import two_stage
from megascale_jax.checkpoint.inspect import verify
from megascale_jax.checkpoint.manifest import published_steps
from megascale_jax.checkpoint.retention import Retention, apply
from megascale_jax.checkpoint.two_stage import CheckpointStore
from megascale_jax.checkpoint.upload import upload, upload_waiting, waiting
from megascale_jax.comm.storage import Storage
from megascale_jax.config.schema import CheckpointConfig
from tests.checkpoint.states import plan, published, random_state


def test_copy_is_a_checkpoint_of_its_own(tmp_path):
    published(tmp_path / "here", plan(data=2), 7)
    storage = Storage(tmp_path / "here")
    assert waiting(storage) == [7]
    num_bytes = upload(storage, 7, f"file://{tmp_path}/there")
    assert num_bytes > 100_000 and waiting(storage) == []
    assert published_steps(tmp_path / "there") == [7]
    assert verify(Storage(tmp_path / "there"), 7).problems == []
    assert json.loads((tmp_path / "here/7/uploaded.json").read_text())["num_bytes"] == num_bytes


def test_what_is_not_the_same_there_does_not_count(tmp_path, monkeypatch):
    published(tmp_path / "here", plan(data=2), 7)
    storage = Storage(tmp_path / "here")
    from megascale_jax.checkpoint import upload as module

    monkeypatch.setattr(module, "_digest", lambda files, path: 0)
    with pytest.raises(OSError, match="is not what was written"):
        upload(storage, 7, f"file://{tmp_path}/there")
    assert waiting(storage) == [7]


def test_unknown_file_systems_are_an_error(tmp_path):
    published(tmp_path / "here", plan(data=2), 7)
    with pytest.raises(OSError, match="nosuch"):
        upload(Storage(tmp_path / "here"), 7, "nosuch://host/path")


def test_first_copy_stays_until_the_second_is_there(tmp_path):
    here, storage = plan(data=2), Storage(tmp_path)
    for step in (1, 2, 3):
        published(tmp_path, here, step, keep=9)
    upload(storage, 1, f"file://{tmp_path}/there")
    gone = apply(storage, Retention(1), "a test", launch="now", bound=waiting(storage))
    assert [deletion.folder for deletion in gone] == ["1"]
    assert published_steps(tmp_path) == [2, 3]


def test_keeper_uploads_and_says_what_it_could_not(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGASCALE_KEEPER", str(tmp_path / "keeper"))
    here, said = plan(data=2), []
    blocked = tmp_path / "there"
    blocked.write_text("a file where a folder should be")
    settings = CheckpointConfig(keep=1, limit_s=30, upload=f"file://{blocked}/deep")
    store = CheckpointStore(tmp_path / "here", tmp_path.name, here, settings, said.append)
    for step in (1, 2):
        store.save(step, random_state(here), {})
        store.wait()
    assert published_steps(tmp_path / "here") == [1, 2]
    assert store.errors == 0 and len([line for line in said if "not uploaded to" in line]) == 2
    blocked.unlink()
    store.save(3, random_state(here), {})
    store.close(is_over=True)
    assert published_steps(blocked / "deep") == [1, 2, 3]
    assert published_steps(tmp_path / "here") == [3]


def test_end_of_a_run_says_what_it_waits_for_and_leaves_a_long_upload_to_the_keeper(tmp_path, monkeypatch):
    """A pipe stands where a file should be, so the keeper cannot write it until somebody reads."""
    monkeypatch.setenv("MEGASCALE_KEEPER", str(tmp_path / "keeper"))
    monkeypatch.setattr(two_stage, "SAY_S", 0.2)
    here, said, there = plan(data=2), [], tmp_path / "there"
    settings = CheckpointConfig(limit_s=30, upload=f"file://{there}")
    store = CheckpointStore(tmp_path / "here", tmp_path.name, here, settings, said.append)
    pipe = there / "7" / store._launch / "manifest.ocdbt"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    store.save(7, random_state(here), {})
    limit = time.monotonic() + settings.limit_s
    while store.durable() is None:
        assert time.monotonic() < limit, said
        time.sleep(0.02)
    store._settings = settings.model_copy(update={"limit_s": 1})
    store.wait()
    words = len(said)
    store.close(is_over=True)
    assert len(said) == words + 1, "it does not wait all over again"
    keeper = psutil.Process(store.keeper_pid)
    assert said[0].startswith(f"waiting for the upload of step 7 in the keeper, process {keeper.pid}: 0 s of at most 1 s")
    assert said[-1] == f"the upload of step 7 goes on in the keeper, process {keeper.pid}, which ends after it: let that live"
    assert store.errors == 0 and keeper.is_running() and published_steps(there) == []
    os.link(pipe, tmp_path / "pipe")
    shutil.copyfile(tmp_path / "here/7" / store._launch / pipe.name, tmp_path / "whole")
    (tmp_path / "whole").replace(pipe)
    with (tmp_path / "pipe").open("r+b", buffering=0):
        keeper.wait(settings.limit_s)
    assert published_steps(there) == [7]


def test_one_that_cannot_be_uploaded_does_not_hold_up_the_next(tmp_path):
    here, storage = plan(data=2), Storage(tmp_path / "here")
    for step in (1, 2):
        published(tmp_path / "here", here, step, keep=9)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/1").write_text("a file where a folder should be")
    with pytest.raises(OSError, match="there/1"):
        upload_waiting(storage, f"file://{tmp_path}/there")
    assert waiting(storage) == [1] and published_steps(tmp_path / "there") == [2]

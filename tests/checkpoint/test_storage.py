"""A folder and an S3 behave alike; a whole run of the store on S3."""

import pytest

from megascale_jax.checkpoint.manifest import published_steps, read_manifest
from megascale_jax.checkpoint.two_stage import CheckpointStore
from megascale_jax.comm.storage import Storage, StorageError
from megascale_jax.config.schema import CheckpointConfig
from tests.checkpoint.states import check_state, plan, random_state


@pytest.fixture(params=["folder", "s3"])
def storage(request, tmp_path, s3):
    return Storage(tmp_path / "root" if request.param == "folder" else "s3://bucket/some/run")


def test_keys_are_written_whole_listed_and_removed(storage):
    assert storage.read("a") is None and storage.names() == [] and storage.folders() == []
    storage.write("4/x/data", b"1")
    storage.write("4/manifest.json", b"2")
    storage.write("40/y", b"3")
    storage.append("log", "first")
    storage.append("log", "second")
    assert storage.names("4/") == ["4/manifest.json", "4/x/data"]
    assert storage.folders() == ["4", "40"]
    assert storage.has("4/manifest.json") and not storage.has("4")
    assert storage.read("log") == b"first\nsecond\n"
    storage.write("4/manifest.json", b"22")
    assert storage.read("4/manifest.json") == b"22"
    storage.delete("40/y")
    storage.delete_folder("4")
    storage.delete_folder("nothing")
    assert storage.names() == ["log"]


def test_store_saves_to_and_restores_from_s3(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGASCALE_KEEPER", str(tmp_path / "keeper"))
    here, said = plan(data=2), []
    settings = CheckpointConfig(keep=2, limit_s=30)
    store = CheckpointStore("s3://bucket/runs/one", "run", here, settings, said.append)
    for step in (3, 7, 9):
        store.save(step, random_state(here), {"note": step})
    store.close(is_over=True)
    storage = Storage("s3://bucket/runs/one")
    assert (published_steps(storage), said) == ([7, 9], [])
    assert all(key.startswith("runs/one/") for key in s3.objects)
    store = CheckpointStore("s3://bucket/runs/one", "run", plan(tensor=2), settings, said.append)
    restored = store.restore()
    store.close(is_over=True)
    assert (restored.step, restored.tier, restored.description) == (9, "durable", {"note": 9})
    check_state(plan(tensor=2), restored.arrays)


def test_refusing_storage_is_an_error_with_its_words(s3):
    storage = Storage("s3://bucket/runs/one")
    s3.refuse = 403
    with pytest.raises(StorageError, match=r"AccessDenied|PERMISSION_DENIED"):
        read_manifest(storage, 3)

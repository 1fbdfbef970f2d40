"""Two runs on one place for checkpoints: the second is refused before it trains, on a file system and on an object store."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from megascale_jax.checkpoint.owner import Owner, claim, read_owner
from megascale_jax.comm.storage import Storage
from megascale_jax.config.schema import CheckpointConfig
from megascale_jax.errors import CheckpointError, RunFolderError, StorageError
from megascale_jax.train.folder import RunFolder
from tests.build import experiment
from tests.checkpoint.states import plan, published
from tests.fake_s3 import fake_s3


@pytest.fixture(params=["folder", "s3"])
def place(request, tmp_path, monkeypatch):
    with fake_s3() as (address, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield str(tmp_path / "place") if request.param == "folder" else "s3://bucket/some/place"


def on(place):
    return experiment(train={"checkpoint": CheckpointConfig(place=place)})


def use(folder, config, **options):
    """Begin and end a run that saves nothing."""
    with folder.taken(config, **options):
        pass


def test_second_run_on_one_place_is_refused_also_when_the_first_saved_nothing(place, tmp_path):
    first, second, config = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "second"), on(place)
    use(first, config)
    for refused in (second.check_place, lambda config: use(second, config), lambda config: use(second, config, fresh=True)):
        with pytest.raises(RunFolderError, match=rf"belongs to the run {first.identity()} in {first.path}; choose another"):
            refused(config)
    assert read_owner(Storage(place)).run == first.identity()
    use(first, config)


def test_second_run_is_refused_while_the_first_is_at_work(place, tmp_path):
    config = on(place)
    with (
        RunFolder(tmp_path / "first").taken(config),
        pytest.raises(RunFolderError, match=r"another process trains on|belongs to the run"),
        RunFolder(tmp_path / "second").taken(config),
    ):
        pass


def test_checkpoints_without_a_record_belong_to_their_run(tmp_path):
    """As they were written before there were records."""
    published(tmp_path / "place", plan(data=2), 7)
    manifest = tmp_path / "place/7/manifest.json"
    first, config = RunFolder(tmp_path / "first"), on(str(tmp_path / "place"))
    first.path.mkdir()
    _sign(manifest, first.identity())
    with pytest.raises(RunFolderError, match="holds step 7 of another run"):
        use(RunFolder(tmp_path / "second"), config)
    use(first, config)
    assert read_owner(Storage(tmp_path / "place")).run == first.identity()


def _sign(manifest, run):
    from megascale_jax.checkpoint.manifest import Manifest

    found = Manifest.from_bytes(manifest.read_bytes(), "here")
    manifest.write_bytes(Manifest(**{**vars(found), "run": run}).to_bytes())


def test_moved_run_goes_on_and_a_copy_of_one_does_not(place, tmp_path):
    config = on(place)
    use(RunFolder(tmp_path / "first"), config)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    with pytest.raises(RunFolderError, match=r"in .*first, of which .*copy is a copy"):
        RunFolder(tmp_path / "copy").check_place(config)
    (tmp_path / "first").rename(tmp_path / "moved")
    use(RunFolder(tmp_path / "moved"), config)
    assert Path(read_owner(Storage(place)).run_folder) == tmp_path / "moved"


def test_copied_run_has_a_place_of_its_own_unless_one_is_named(tmp_path):
    use(RunFolder(tmp_path / "first"), on(None))
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    use(RunFolder(tmp_path / "copy"), on(None))


def test_fresh_run_takes_its_own_place_again_when_nothing_is_in_it(place, tmp_path):
    folder, config = RunFolder(tmp_path / "run"), on(place)
    use(folder, config)
    before = folder.identity()
    use(folder, config, fresh=True)
    assert folder.identity() != before
    assert read_owner(Storage(place)).run == folder.identity()


def test_fresh_run_removes_no_checkpoints_elsewhere(tmp_path):
    folder, config = RunFolder(tmp_path / "run"), on(str(tmp_path / "place"))
    use(folder, config)
    published(tmp_path / "place", plan(data=2), 7)
    (folder.path / "summary.json").write_text("{}")
    with pytest.raises(RunFolderError, match="holds checkpoints of an earlier run"):
        use(folder, config, fresh=True)
    assert (folder.path / "summary.json").exists() and (tmp_path / "place/7/manifest.json").exists()


def test_run_whose_folder_was_lost_goes_on_by_its_identity(place, tmp_path):
    config, lost = on(place), RunFolder(tmp_path / "lost")
    use(lost, config)
    identity = lost.identity()
    shutil.rmtree(lost.path)
    folder = RunFolder(tmp_path / "new")
    with pytest.raises(RunFolderError, match=f"write {identity} into .identity of an empty folder"):
        use(folder, config)
    (folder.path / ".identity").write_text(f"{identity}\n")
    folder.check(config)
    use(folder, config)


def test_damaged_record_is_named(tmp_path):
    (tmp_path / "place").mkdir()
    (tmp_path / "place/run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"place/run\.json, which says whose checkpoints these are, is damaged.*remove it"):
        use(RunFolder(tmp_path / "run"), on(str(tmp_path / "place")))


def test_one_of_two_that_claim_at_the_same_time_is_refused(place):
    """The other writes between our look and our word."""
    storage, other = Storage(place), Owner("other", "/there", 0.0)

    def meanwhile(owner):
        if owner is None:
            Storage(place).write("run.json", json.dumps(vars(other)).encode())

    with pytest.raises(StorageError, match="was written by another process at the same time"):
        claim(storage, Owner("ours", "/here", 0.0), meanwhile)
    assert read_owner(storage) == other


def test_a_driven_process_waits_for_one_of_the_attempt_before(tmp_path):
    """It may be on a node that nobody could tell to end it, and ends when it notices that its peers are gone."""
    first = RunFolder(tmp_path / "run").locked()
    first.__enter__()
    with pytest.raises(RunFolderError, match="another process trains in"), RunFolder(tmp_path / "run", wait_s=0.1).locked():
        pass
    timer = threading.Timer(0.3, lambda: first.__exit__(None, None, None))
    timer.start()
    with RunFolder(tmp_path / "run", wait_s=20.0).locked():
        assert not timer.is_alive() or timer.finished.is_set()

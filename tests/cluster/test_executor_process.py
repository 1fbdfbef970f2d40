"""An executor's folder: one for a node, of one user, with one executor, which says which process it is."""

import json
import os
from pathlib import Path

import pytest
from filelock import FileLock

from megascale_jax.cluster import executor_process as module
from megascale_jax.cluster.executor_file import EXECUTOR_FILE, executor_process, record_executor
from megascale_jax.cluster.executor_process import main, parse, scratch_folder
from megascale_jax.cluster.job import port_of
from megascale_jax.cluster.journal import Journal
from megascale_jax.cluster.ports import address_towards
from megascale_jax.errors import UsageError

ARGUMENTS = ("--driver", "127.0.0.1:1", "--security", "nowhere", "--node", "n1")


def test_an_executor_is_found_by_what_it_wrote(tmp_path):
    record_executor(tmp_path)
    found = executor_process(tmp_path)
    assert found is not None and found.pid == os.getpid()
    record = json.loads((tmp_path / EXECUTOR_FILE).read_text())
    (tmp_path / EXECUTOR_FILE).write_text(json.dumps(record | {"started": record["started"] - 1}))
    assert executor_process(tmp_path) is None, "another process with its number"


def test_a_node_has_one_executor(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOCK_S", 0.05)
    with FileLock(tmp_path / "executor.lock"), pytest.raises(UsageError, match="another executor has"):
        main([*ARGUMENTS, "--folder", str(tmp_path), "--", "true"])
    assert not (tmp_path / EXECUTOR_FILE).exists()


def test_a_folder_may_be_named_by_variables_of_the_node(monkeypatch):
    monkeypatch.setenv("LOCAL_DISK", "/disk")
    assert parse([*ARGUMENTS, "--folder", "$LOCAL_DISK/n1", "--", "true"]).folder == Path("/disk/n1")


def test_the_folder_of_a_node_is_on_its_own_disk_and_private(tmp_path):
    place = {"TMPDIR": str(tmp_path), "SLURM_TMPDIR": str(tmp_path / "away"), "SLURM_JOB_ID": "7"}
    folder = scratch_folder(place, "n1")
    assert folder == tmp_path / f"megascale-{os.geteuid()}-7" / "n1" == scratch_folder(place, "n1")
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    folder.parent.chmod(0o770)
    with pytest.raises(UsageError, match="nobody else may write"):
        scratch_folder(place, "n1")
    folder.parent.chmod(0o700)
    (folder.parent / "n2").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="nobody else may write"):
        scratch_folder(place, "n2")


def test_the_address_of_this_host_depends_on_who_is_to_reach_it():
    assert address_towards(("127.0.0.2", 1)) in ("127.0.0.1", "127.0.0.2")
    with pytest.raises(OSError):
        address_towards(("nowhere.invalid", 1))


def test_a_driver_keeps_its_port_on_its_host_and_takes_another_elsewhere(tmp_path):
    with Journal(tmp_path / "journal.sqlite") as journal:
        port = port_of(journal, "127.0.0.1", 0)
        assert port_of(journal, "127.0.0.1", 0) == port
        assert port_of(journal, "127.0.0.2", 4321) == 4321
        assert port_of(journal, "127.0.0.2", 0) == 4321
        assert port_of(journal, "127.0.0.1", 0) != 4321

"""The prepared folder of a run, also when several processes ask for it at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from megascale_jax.config.schema import DataConfig
from megascale_jax.data import select
from megascale_jax.data.manifest import read_manifest
from megascale_jax.data.select import prepare_if_missing, prepared_name
from megascale_jax.errors import DataError

PROCESS = """
import sys
from pathlib import Path
from megascale_jax.config.schema import DataConfig
from megascale_jax.data import select
real = select.prepare
def counted(source, folder, **options):
    existed = folder.exists()
    real(source, folder, **options)
    if not existed:
        print("prepared")
select.prepare = counted
print(select.prepare_if_missing(DataConfig(source=sys.argv[1]), 32, Path(sys.argv[2]), False))
"""


def test_source_is_prepared_once_and_reused(corpus, tmp_path):
    config = DataConfig(source=str(corpus))
    folder = Path(prepare_if_missing(config, 32, tmp_path / "cache", False))
    assert folder.parent == tmp_path / "cache"
    assert read_manifest(folder).sequence_length == 32
    modified = (folder / "manifest.json").stat().st_mtime_ns
    assert prepare_if_missing(config, 32, tmp_path / "cache", False) == folder
    assert (folder / "manifest.json").stat().st_mtime_ns == modified
    assert prepare_if_missing(config, 16, tmp_path / "cache", False) != folder


def test_changed_corpus_gets_a_new_folder(corpus, tmp_path):
    config = DataConfig(source=str(corpus))
    before = prepare_if_missing(config, 32, tmp_path / "cache", False)
    (corpus / "000.txt").write_text("changed")
    after = prepare_if_missing(config, 32, tmp_path / "cache", False)
    assert before != after
    assert read_manifest(before).digest != read_manifest(after).digest


def test_name_says_source_tokenizer_and_length():
    assert prepared_name("stdlib", "bytes", 128).startswith("stdlib-bytes-128-")


def test_another_layout_of_the_folder_is_another_name(corpus, monkeypatch):
    now = prepared_name(str(corpus), "bytes", 32)
    monkeypatch.setattr(select, "MANIFEST_VERSION", 1)
    assert prepared_name(str(corpus), "bytes", 32) != now


def test_one_of_three_processes_prepares_when_all_start_at_once(corpus, tmp_path):
    arguments = [sys.executable, "-c", PROCESS, str(corpus), str(tmp_path / "cache")]
    processes = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({output[-1] for output in outputs}) == 1
    assert sum("prepared" in output for output in outputs) == 1


def test_waiting_ends_with_the_name_of_the_lock(corpus, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    name = prepared_name(str(corpus), "bytes", 32)
    with FileLock(cache / f".{name}.lock"), pytest.raises(DataError, match=rf"0 s \(lock .*{name}.lock\)"):
        prepare_if_missing(DataConfig(source=str(corpus)), 32, cache, False, lock_timeout_s=0.05)


def test_remains_of_a_killed_process_are_removed_when_old(corpus, tmp_path):
    cache = tmp_path / "cache"
    name = prepared_name(str(corpus), "bytes", 32)
    old, young = (cache / f".{name}.partial-{suffix}" for suffix in ("old", "young"))
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "tokens.bin").write_bytes(b"x")
    os.utime(old, (0, 0))
    prepare_if_missing(DataConfig(source=str(corpus)), 32, cache, False)
    assert (old.exists(), young.exists()) == (False, True)


def test_prepared_folder_is_taken_as_it_is_and_checked(make_prepared, tmp_path):
    folder = make_prepared()
    assert prepare_if_missing(DataConfig(prepared=str(folder), source="absent"), 32, tmp_path / "cache", False) == folder
    assert not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match="No prepared data"):
        prepare_if_missing(DataConfig(prepared=str(tmp_path / "absent")), 32, tmp_path / "cache", False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(), "train.data.prepared=FOLDER"),
        (DataConfig(source="/absent"), "No corpus"),
        (DataConfig(source="stdlib", tokenizer="absent.json"), "No tokenizer"),
    ],
)
def test_unusable_configuration_makes_no_cache(tmp_path, config, message):
    with pytest.raises(DataError, match=message):
        prepare_if_missing(config, 32, tmp_path / "cache", False)
    assert not (tmp_path / "cache").exists()

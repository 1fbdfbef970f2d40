"""Prepared data in an object store: the same rows in the same order as from a disk, few requests, and errors that say where."""

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from megascale_jax.cli.data import app
from megascale_jax.config.schema import DataConfig
from megascale_jax.data import files, rows
from megascale_jax.data.batch import Batch
from megascale_jax.data.host import HostGroup
from megascale_jax.data.host_batches import HostBatches
from megascale_jax.data.host_iterator import HostIterator
from megascale_jax.data.inspection import inspect
from megascale_jax.data.manifest import read_manifest
from megascale_jax.data.mixture import TrainingData, make_phases
from megascale_jax.data.pipeline import BatchIterator, TrainIterator, held_out_batches
from megascale_jax.data.prepare import prepare
from megascale_jax.data.prepared import Prepared, open_prepared, stored_rows
from megascale_jax.data.select import prepare_if_missing
from megascale_jax.errors import DataError
from tests.fake_s3 import FakeS3

URL = "s3://bucket/corpora/one"
LAYOUT: dict[str, Any] = {"global_batch_size": 16, "data_size": 4, "data_indices": [0, 1, 2, 3], "micro_batch_size": 2, "seed": 3}
ROW_BYTES = 33 * 2
FEW_RETRIES = {**files.CONTEXT, "s3_request_retries": {"max_retries": 1, "initial_delay": "10ms", "max_delay": "10ms"}}


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Several row files of a split."""
    monkeypatch.setattr(rows, "FILE_BYTES", 50 * (ROW_BYTES + 8))


def upload(folder: Path, store: FakeS3, prefix: str = "corpora/one") -> None:
    """As `aws s3 cp --recursive` does."""
    for path in folder.rglob("*"):
        if path.is_file():
            store.objects[f"{prefix}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()


@pytest.fixture
def local(make_prepared) -> Prepared:
    return open_prepared(make_prepared())


@pytest.fixture
def remote(local, s3) -> Prepared:
    upload(Path(local.folder), s3)
    return open_prepared(URL)


@pytest.fixture
def prepare_remotely(corpus, s3):
    def make(url: str = URL, **options):
        return prepare(str(corpus), url, **{"sequence_length": 32, "held_out_fraction": 0.25} | options)

    return make


def loader(data: Prepared | TrainingData, name: str = "", **options) -> HostIterator:
    return HostIterator(data, group=HostGroup(0, 1, f"remote {os.getpid()} {name}"), limit_s=30.0, **LAYOUT | options)


def assert_equal(left: Batch, right: Batch) -> None:
    assert left.keys() == right.keys()
    for key, array in left.items():
        assert np.array_equal(array, right[key]), key


def check(own: BatchIterator, reference: BatchIterator, steps: int) -> None:
    for _ in range(steps):
        assert_equal(next(own), next(reference))


def row_files(store: FakeS3) -> list[str]:
    return sorted(key for key in store.objects if key.endswith(".rows"))


@pytest.mark.parametrize("tokenizer", [{}, {"train_bpe_vocab": 300}])
def test_preparing_into_a_bucket_gives_the_files_of_a_folder_and_the_manifest_last(make_prepared, prepare_remotely, s3, tokenizer):
    folder = make_prepared(**tokenizer)
    manifest = prepare_remotely(**tokenizer)
    assert manifest == read_manifest(folder) == read_manifest(URL)
    expected = {f"corpora/one/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert s3.objects == expected
    assert len(row_files(s3)) > 2
    assert s3.written[-1] == "corpora/one/manifest.json"
    opened = open_prepared(URL, sequence_length=32)
    assert opened.tokenizer.decode(opened.tokenizer.encode("λ x")) == "λ x"


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("make", [TrainIterator, loader])
def test_batches_are_those_of_a_folder_over_epochs_and_after_resume(local, remote, make, shuffle):
    layout = LAYOUT | {"shuffle": shuffle}
    steps = local.manifest.train.rows // 16 + 3
    with TrainIterator(local, **layout) as reference, make(remote, **layout) as own:
        check(own, reference, steps)
        state = json.loads(json.dumps(own.state()))
        assert state == reference.state()
        with make(remote, **layout) as resumed:
            own.close()
            resumed.restore(state)
            check(resumed, reference, 3)


def test_loader_that_is_killed_goes_on_at_the_very_batch(local, remote):
    with TrainIterator(local, **LAYOUT) as reference, loader(remote) as own:
        for steps in (2, 5):
            check(own, reference, steps)
            assert own.loader_pid is not None
            os.kill(own.loader_pid, signal.SIGKILL)
        check(own, reference, 5)


def test_host_batches_are_right_wherever_they_are_asked_to_go_on(local, remote):
    with loader(remote) as own, TrainIterator(local, **LAYOUT) as reference:
        expected = [next(reference) for _ in range(6)]
        batches = HostBatches(own._request(), [(0, 1, 2, 3)], 2)
        for step in (1, 2, 5, 0, 4):
            batches.fill(step % 2, 16 * step)
            assert_equal(dict(batches.ring.block(step % 2, 0)), expected[step])
        batches.close_descriptor()


def test_held_out_batches_and_the_inspection_are_those_of_a_folder(local, remote):
    layout = {key: value for key, value in LAYOUT.items() if key != "seed"}
    for own, reference in zip(held_out_batches(remote, **layout), held_out_batches(local, **layout), strict=True):
        assert_equal(own, reference)
    for split in ("train", "held_out"):
        assert inspect(remote, split, 3) == inspect(local, split, 3)


def test_mixture_of_a_folder_and_a_bucket_is_that_of_two_folders(local, corpus, make_prepared, s3):
    (corpus / "more.txt").write_text("x" * 5000)
    other = make_prepared("other")
    upload(other, s3)
    phases = make_phases({"code": 0.3, "web": 0.7}, {48: {"code": 0.6}})
    near = TrainingData({"code": open_prepared(other), "web": local}, phases)
    far = TrainingData({"code": open_prepared(URL), "web": local}, phases)
    assert far.is_remote and not near.is_remote
    for make in (TrainIterator, loader):
        with TrainIterator(near, **LAYOUT) as reference, make(far, **LAYOUT) as own:
            check(own, reference, 6)
    held_out = {key: value for key, value in LAYOUT.items() if key != "seed"}
    for own, reference in zip(held_out_batches(far, **held_out), held_out_batches(near, **held_out), strict=True):
        assert_equal(own, reference)


def test_a_batch_costs_a_request_a_row_and_hardly_more_than_its_bytes_many_at_once(remote, s3):
    source = stored_rows(URL, remote.manifest, "train")
    s3.delay_s = 0.05
    wanted = list(range(0, 160, 5))
    before, sent = s3.requests["GET"], s3.sent_bytes
    s3.most_under_way = 0
    found = source.begin(wanted)()
    assert s3.requests["GET"] - before == len(wanted) == len(found)
    assert s3.sent_bytes - sent == len(wanted) * (ROW_BYTES + 8)
    assert s3.most_under_way > 16


def test_rows_in_order_are_asked_for_together(remote, s3):
    source = stored_rows(URL, remote.manifest, "train")
    before = s3.requests["GET"]
    assert len(source.begin(range(len(source)))()) > 200
    assert s3.requests["GET"] - before == len([name for name in row_files(s3) if "train" in name])


@pytest.mark.parametrize("make", [TrainIterator, loader])
def test_rows_of_the_next_batches_are_asked_for_before_this_one_is_there(remote, s3, make):
    s3.delay_s = 0.1
    s3.most_under_way = 0
    with make(remote, **LAYOUT | {"data_indices": [0], "shuffle": True}) as own:  # four rows a batch
        for _ in range(3):
            next(own)
    assert s3.most_under_way > 4


def test_flipped_bit_is_found_and_its_row_named(remote, local, s3):
    with TrainIterator(local, **LAYOUT) as reference:
        row = int(reference.sample_ids(2)[5])
    per_file = remote.manifest.rows_per_file
    key = f"corpora/one/{remote.manifest.rows_folder}/train-{row // per_file:05}.rows"
    content = bytearray(s3.objects[key])
    content[row % per_file * (ROW_BYTES + 8) + 7] ^= 1
    s3.objects[key] = bytes(content)
    for make in (TrainIterator, loader):
        with TrainIterator(local, **LAYOUT) as reference, make(remote, **LAYOUT) as own:
            check(own, reference, 2)
            with pytest.raises(DataError, match=rf"Row {row} of s3://{'bucket/' + key} is damaged"):
                next(own)


@pytest.mark.parametrize("when", ["at opening", "later"])
def test_file_that_was_not_copied_is_named(remote, s3, when):
    key = row_files(s3)[-1]
    assert "train" in key
    if when == "at opening":
        del s3.objects[key]
        with pytest.raises(DataError, match=rf"s3://bucket/{key} is missing. Copy the folder again"):
            stored_rows(URL, remote.manifest, "train")
    else:
        source = stored_rows(URL, remote.manifest, "train")
        s3.objects[key] = s3.objects[key][:-1]
        with pytest.raises(DataError, match=rf"s3://bucket/{key} cannot be read \(OUT_OF_RANGE"):
            source[len(source) - 1]
        del s3.objects[key]
        with pytest.raises(DataError, match=rf"s3://bucket/{key} is missing"):
            source[len(source) - 1]


def test_refused_access_missing_data_and_missing_bucket_say_the_address(remote, s3):
    source = stored_rows(URL, remote.manifest, "train")
    for url in ("s3://bucket/nothing", "s3://absent/corpora/one"):
        with pytest.raises(DataError, match=rf"{url} has no manifest.json: .* there is no such bucket"):
            open_prepared(url)
    s3.refuse = 403
    for action in (lambda: open_prepared(URL), lambda: source[0]):
        with pytest.raises(DataError, match=r"s3://bucket/corpora/one/.* cannot be read .*AccessDenied.* credentials"):
            action()


def test_server_that_is_gone_or_silent_is_given_up(remote, s3, monkeypatch):
    monkeypatch.setattr(files, "CONTEXT", FEW_RETRIES)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(files, "WAIT_S", 0.3)
        with pytest.raises(DataError, match=r"s3://bucket/corpora/one/manifest.json cannot be read .*no answer within"):
            open_prepared(URL)
    monkeypatch.setattr(files, "WAIT_S", 20.0)
    with pytest.raises(DataError, match=r"s3://bucket/corpora/one/manifest.json cannot be read .*connect.* network"):
        open_prepared(URL)


def test_short_outage_is_mended(remote, local, s3, monkeypatch):
    with TrainIterator(local, **LAYOUT) as reference, loader(remote) as own:
        check(own, reference, 1)
        s3.refuse = 503
        monkeypatch.setattr(s3, "on_refusal", lambda: setattr(s3, "refuse", None))
        check(own, reference, 8)


def test_equal_request_uploads_nothing_and_another_one_needs_force(prepare_remotely, s3):
    first = prepare_remotely()
    written = len(s3.written)
    assert prepare_remotely() == first
    assert len(s3.written) == written
    with pytest.raises(DataError, match=r"s3://bucket/corpora/one was prepared from another request: seed 0 \(now 1\).*--force"):
        prepare_remotely(seed=1)
    assert len(s3.written) == written
    source = stored_rows(URL, first, "train")
    second = prepare_remotely(seed=1, force=True)
    assert read_manifest(URL) == second != first
    assert all(second.rows_folder in key for key in row_files(s3))
    with pytest.raises(DataError, match="is missing"):  # whoever still reads the old rows gets no others
        source[0]


@pytest.mark.parametrize("writes", [0, 1, 5])
def test_upload_that_failed_leaves_no_manifest_and_is_written_over(prepare_remotely, s3, writes):
    s3.refuse_after_writes = writes
    with pytest.raises(DataError, match=r"s3://bucket/corpora/one cannot be written \(PERMISSION_DENIED"):
        prepare_remotely()
    assert "corpora/one/manifest.json" not in s3.objects
    s3.refuse_after_writes = None
    assert prepare_remotely() == read_manifest(URL)


@pytest.mark.parametrize("writes", [1, 2, 5])
def test_replacement_that_was_cut_off_leaves_what_was_there_whole(prepare_remotely, s3, writes):
    first = prepare_remotely(train_bpe_vocab=300)
    s3.refuse_after_writes = len(s3.written) + writes
    with pytest.raises(DataError, match="cannot be written"):
        prepare_remotely(train_bpe_vocab=280, force=True)
    assert open_prepared(URL).manifest == first


def test_what_is_no_prepared_data_is_not_overwritten(prepare_remotely, s3):
    s3.objects["corpora/one/thesis.txt"] = b"years of work"
    for force in (False, True):
        with pytest.raises(DataError, match=r"s3://bucket/corpora/one holds thesis.txt and is no prepared data"):
            prepare_remotely(force=force)
    assert list(s3.objects) == ["corpora/one/thesis.txt"]


def test_addresses_that_cannot_be_written_or_mean_nothing_are_refused(prepare_remotely, s3):
    with pytest.raises(DataError, match="can be read only"):
        prepare_remotely("https://example.org/data")
    with pytest.raises(DataError, match=r"s3:// is no address of data"):
        open_prepared("s3://")


def test_configuration_names_a_bucket(remote, tmp_path):
    assert prepare_if_missing(DataConfig(prepared=URL), 32, tmp_path, False) == URL
    with pytest.raises(DataError, match="s3://bucket/absent has no"):
        prepare_if_missing(DataConfig(prepared="s3://bucket/absent"), 32, tmp_path, False)


def test_commands_prepare_into_and_look_at_a_bucket(corpus, s3):
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}, catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    said = run("prepare", str(corpus), "-o", URL, "--sequence-length", "32")
    assert f"train.data.prepared={URL}" in said
    assert f"{URL}, train: {read_manifest(URL).train.rows:,} rows" in run("inspect", URL)

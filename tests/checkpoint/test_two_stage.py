"""One rank, its keeper and its storage: what is in memory, what is durable, and what happens when something dies or rots."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from megascale_jax.checkpoint.channel import connect_unix
from megascale_jax.checkpoint.keeper_client import keeper_folder
from megascale_jax.checkpoint.manifest import Part, published_steps
from megascale_jax.checkpoint.two_stage import CheckpointStore
from megascale_jax.config.schema import CheckpointConfig
from megascale_jax.errors import CheckpointError
from tests.checkpoint.states import check_state, plan, random_state

LIMIT_S = 30


class Run:
    """A run on a folder: stores one after the other, as starts of a trainer are."""

    def __init__(self, folder, identity):
        self.folder, self.identity, self.said, self.stores = folder, identity, [], []

    def store(self, here=None, **settings):
        settings = CheckpointConfig(**({"limit_s": LIMIT_S} | settings))
        self.stores.append(CheckpointStore(self.folder, self.identity, here or plan(data=2), settings, self.said.append))
        return self.stores[-1]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGASCALE_KEEPER", str(tmp_path / "keeper"))
    run = Run(tmp_path / "checkpoints", tmp_path.name)
    yield run
    for store in run.stores:
        store.close(is_over=True)


def save(store, here, *steps):
    for step in steps:
        store.save(step, random_state(here), {"note": step})
    store.wait()


def until(condition):
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "did not happen"
        time.sleep(0.02)


def report_of_rank_1(reports):
    """That it wrote its part: none, as the first rank of a plan for one owns every block. Whole at once, as storage writes it."""
    written = reports.parent / "written"
    written.write_bytes(Part(1).to_bytes())
    written.rename(reports / "1.json")


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def slots_of(pid):
    """The memory that a process holds as slots: one descriptor of each."""
    held = [path for path in Path(f"/proc/{pid}/fd").iterdir() if "megascale-slot" in str(path.readlink())]
    return list({path.stat().st_ino: path for path in held}.values())


def flip(path, place=None):
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(size // 2 if place is None else place)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_saved_state_is_published_and_comes_back_from_memory_then_from_storage(run):
    here = plan(data=2)
    store = run.store(here)
    assert store.restore() is None
    save(store, here, 3, 7)
    assert published_steps(run.folder) == [3, 7]
    assert store.durable()["step"] == 7 and store.errors == 0
    store.close()
    again = run.store(here)
    restored = again.restore()
    assert (restored.step, restored.tier, restored.description) == (7, "local", {"note": 7})
    check_state(here, restored.arrays)
    again.close(is_over=True)
    restored = run.store(here).restore()
    assert (restored.step, restored.tier) == (7, "durable")
    check_state(here, restored.arrays)
    assert run.said == []


def test_keeper_ends_and_gives_its_memory_back_when_the_run_is_over(run):
    here = plan(data=2)
    store = run.store(here)
    save(store, here, 1, 2)
    pid = store.keeper_pid
    assert len(slots_of(pid)) == 2
    store.close(is_over=True)
    until(lambda: not is_alive(pid))
    with pytest.raises(ConnectionError, match="no keeper answers"):
        connect_unix(keeper_folder(f"{run.identity} {run.folder}"), LIMIT_S)


def test_keeper_outlives_its_rank_and_ends_when_nobody_comes_back(run, monkeypatch):
    monkeypatch.setenv("MEGASCALE_KEEPER_IDLE_S", "1")
    here = plan(data=2)
    store = run.store(here)
    save(store, here, 1)
    pid = store.keeper_pid
    store.close()
    time.sleep(0.3)
    assert is_alive(pid)
    until(lambda: not is_alive(pid))


def test_states_of_another_run_or_layout_are_not_taken_from_memory(run, tmp_path):
    here, other = plan(data=2), plan(tensor=2)
    store = run.store(here)
    save(store, here, 7)
    store.close()
    stranger = Run(tmp_path / "elsewhere", "another run")
    assert stranger.store(here).restore() is None
    stranger.stores[0].close(is_over=True)
    restored = run.store(other).restore()
    assert restored.tier == "durable"
    check_state(other, restored.arrays)


def test_keeper_that_dies_is_replaced_and_its_work_is_finished(run):
    """Killed between stage 1 and publication: a part is missing until the next keeper is there."""
    here = plan(data=2)
    store = run.store(here)
    store._target = store._target.__class__(**{**vars(store._target), "ranks": 2})  # waits for a second rank's part
    store.save(7, random_state(here), {"note": 7})
    reports = run.folder / "7" / f"{store._launch}.parts"
    until(lambda: (reports / "0.json").is_file())
    killed = store.keeper_pid
    os.kill(killed, signal.SIGKILL)
    until(lambda: store.keeper_pid != killed)
    assert published_steps(run.folder) == []
    report_of_rank_1(reports)
    until(lambda: published_steps(run.folder) == [7] or store.errors)
    store.wait()
    assert store.errors == 0, run.said


def test_keeper_that_takes_over_holds_the_states_and_publishes_none_again(run):
    """Retention has let the older one go: to publish it again would wait for parts that nobody writes."""
    here = plan(data=2)
    store = run.store(here, keep=1)
    save(store, here, 1, 2)
    killed = store.keeper_pid
    os.kill(killed, signal.SIGKILL)
    until(lambda: store.keeper_pid != killed)
    store.wait()
    assert (published_steps(run.folder), store.errors) == ([2], 0)
    gone = [json.loads(line)["folder"] for line in (run.folder / "deletions.jsonl").read_text().splitlines()]
    assert gone == ["1"], "let go once, and not published in between"
    store.close()
    restored = run.store(here).restore()
    assert (restored.step, restored.tier) == (2, "local")


def test_rotten_memory_is_passed_over(run):
    here = plan(data=2)
    store = run.store(here)
    save(store, here, 3, 7)
    for slot in slots_of(store.keeper_pid):
        flip(slot)
    store.close()
    again = run.store(here)
    restored = again.restore()
    assert (restored.step, restored.tier) == (7, "durable")
    assert [line for line in run.said if "step 7 in memory is passed over" in line and "wrong checksum" in line]
    check_state(here, restored.arrays)
    again.close()
    said = len(run.said)
    assert run.store(here).restore().tier == "durable" and len(run.said) == said, "it is not offered a second time"


def test_damaged_checkpoint_is_marked_and_the_one_before_is_taken(run):
    here = plan(data=2)
    store = run.store(here)
    save(store, here, 3, 7)
    store.close(is_over=True)
    victim = max((run.folder / "7").rglob("d/*"), key=lambda path: path.stat().st_size)
    flip(victim)
    store = run.store(here)
    restored = store.restore()
    assert (restored.step, restored.tier) == (3, "durable")
    check_state(here, restored.arrays)
    assert [line for line in run.said if "step 7 is damaged and passed over" in line]
    assert published_steps(run.folder) == [3]
    save(store, here, 7)
    assert published_steps(run.folder) == [3, 7]
    store.close(is_over=True)
    assert run.store(here).restore().step == 7


def test_no_usable_checkpoint_is_an_error_and_not_a_fresh_start(run):
    here = plan(data=2)
    store = run.store(here)
    save(store, here, 7)
    store.close(is_over=True)
    (run.folder / "7/manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints .* can be used"):
        run.store(here).restore()


def test_unreadable_storage_is_an_error_and_no_reason_for_an_older_step(run, monkeypatch):
    here = plan(data=2)
    store = run.store(here)
    save(store, here, 3, 7)
    store.close(is_over=True)
    from megascale_jax.checkpoint import arrays
    from megascale_jax.comm.storage import StorageError

    def refuse(future):
        raise StorageError("UNAVAILABLE: the network is down")

    store = run.store(here)
    monkeypatch.setattr(arrays, "wait", refuse)
    with pytest.raises(CheckpointError, match="cannot be read now"):
        store.restore()
    monkeypatch.undo()
    assert published_steps(run.folder) == [3, 7]


def test_too_little_host_memory_is_said_and_counted_and_training_goes_on(run, monkeypatch):
    here = plan(data=2)
    store = run.store(here)
    free = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free._replace(available=1000))
    store.prepare()
    save(store, here, 3)
    assert store.errors == 1 and published_steps(run.folder) == []
    assert [line for line in run.said if "step 3 was not saved" in line and "do not fit into the memory of this host" in line]
    monkeypatch.undo()
    monkeypatch.setenv("MEGASCALE_KEEPER", str(run.folder.parent / "keeper"))
    save(store, here, 4)
    assert published_steps(run.folder) == [4]


def test_retention_follows_the_configuration(run):
    here = plan(data=2)
    store = run.store(here, keep=1, keep_every=4)
    save(store, here, 3, 4, 7, 9)
    assert published_steps(run.folder) == [4, 9]
    gone = [json.loads(line)["folder"] for line in (run.folder / "deletions.jsonl").read_text().splitlines()]
    assert gone == ["3", "7"]


def test_save_whose_other_parts_never_come_fails_at_the_limit_and_leaves_nothing(run):
    here = plan(data=2)
    store = run.store(here)
    save(store, here, 1)
    store._target = store._target.__class__(**{**vars(store._target), "ranks": 2, "publish_limit_s": 0.5})
    save(store, here, 2)
    assert store.errors == 1
    assert [line for line in run.said if "step 2 was not saved" in line and "no report of rank [1]" in line], run.said
    assert published_steps(run.folder) == [1]
    assert not (run.folder / "2").exists()


def test_newer_save_is_published_without_the_older_one_whose_other_part_never_comes(run):
    here = plan(data=2)
    store = run.store(here)
    store._target = store._target.__class__(**{**vars(store._target), "ranks": 2, "publish_limit_s": 1000})
    for step in (1, 2):
        store.save(step, random_state(here), {})
    reports = run.folder / "2" / f"{store._launch}.parts"
    until(lambda: (reports / "0.json").is_file())
    report_of_rank_1(reports)
    store.wait()
    assert published_steps(run.folder) == [2] and store.durable()["step"] == 2
    assert store.errors == 1 and [line for line in run.said if "step 1 was not saved" in line and "step 2 was published meanwhile" in line]
    assert not (run.folder / "1").exists()


def test_part_that_is_missing_is_never_published(run):
    """A report without its blocks, as after a folder was lost: the older checkpoints stay, nothing is published in their place."""
    here = plan(data=2)
    store = run.store(here)
    save(store, here, 1)
    store._target = store._target.__class__(**{**vars(store._target), "ranks": 2})
    store.save(2, random_state(here), {})
    reports = run.folder / "2" / f"{store._launch}.parts"
    until(lambda: (reports / "0.json").is_file())
    shutil.rmtree(run.folder / "2" / store._launch / "ocdbt.process_0")
    report_of_rank_1(reports)
    store.wait()
    assert store.errors == 1 and [line for line in run.said if "0 blocks were written, expected" in line], run.said
    assert published_steps(run.folder) == [1]


def test_states_that_are_not_safe_stay_in_memory_when_a_run_ends(run):
    here = plan(data=2)
    store = run.store(here)
    store._target = store._target.__class__(**{**vars(store._target), "ranks": 2, "publish_limit_s": 0.3})
    save(store, here, 5)
    assert store.errors == 1
    store.close(is_over=True)
    restored = run.store(here).restore()
    assert (restored.step, restored.tier) == (5, "local")


def test_late_answers_are_not_taken_for_others(run):
    """A question that ran out of time ends its connection; the next one goes to a keeper that starts with a clean line."""
    here = plan(data=2)
    store = run.store(here)
    save(store, here, 1)
    client = store._memory._keeper
    with store._turn:  # the store's own thread asks too
        client._channel.limit(0.05)
        os.kill(store.keeper_pid, signal.SIGSTOP)
        try:
            until(lambda: all(thread.read_text().split()[2] == "T" for thread in Path(f"/proc/{store.keeper_pid}/task").glob("*/stat")))
            client._channel.send({"op": "status", "limit_s": 1})
            with pytest.raises(ConnectionError):
                client._channel.receive()
        finally:
            client._channel.close()
            os.kill(store.keeper_pid, signal.SIGCONT)
    save(store, here, 2)
    assert published_steps(run.folder) == [1, 2] and store.errors == 0


def test_checkpoints_of_another_run_are_neither_taken_nor_counted(run, tmp_path):
    """What the keeper of a run that was started anew with --fresh still published."""
    here = plan(data=2)
    old = run.store(here)
    save(old, here, 30)
    old.close(is_over=True)
    run.identity = "started anew"
    store = run.store(here, keep=1)
    assert store.restore() is None
    save(store, here, 5, 6)
    assert published_steps(run.folder) == [6, 30]
    store.close(is_over=True)
    assert run.store(here).restore().step == 6

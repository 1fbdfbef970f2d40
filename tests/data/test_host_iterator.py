"""One loader for the processes of a host: the same batches as without it, whoever dies.

The ranks of most tests are threads of this process: to the loader they are connections, wherever they come from.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale_jax.data import loader_client, wire
from megascale_jax.data.batch import Batch
from megascale_jax.data.host import HostGroup
from megascale_jax.data.host_iterator import HostIterator
from megascale_jax.data.pipeline import TrainIterator
from megascale_jax.data.prepared import Prepared, open_prepared
from megascale_jax.data.wire import listen
from megascale_jax.errors import DataError

ROOT = Path(__file__).parents[2]
LAYOUT: dict[str, Any] = {"global_batch_size": 16, "data_size": 4, "micro_batch_size": 2, "seed": 3}
LIMIT_S = 30.0


@pytest.fixture
def prepared(make_prepared) -> Prepared:
    return open_prepared(make_prepared())


@pytest.fixture
def name(request) -> str:
    return f"{request.node.name} {os.getpid()}"


def assert_equal(left: Batch, right: Batch) -> None:
    assert left.keys() == right.keys()
    for key, array in left.items():
        assert np.array_equal(array, right[key]), key


class Host:
    """All ranks of a host with the data indices they serve, and beside each a ``TrainIterator`` that it must equal."""

    def __init__(self, prepared: Prepared, name: str, indices: list[list[int]], limit_s: float = LIMIT_S, **options):
        groups = [HostGroup(rank, len(indices), name) for rank in range(len(indices))]
        layout = LAYOUT | options
        self.ranks = [
            HostIterator(prepared, group=group, data_indices=own, limit_s=limit_s, **layout)
            for group, own in zip(groups, indices, strict=True)
        ]
        self.references = [TrainIterator(prepared, data_indices=own, **layout) for own in indices]
        self._pool = ThreadPoolExecutor(len(indices))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        list(self._pool.map(lambda rank: rank.close(), self.ranks))
        self._pool.shutdown()
        for reference in self.references:
            reference.close()

    def next(self) -> list[Batch]:
        return list(self._pool.map(next, self.ranks))

    def check(self, steps: int = 1) -> None:
        for _ in range(steps):
            for own, reference in zip(self.next(), self.references, strict=True):
                assert_equal(own, next(reference))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("indices", [[[0, 1, 2, 3]], [[2, 1]], [[0], [1], [2], [3]], [[3, 0], [2, 1], [0, 3], [3, 0]], [[0, 1], [1, 2]]])
def test_every_rank_gets_its_rows_in_contiguous_read_only_arrays(prepared, name, indices, shuffle):
    with Host(prepared, name, indices, shuffle=shuffle, skip=[(20, 45)]) as host:
        host.check(2 * prepared.manifest.train.rows // LAYOUT["global_batch_size"])
        for batch in host.next():
            assert all(array.flags.c_contiguous and not array.flags.writeable for array in batch.values())


def test_batch_stays_until_the_second_next(prepared, name):
    with Host(prepared, name, [[0, 1], [2, 3]]) as host:
        former = host.next()
        copies = [{key: array.copy() for key, array in batch.items()} for batch in former]
        for _ in range(12):
            batches = host.next()
            time.sleep(0.02)  # the loader fills whatever slot it takes for free
            for batch, copy in zip(former, copies, strict=True):
                assert_equal(batch, copy)
            former, copies = batches, [{key: array.copy() for key, array in batch.items()} for batch in batches]


def test_state_restores_across_kinds_of_iterator_and_numbers_of_ranks(prepared, name):
    with Host(prepared, name, [[0], [1], [2], [3]]) as host:
        host.check(5)
        states = [json.loads(json.dumps(rank.state())) for rank in host.ranks]
    assert all(state == states[0] for state in states)
    with TrainIterator(prepared, data_indices=[0, 1, 2, 3], **LAYOUT) as reference:
        reference.restore(states[0])
        with Host(prepared, name, [[0, 1], [2, 3]]) as host:
            host.next()
            for rank in host.ranks:
                rank.restore(states[0])
                assert rank.state() == states[0]
            for _ in range(3):
                whole, halves = next(reference), host.next()
                assert_equal({key: np.concatenate([half[key] for half in halves], axis=1) for key in whole}, whole)


def test_closing_keeps_the_position(prepared, name):
    with Host(prepared, name, [[0], [1]]) as host:
        host.check(3)
        for rank in host.ranks:
            rank.close()
        host.check(3)


@pytest.mark.parametrize("indices", [[[0, 1, 2, 3]], [[0], [1], [2, 3]]])
def test_killed_loader_is_started_again_and_no_batch_is_lost_or_repeated(prepared, name, indices, caplog):
    with Host(prepared, name, indices) as host, caplog.at_level(logging.WARNING):
        for steps in (1, 5, 2):
            host.check(steps)
            os.kill(host.ranks[0].loader_pid, signal.SIGKILL)
        host.check(6)
    assert caplog.text.count("was killed by SIGKILL; starting it again at sample") == 3


def test_rank_that_has_its_batch_need_not_ask_for_another_to_mend_a_dead_loader(prepared, name):
    """It may wait in a collective for the rank that has none."""
    with Host(prepared, name, [[0], [1]]) as host:
        host.check(2)
        next(host.ranks[0])
        os.kill(host.ranks[0].loader_pid, signal.SIGKILL)
        batches = [next(host.ranks[1]) for _ in range(3)]
        for reference in host.references:
            next(reference)
        assert_equal(batches[1], next(host.references[1]))
        assert_equal(next(host.ranks[0]), next(host.references[0]))


def test_loader_that_always_dies_is_given_up_with_its_last_words(prepared, name, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nif any('loader' in a for a in sys.orig_argv): sys.exit('no loader here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Host(prepared, name, [[0], [1]]) as host:
        with pytest.raises(DataError, match=r"died 4 times .* ended with exit code 1.*\n(.*\n)*.*no loader here.*\n.*loader=thread"):
            next(host.ranks[0])
        with pytest.raises(DataError, match="started no loader within 0 s"):
            host.ranks[1]._limit_s = 0.2
            next(host.ranks[1])


def test_deaths_are_counted_anew_after_a_batch(prepared, name):
    with Host(prepared, name, [[0, 1, 2, 3]], shuffle=False) as host:
        for _ in range(loader_client.MAX_DEATHS + 2):
            host.check(4)  # more than a dead loader may have left behind
            os.kill(host.ranks[0].loader_pid, signal.SIGKILL)
        host.check(4)


def test_damaged_row_is_an_error_after_the_batches_before_it(make_prepared, name):
    prepared = open_prepared(make_prepared())
    (path,) = Path(prepared.folder).glob("rows-*/train-00000.rows")
    content = bytearray(path.read_bytes())
    with TrainIterator(prepared, data_indices=[0], **LAYOUT) as reference:
        row = reference._rows[int(reference.sample_ids(2)[5])]
    content[content.index(row.tobytes())] ^= 1
    path.write_bytes(content)
    with Host(prepared, name, [[0, 1], [2, 3]]) as host:
        host.check(2)
        for rank in host.ranks:
            for _ in range(2):
                with pytest.raises(DataError, match=r"Row \d+ of .* is damaged"):
                    next(rank)


def test_data_that_changed_since_it_was_opened_is_refused(make_prepared, name):
    prepared = open_prepared(make_prepared())
    make_prepared(seed=8, force=True)
    with (
        HostIterator(prepared, group=HostGroup(0, 1, name), data_indices=[0], **LAYOUT) as rank,
        pytest.raises(DataError, match="has changed since this run opened it"),
    ):
        next(rank)


def test_ranks_that_want_different_things_are_refused(prepared, name):
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(HostIterator(prepared, group=HostGroup(rank, 2, name), data_indices=[rank], **LAYOUT | {"seed": rank}))
            for rank in range(2)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        for result in [pool.submit(next, rank) for rank in ranks]:
            with pytest.raises(DataError, match="Local rank 0 wants data with seed 0, local rank 1 with 1"):
                result.result()


def test_ranks_at_different_positions_are_refused(prepared, name):
    with Host(prepared, name, [[0], [1]]) as host:
        host.ranks[1]._samples = 16
        with pytest.raises(DataError, match=r"different samples: \[0, 16\]"):
            host.next()


def test_two_processes_with_one_local_rank_are_refused(prepared, name):
    with Host(prepared, name, [[0], [1], [2]]) as host:
        host.ranks[2]._group = HostGroup(1, 3, name)
        with pytest.raises(DataError, match="call themselves local rank 1"):
            host.next()


def test_rank_that_never_comes_is_named_after_the_limit(prepared, name):
    with Host(prepared, name, [[0], [1], [2]], limit_s=1.0) as host:
        with ThreadPoolExecutor(2) as pool:
            results = [pool.submit(next, host.ranks[rank]) for rank in (0, 2)]
        with pytest.raises(DataError, match=r"local ranks \[1\] have not asked for data within 1 s"):
            results[1].result()
        with pytest.raises(DataError, match=r"local ranks \[1\] have not asked"):
            results[0].result()


def test_missing_local_rank_0_is_an_error_after_the_limit(prepared, name):
    started = time.monotonic()
    with Host(prepared, name, [[0], [1]], limit_s=0.3) as host, pytest.raises(DataError, match="started no loader within 0 s"):
        next(host.ranks[1])
    assert time.monotonic() - started < 5


def test_name_held_by_another_run_is_an_error_after_the_limit(prepared, name):
    listener = listen(name)
    with Host(prepared, name, [[0, 1, 2, 3]], limit_s=0.3) as host, pytest.raises(DataError, match="Another run of that name"):
        host.next()
    listener.close()


def test_rank_that_does_not_go_on_is_named_to_the_one_that_waits(prepared, name):
    with Host(prepared, name, [[0], [1]], limit_s=LIMIT_S) as host:
        host.check()
        client = host.ranks[0]._client
        assert client is not None
        client._limit_s = 0.5
        with pytest.raises(DataError, match=r"No batch within 0 s: the loader says .* local ranks \[1\] use the one at 0"):
            for _ in range(10):
                next(host.ranks[0])


RANK = """
import sys, time
from pathlib import Path
from megascale_jax.data.host import HostGroup
from megascale_jax.data.loader_client import LoaderClient
import json
request, rank, size, name = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
client = LoaderClient(HostGroup(rank, size, name), request, (rank,), 0, 30.0)
samples = 0
while True:
    batch = client.take()
    samples += request["global_batch_size"]
    print(int(batch["tokens"].sum()), flush=True)
    if client.loader is not None: print("loader", client.loader.pid, flush=True)
    client.release(samples)
    time.sleep(0.01)
"""


def start_ranks(prepared: Prepared, name: str, size: int) -> list[subprocess.Popen]:
    """Processes with a client each, without JAX."""
    with HostIterator(prepared, group=HostGroup(0, 1, name), data_indices=[0], **LAYOUT | {"shuffle": False}) as iterator:
        request = json.dumps(iterator._request())
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, request, str(rank), str(size), name],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def loader_pid(rank_0: subprocess.Popen) -> int:
    assert rank_0.stdout is not None and rank_0.stderr is not None
    for line in rank_0.stdout:
        if line.startswith("loader"):
            return int(line.split()[1])
    raise AssertionError(rank_0.stderr.read())


def wait_until_gone(pid: int, limit_s: float = 10.0) -> None:
    limit = time.monotonic() + limit_s
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
        assert time.monotonic() < limit, f"process {pid} still lives after {limit_s} s"
        time.sleep(0.01)


@pytest.mark.parametrize("victim", [0, 1])
def test_dead_rank_ends_the_others_with_a_clear_error_and_the_loader(prepared, name, victim):
    ranks = start_ranks(prepared, name, 3)
    loader = loader_pid(ranks[0])
    ranks[victim].kill()
    for rank, process in enumerate(ranks):
        errors = process.communicate(timeout=20)[1]
        assert process.returncode == (-signal.SIGKILL if rank == victim else 1)
        if rank != victim:
            assert f"Local rank {victim} of this host has died" in errors
    wait_until_gone(loader)


def shared_memory_names() -> set[str]:
    """Names that Python or this package could have given; other programs may come and go."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("megascale", "tmp", "psm"))}


def shared_memory_bytes() -> int:
    return 1024 * next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:"))


def test_hundred_kills_of_loaders_and_ranks_leave_nothing_behind(prepared, name):
    """SIGKILL at every stage: a loader that starts, that serves, the rank that owns it, all at once."""
    names_before = shared_memory_names()
    own = {"shuffle": False, "global_batch_size": 16 * 256}  # 4 MiB rings: a hundred of them would be seen
    memory_before = shared_memory_bytes()
    kills, loaders = 0, set()
    rng = np.random.default_rng(0)
    socket_name = wire._address(name).decode().replace("\0", "@")
    with Host(prepared, name, [[0, 1, 2, 3]], **own) as host:
        host.check()
        assert socket_name in Path("/proc/net/unix").read_text()
        while kills < 80:
            pid = host.ranks[0].loader_pid
            if pid not in loaders:
                time.sleep(rng.choice([0.0, rng.uniform(0, 0.3)]))
                os.kill(pid, signal.SIGKILL)
                loaders.add(pid)
                kills += 1
                if kills % 2 == 0:  # fewer than are mended in a row
                    host.check()
        host.check(3)
        loaders.add(host.ranks[0].loader_pid)
    for _ in range(5):
        processes = start_ranks(prepared, name, 3)
        pid = loader_pid(processes[0])
        loaders.add(pid)
        for process in (*processes, None):
            os.kill(pid if process is None else process.pid, signal.SIGKILL)
            kills += 1
        for process in processes:
            process.communicate(timeout=20)
    assert kills >= 100
    for pid in loaders:
        wait_until_gone(pid)
    limit = time.monotonic() + 20.0
    while socket_name in Path("/proc/net/unix").read_text():  # of a loader that a rank had started before it was killed too
        assert time.monotonic() < limit, "a loader without ranks goes on"
        time.sleep(0.05)
    assert shared_memory_names() - names_before == set()
    assert shared_memory_bytes() - memory_before < 100 * 2**20


def test_loader_does_not_import_jax_and_ignores_the_signals_of_the_ranks(prepared, name):
    with Host(prepared, name, [[0, 1, 2, 3]]) as host:
        host.check()
        pid = host.ranks[0].loader_pid
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        host.check(8)
        assert host.ranks[0].loader_pid == pid
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "grain" in maps
        assert "jaxlib" not in maps and "tensorstore" not in maps  # which rows on a disk do not need
    wait_until_gone(pid)

"""Four processes: one copy's worth of reading whatever the group's size, copies on other hosts, damage that all agree on.

A host is what has a keeper of its own, so four processes with four folders for keepers are four hosts.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megascale_jax.checkpoint.manifest import published_steps, read_manifest
from megascale_jax.comm.storage import Storage
from tests.checkpoint.test_two_stage import flip, slots_of

ROOT = Path(__file__).parents[2]
LIMIT_S = 150


class Cluster:
    """Processes on so many hosts of one machine, started again and again on one folder."""

    def __init__(self, folder):
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.keepers: dict[int, int] = {}

    def start(self, processes, mesh, *, hosts=1, **settings):
        """Run `store_worker` on all; what each did, ``None`` for one that died."""
        result = self.folder / "result"
        for old in self.folder.glob("result.*"):
            old.unlink()
        defaults = {"folder": str(self.checkpoints), "run": str(self.folder), "result": str(result), "mesh": mesh}
        settings = defaults | {"checkpoint": {}} | settings
        (self.folder / "settings.json").write_text(json.dumps(settings))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        children = []
        for rank in range(processes):
            environment = {key: value for key, value in os.environ.items() if not key.startswith(("XLA", "JAX", "MEGASCALE"))}
            environment |= {
                "PYTHONPATH": str(ROOT),
                "XLA_FLAGS": "--xla_backend_optimization_level=0",
                "MEGASCALE_COORDINATOR": f"127.0.0.1:{port}",
                "MEGASCALE_NUM_PROCESSES": str(processes),
                "MEGASCALE_PROCESS_ID": str(rank),
                "MEGASCALE_KEEPER": str(self.folder / f"host-{rank * hosts // processes}"),
                "MEGASCALE_KEEPER_IDLE_S": "60",
                "MEGASCALE_CACHE": str(self.folder / "cache"),
            }
            command = [sys.executable, "-m", "tests.multiprocess.store_worker", str(self.folder / "settings.json")]
            children.append(subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True))
        errors = [child.communicate(timeout=LIMIT_S)[1] for child in children]
        files = [Path(f"{result}.{rank}") for rank in range(processes)]
        found = [json.loads(file.read_text()) if file.is_file() else None for file in files]
        if "die" not in settings:
            assert all(child.returncode == 0 for child in children), errors
        self.keepers |= {rank: one["keeper"] for rank, one in enumerate(found) if one is not None}
        return found

    def lose(self, *ranks):
        """The hosts of these ranks, and all they had in memory."""
        for rank in ranks:
            os.kill(self.keepers.pop(rank), signal.SIGKILL)


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    for pid in set(cluster.keepers.values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_storage_gives_one_copy_whatever_the_size_of_the_group(cluster):
    """Saved whole by one rank, restored by four that need a quarter each: every block is needed by all."""
    cluster.start(1, {}, save=[3], over=True)
    one_copy = read_manifest(Storage(cluster.checkpoints), 3).num_bytes
    plain = cluster.start(4, {"data": 4}, checkpoint={"restore": "plain"}, over=True)
    assert [one["tier"] for one in plain] == ["durable"] * 4
    assert sum(one["bytes_read"] for one in plain) > 3.9 * one_copy
    broadcast = cluster.start(4, {"data": 4}, checkpoint={"restore": "broadcast"}, over=True)
    assert [one["step"] for one in broadcast] == [3] * 4
    assert sum(one["bytes_read"] for one in broadcast) == one_copy
    assert max(one["bytes_read"] for one in broadcast) < 0.5 * one_copy


def test_groups_on_several_stages_exchange_side_by_side_and_agree_on_damage(cluster):
    """Pipe 2 x data 2 from data 3: rows of blocks are shared; the newest checkpoint has a flipped byte in one block."""
    cluster.start(3, {"data": 3}, save=[3, 7], over=True)
    assert published_steps(cluster.checkpoints) == [3, 7]
    victim = max((cluster.checkpoints / "7").rglob("ocdbt.process_1/d/*"), key=lambda path: path.stat().st_size)
    content = victim.read_bytes()
    victim.write_bytes(content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :])
    restored = cluster.start(4, {"pipe": 2, "data": 2}, checkpoint={"restore": "broadcast"}, save=[8], over=True)
    assert [one["step"] for one in restored] == [3] * 4
    assert all("step 7 is damaged and passed over" in one["said"][0] for one in restored)
    assert published_steps(cluster.checkpoints) == [3, 8]


def test_lost_host_gets_its_state_back_from_the_next_one(cluster):
    first = cluster.start(4, {"data": 2, "tensor": 2}, hosts=4, save=[3, 7])
    assert len({one["keeper"] for one in first}) == 4
    cluster.lose(2)
    restored = cluster.start(4, {"data": 2, "tensor": 2}, hosts=4)
    assert [(one["step"], one["tier"]) for one in restored] == [(7, "peer")] * 4
    cluster.lose(1, 2)  # neighbours: rank 1's copy is gone with host 2
    restored = cluster.start(4, {"data": 2, "tensor": 2}, hosts=4)
    assert [(one["step"], one["tier"]) for one in restored] == [(7, "durable")] * 4


def test_rank_killed_after_stage_one_loses_nothing(cluster):
    """Its keeper finishes stage 2; the next start finds the state in memory."""
    cluster.start(2, {"data": 2}, hosts=2, save=[3])
    cluster.start(2, {"data": 2}, hosts=2, save=[5], die=1)
    restored = cluster.start(2, {"data": 2}, hosts=2)
    assert [one["step"] for one in restored] == [5] * 2
    assert published_steps(cluster.checkpoints) == [3, 5]


def test_rank_whose_own_memory_rots_gets_the_same_step_from_the_next_host(cluster):
    mesh = {"data": 2}
    cluster.start(2, mesh, hosts=2, save=[3, 7], rot=1)
    restored = cluster.start(2, mesh, hosts=2)
    assert [(one["step"], one["tier"]) for one in restored] == [(7, "peer")] * 2
    for one in restored:
        assert len(one["said"]) == 1 and "step 7 in memory is no good on rank 1, trying copies on other hosts" in one["said"][0]
    again = cluster.start(2, mesh, hosts=2, rot=1)
    assert [(one["step"], one["tier"], one["said"]) for one in again] == [(7, "local", [])] * 2
    for pid in cluster.keepers.values():  # and the copies: those that were good are damaged, those that were damaged stay so
        for slot in slots_of(pid):
            flip(slot)
    restored = cluster.start(2, mesh, hosts=2)
    assert [(one["step"], one["tier"]) for one in restored] == [(7, "durable")] * 2
    assert all("step 7 in memory is passed over" in one["said"][-1] for one in restored)
    again = cluster.start(2, mesh, hosts=2)
    assert [(one["tier"], one["said"]) for one in again] == [("durable", [])] * 2, "what is damaged is not offered a second time"


def test_all_ranks_say_the_same_when_one_of_them_cannot_begin(cluster):
    """And none waits for one that is gone: afterwards they meet as if nothing had been."""
    what = ["storage", "keeper", "held", "peers", "naming of the peer"]
    found = cluster.start(2, {"data": 2}, hosts=2, fail=what, fails_on=1, save=[3])
    assert [one["refused"] for one in found] == [[f"OSError: no {one} for us" for one in what]] * 2
    assert [one["errors"] for one in found] == [0, 0] and published_steps(cluster.checkpoints) == [3]

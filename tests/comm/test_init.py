"""What the launcher's variables mean, and what a wrong one gets."""

import os
import re
import subprocess
import sys
import time

import jax
import psutil
import pytest

from megascale_jax.cluster.ports import free_ports
from megascale_jax.comm import init
from megascale_jax.comm.cache import cache_folder
from megascale_jax.comm.init import Processes
from megascale_jax.config.schema import SystemConfig
from megascale_jax.errors import UsageError

CPU, GPU = SystemConfig(platform="cpu", device="CPU"), SystemConfig(platform="gpu", device="H100")
COMPLETE = {"MEGASCALE_COORDINATOR": "10.0.0.1:2000", "MEGASCALE_NUM_PROCESSES": "4", "MEGASCALE_PROCESS_ID": "3"}


def test_run_is_one_process_when_nothing_is_set():
    assert Processes.from_environment({}) == Processes(1, 0, None)


def test_processes_are_read_when_all_three_are_set():
    assert Processes.from_environment(COMPLETE) == Processes(4, 3, "10.0.0.1:2000")


@pytest.mark.parametrize("missing", COMPLETE)
def test_missing_variable_is_named(missing):
    with pytest.raises(UsageError, match=f"{missing} not set"):
        Processes.from_environment({key: value for key, value in COMPLETE.items() if key != missing})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("MEGASCALE_PROCESS_ID", "4", r"is 4; expected a number in \[0, MEGASCALE_NUM_PROCESSES = 4\)"),
        ("MEGASCALE_PROCESS_ID", "-1", "expected two numbers"),
        ("MEGASCALE_NUM_PROCESSES", "many", "expected two numbers"),
        ("MEGASCALE_NUM_PROCESSES", "0", r"expected a number in \[0"),
    ],
)
def test_impossible_value_is_refused(name, value, text):
    with pytest.raises(UsageError, match=text):
        Processes.from_environment(COMPLETE | {name: value})


def test_cpu_devices_must_divide_over_the_processes():
    with pytest.raises(UsageError, match="4 CPU devices does not divide over 3 processes"):
        init.start(CPU, 4, Processes(3, 0, "127.0.0.1:1"))


def test_cache_folder_follows_the_variable(tmp_path):
    assert cache_folder({"MEGASCALE_CACHE": str(tmp_path)}) == tmp_path
    assert cache_folder({}).parts[-2:] == (".cache", "megascale_jax")


def test_missing_gpu_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setattr(init.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(init, "prepare_process", lambda system: ())
    with pytest.raises(UsageError, match=r"platform is gpu, but there are only cpu devices here.*system=cpu"):
        init.start(GPU, 1, Processes())


def test_all_local_devices_belong_to_the_process_when_a_cluster_is_around(monkeypatch):
    """JAX's own detection would hand each Slurm task one device."""
    seen = {}
    monkeypatch.setattr(init.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(init.jax.distributed, "initialize", lambda *_, **options: seen.update(options))
    init.start(CPU, 4, Processes(2, 1, "127.0.0.1:1"))
    assert seen["cluster_detection_method"] == "deactivate" and seen["initialization_timeout"] == init.START_TIMEOUT_S


def test_cpu_devices_have_threads_to_wait_in(monkeypatch):
    """A device that waits in a collective holds a thread; with too few, two orders of messages end in a deadlock."""
    for name in ("PJRT_NPROC", "XLA_FLAGS"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("PJRT_NPROC")
    init._prepare_cpu(len(jax.local_devices()))
    assert int(os.environ["PJRT_NPROC"]) >= 4 * len(jax.local_devices())
    monkeypatch.setenv("PJRT_NPROC", "3")
    init._prepare_cpu(len(jax.local_devices()))
    assert os.environ["PJRT_NPROC"] == "3", "what the user has set stays"


def test_the_coordinator_listens_on_the_address_that_it_is_announced_under_only(tmp_path):
    """Rank 0 of two, whose other one never comes."""
    (port,) = free_ports("127.0.0.2", 1)
    code = (
        "from megascale_jax.comm.init import Processes, start\nfrom megascale_jax.config.schema import SystemConfig\n"
        f"start(SystemConfig(platform='cpu', device='CPU'), 2, Processes(2, 0, '127.0.0.2:{port}'))"
    )
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "MEGASCALE_CACHE": str(tmp_path)}) as rank:
        try:
            listening = []
            limit = time.monotonic() + 60
            while not listening and rank.poll() is None and time.monotonic() < limit:
                time.sleep(0.05)
                found = psutil.Process(rank.pid).net_connections("inet")
                listening = [
                    entry.laddr.ip.removeprefix("::ffff:")
                    for entry in found
                    if entry.status == psutil.CONN_LISTEN and entry.laddr.port == port
                ]
            assert listening == ["127.0.0.2"]
        finally:
            rank.kill()


@pytest.mark.parametrize(
    ("coordinator", "addresses", "expected", "said"),
    [
        ("127.0.0.1:20000", None, "127.0.0.1:20000", ""),
        ("localhost:20000", ["127.0.0.1", "::1"], "127.0.0.1:20000", ""),
        ("192.0.2.1:20000", None, None, "listens on all addresses.*not on 192.0.2.1 alone"),
        ("node-0:20000", ["127.0.1.1"], None, "which others cannot reach"),
        ("node-0:20000", ["10.0.0.1", "172.17.0.1"], None, "it is 2 addresses: 10.0.0.1, 172.17.0.1"),
    ],
)
def test_where_the_coordinator_listens(monkeypatch, caplog, coordinator, addresses, expected, said):
    if addresses is not None:
        monkeypatch.setattr(init.socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (address, 0)) for address in addresses])
    assert init.bind_address(coordinator) == expected
    assert re.search(said, caplog.text)


def test_where_the_coordinator_listens_is_the_environments_to_say(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.0.0.1:20000")
    assert init.bind_address("127.0.0.1:20000") is None

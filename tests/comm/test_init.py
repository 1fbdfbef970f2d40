"""What the launcher's variables mean, and what a wrong one gets."""

import os

import jax
import pytest

from megascale_jax.comm import init
from megascale_jax.comm.init import Processes, cache_folder
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

"""Host checks on a made-up file system."""

import os

import pytest

from megascale_jax.cluster.diagnose import host
from megascale_jax.cluster.diagnose.host import KernelClock


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def numbers(outcome):
    return {number.name: number.value for number in outcome.numbers}


def test_folders_pass_when_what_is_read_was_written_and_nothing_stays(tmp_path):
    assert host.disk([tmp_path]).status == "pass"
    found = host.storage([tmp_path])
    assert found.status == "pass" and {number.unit for number in found.numbers} == {"MB/s"} and not list(tmp_path.iterdir())


def test_a_missing_folder_fails_and_no_folder_is_not_run(tmp_path):
    for check in (host.disk, host.storage):
        found = check([tmp_path, tmp_path / "gone"])
        assert found.status == "fail" and "gone" in found.reason
        assert check([]).status == "not_run"


def test_storage_that_gives_other_bytes_back_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_try_storage", lambda folder: (1.0, 1.0, False))
    assert host.storage([tmp_path]).reason.endswith("what is read is not what was written")


def test_a_full_disk_fails(tmp_path, monkeypatch):
    full = os.statvfs_result((4096, 4096, 10**9, 10**5, 10**5, 10**6, 10**6, 10**6, 0, 255))
    monkeypatch.setattr(host.os, "statvfs", lambda folder: full)
    found = host.disk([tmp_path])
    assert found.status == "fail" and "0.38 GiB left" in found.reason


@pytest.mark.parametrize(("available", "status"), [(1, "fail"), (8, "warn"), (50, "pass")])
def test_memory(tmp_path, available, status):
    tree(tmp_path, {"proc/meminfo": f"MemTotal: {100 << 20} kB\nMemAvailable: {available << 20} kB"})
    assert host.memory(tmp_path).status == status
    assert host.memory(tmp_path / "nothing").status == "not_run"


@pytest.mark.parametrize(("corrected", "uncorrected", "status"), [(0, 0, "pass"), (999, 0, "pass"), (1000, 0, "warn"), (5, 1, "fail")])
def test_memory_errors(tmp_path, corrected, uncorrected, status):
    assert host.memory_errors(tmp_path).status == "not_run"
    mc = "sys/devices/system/edac/mc/mc0"
    tree(tmp_path, {f"{mc}/ce_count": corrected, f"{mc}/ue_count": uncorrected, "sys/devices/system/edac/mc/mc1/ce_count": 0})
    found = host.memory_errors(tmp_path)
    assert found.status == status and numbers(found) == {"corrected": corrected, "uncorrected": uncorrected}


@pytest.mark.parametrize(
    ("offset", "clock", "status"),
    [
        (0.1, KernelClock(True, 0.001), "pass"),
        (None, KernelClock(True, 0.001), "pass"),
        (-3600.0, KernelClock(True, 0.001), "warn"),
        (0.1, KernelClock(False, 16.0), "warn"),
        (0.1, None, "not_run"),
    ],
)
def test_a_clock_is_never_more_than_a_warning(offset, clock, status):
    assert host.clock(offset, lambda: clock).status == status


def test_this_kernels_clock_can_be_read():
    found = host.kernel_clock()
    assert found is not None and found.max_error_s > 0


def test_software_tells_versions_as_facts(tmp_path):
    tree(tmp_path, {"sys/module/nvidia/version": "580.10"})
    found = host.software(tmp_path)
    assert found.status == "pass" and found.facts["driver"] == "580.10" and "jax" in found.facts and "kernel" in found.facts


def test_what_holds_a_gpu_is_named_and_daemons_are_not(tmp_path):
    tree(tmp_path, {"dev/nvidia0": "", "proc/11/stat": "11 (python (x) 3) S 1", "proc/12/stat": "12 (nvidia-persiste) S 1"})
    tree(tmp_path, {"proc/13/stat": "13 (defunct) Z 1", "proc/14/stat": "14 (bash) S 1"})
    for pid, target in ((11, "/dev/nvidia0"), (12, "/dev/nvidia0"), (14, "/dev/nvidiactl")):
        (tmp_path / f"proc/{pid}/fd").mkdir()
        (tmp_path / f"proc/{pid}/fd/3").symlink_to(target)
    found = host.leftovers(tmp_path)
    assert found.status == "fail" and found.reason == "python (x) 3 (pid 11) holds /dev/nvidia0"
    assert numbers(found) == {"zombies": 1, "GPU holders": 1}
    assert host.leftovers(tmp_path, own=11).status == "pass"


def test_throttling_that_goes_on_is_a_warning(tmp_path):
    assert host.throttling(tmp_path).status == "not_run"
    file = "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"
    tree(tmp_path, {file: 7})
    assert host.throttling(tmp_path, lambda seconds: None).status == "pass"
    assert (
        host.throttling(tmp_path, lambda seconds: tree(tmp_path, {file: 9}) and None).reason
        == "CPUs are slowed down by heat: 2 times in 1 s"
    )

"""Counters from a made-up /sys and a made-up NVML: units, names, and nothing where there is nothing."""

import threading
from types import SimpleNamespace

import pytest

from megascale_jax.cluster import counters
from megascale_jax.cluster.counters import AGE, Counters, read_counters


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(counters, "_nvml", lambda: None)


def write(root, path, content):
    file = root / "sys/class" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)


def test_host_without_network_and_gpu_has_load_memory_and_disk(tmp_path):
    found = read_counters(tmp_path, tmp_path)
    assert set(found) == {"host.load", "host.free_bytes", "disk.free_bytes"}
    assert found["disk.free_bytes"] > 0 and found["host.free_bytes"] > 0


def test_nics_are_read_without_the_loopback(tmp_path):
    for name, value in {"rx_bytes": 10, "tx_bytes": 20, "rx_errors": 1, "tx_errors": 2, "rx_dropped": 3, "tx_dropped": 4}.items():
        write(tmp_path, f"net/eth0/statistics/{name}", f"{value}\n")
        write(tmp_path, f"net/lo/statistics/{name}", "9\n")
    write(tmp_path, "net/eth0/carrier_down_count", "5\n")
    write(tmp_path, "net/eth0/carrier", "1\n")
    write(tmp_path, "net/bonding_masters", "bond0\n")  # a file among the folders
    found = {name: value for name, value in read_counters(tmp_path, tmp_path).items() if name.startswith("nic.")}
    names = ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_drops", "tx_drops", "downs", "up")
    assert found == dict(zip([f"nic.eth0.{name}" for name in names], (10, 20, 1, 2, 3, 4, 5, 1), strict=True))


def test_rdma_words_are_bytes_and_unreadable_files_are_left_out(tmp_path):
    write(tmp_path, "infiniband/mlx5_0/ports/1/counters/port_xmit_data", "100\n")
    write(tmp_path, "infiniband/mlx5_0/ports/1/counters/port_rcv_data", "200\n")
    write(tmp_path, "infiniband/mlx5_0/ports/1/counters/link_downed", "3\n")
    write(tmp_path, "infiniband/mlx5_0/ports/1/hw_counters/out_of_sequence", "7\n")
    write(tmp_path, "infiniband/mlx5_0/ports/1/hw_counters/lifespan", "N/A (not supported)\n")
    found = {name: value for name, value in read_counters(tmp_path, tmp_path).items() if name.startswith("rdma.")}
    assert found == {
        "rdma.mlx5_0.1.tx_bytes": 400,
        "rdma.mlx5_0.1.rx_bytes": 800,
        "rdma.mlx5_0.1.link_downed": 3,
        "rdma.mlx5_0.1.out_of_sequence": 7,
    }


class NVMLError(Exception):
    pass


def lost(index):
    raise NVMLError


def fake_nvml(ecc):
    """Two devices, of which the second is lost."""
    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_MEMORY_ERROR_TYPE_CORRECTED=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index if index == 0 else lost(index),
        nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=75),
        nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(used=1 << 30),
        nvmlDeviceGetTemperature=lambda device, sensor: 60,
        nvmlDeviceGetTotalEccErrors=ecc,
    )


def test_a_driver_that_has_gone_is_a_host_without_gpus(tmp_path, monkeypatch):
    nvml = fake_nvml(lambda *_: 0)
    nvml.nvmlDeviceGetCount = lambda: lost(0)
    monkeypatch.setattr(counters, "_nvml", lambda: nvml)
    assert set(read_counters(tmp_path, tmp_path)) == {"host.load", "host.free_bytes", "disk.free_bytes"}


def test_values_that_are_old_are_not_told_but_their_age_is(monkeypatch):
    asked, clock = threading.Event(), [100.0]
    monkeypatch.setattr(counters.time, "monotonic", lambda: clock[0])

    def read():
        if asked.is_set():
            raise ValueError("broken")
        asked.set()
        return {"host.load": 1.0}

    found = Counters(read, every_s=0.001)
    assert found.newest() == {AGE: 0.0}
    found.start()
    assert asked.wait(20)
    while "host.load" not in found.newest() and found._error == "":
        threading.Event().wait(0.001)
    clock[0] = 129.0
    assert found.newest() == {"host.load": 1.0, AGE: 29.0}
    clock[0] = 131.0
    assert found.newest() == {AGE: 31.0}
    found.close()


def gpus(tmp_path, monkeypatch, ecc):
    monkeypatch.setattr(counters, "_nvml", lambda: fake_nvml(ecc))
    return {name: value for name, value in read_counters(tmp_path, tmp_path).items() if name.startswith("gpu.")}


def test_gpus_are_read_and_a_lost_one_is_left_out(tmp_path, monkeypatch):
    assert gpus(tmp_path, monkeypatch, lambda device, kind, scope: 2 if kind else 9) == {
        "gpu.0.utilisation": 0.75,
        "gpu.0.used_bytes": 1 << 30,
        "gpu.0.temperature_c": 60,
        "gpu.0.ecc_uncorrected": 2,
        "gpu.0.ecc_corrected": 9,
    }


def test_gpu_without_ecc_has_the_rest(tmp_path, monkeypatch):
    names = set(gpus(tmp_path, monkeypatch, no_ecc))
    assert names == {"gpu.0.utilisation", "gpu.0.used_bytes", "gpu.0.temperature_c"}


def no_ecc(*_):
    raise NVMLError


def test_disk_that_is_gone_is_left_out(tmp_path):
    assert "disk.free_bytes" not in read_counters(tmp_path / "none", tmp_path)

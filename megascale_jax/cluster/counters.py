"""Counters of a host for its executor's beat: network, GPUs, load, memory, disk. What this host has not, is left out.

Everything but the disk is a read of kernel memory; the question to the disk can hang with a dead network file system, so ask from a
thread of its own. Names and units: see `read_counters`.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

_NET = {
    "rx_bytes": "rx_bytes",
    "tx_bytes": "tx_bytes",
    "rx_errors": "rx_errors",
    "tx_errors": "tx_errors",
    "rx_dropped": "rx_drops",
    "tx_dropped": "tx_drops",
}
_INFINIBAND_UNIT_BYTES = {"port_rcv_data": ("rx_bytes", 4), "port_xmit_data": ("tx_bytes", 4)}
"""These two count words of four bytes."""


def read_counters(run_folder: Path, root: Path = Path("/")) -> dict[str, float]:
    """All counters, by name. Blocks as long as the file system of ``run_folder`` does; ``root`` stands for the root of the host.

    - ``nic.NAME.rx_bytes | tx_bytes | rx_errors | tx_errors | rx_drops | tx_drops | downs``: since boot; ``.up``: 1 or 0
    - ``rdma.DEVICE.PORT.rx_bytes | tx_bytes`` and the driver's other counters by their own names, such as ``link_downed``
    - ``gpu.INDEX.utilisation`` (0 to 1), ``.used_bytes``, ``.temperature_c``, ``.ecc_uncorrected`` and ``.ecc_corrected`` (since boot)
    - ``host.load`` (1 minute), ``host.free_bytes``, ``disk.free_bytes`` (of the run folder)
    """
    counters = dict(_nics(root / "sys/class/net"))
    counters |= dict(_rdma(root / "sys/class/infiniband"))
    counters |= dict(_gpus(_nvml()))
    counters |= {"host.load": psutil.getloadavg()[0], "host.free_bytes": float(psutil.virtual_memory().available)}
    with contextlib.suppress(OSError):
        counters["disk.free_bytes"] = float(shutil.disk_usage(run_folder).free)
    return counters


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # not this driver's, or not there while the link is down
        return None


def _named(numbers: dict[str, float | None]) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if number is not None}


def _nics(folder: Path) -> Iterator[tuple[str, float]]:
    for nic in sorted(folder.glob("*")):
        if nic.name == "lo" or not nic.is_dir():
            continue
        numbers = {ours: _number(nic / "statistics" / theirs) for theirs, ours in _NET.items()}
        numbers |= {"downs": _number(nic / "carrier_down_count"), "up": _number(nic / "carrier")}
        for name, number in _named(numbers).items():
            yield f"nic.{nic.name}.{name}", number


def _rdma(folder: Path) -> Iterator[tuple[str, float]]:
    for port in sorted(folder.glob("*/ports/*")):
        for file in sorted([*port.glob("counters/*"), *port.glob("hw_counters/*")]):
            if (number := _number(file)) is not None:
                name, unit = _INFINIBAND_UNIT_BYTES.get(file.name, (file.name, 1))
                yield f"rdma.{port.parent.parent.name}.{port.name}.{name}", number * unit


def _nvml() -> Any:
    """NVIDIA's management library, started; ``None`` where it is not installed or there is no driver."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _gpus(nvml: Any) -> Iterator[tuple[str, float]]:
    if nvml is None:
        return
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError:  # one that has fallen off the bus
            continue
        questions = {
            "utilisation": lambda device=device: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
            "used_bytes": lambda device=device: nvml.nvmlDeviceGetMemoryInfo(device).used,
            "temperature_c": lambda device=device: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
            "ecc_uncorrected": lambda device=device: nvml.nvmlDeviceGetTotalEccErrors(
                device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "ecc_corrected": lambda device=device: nvml.nvmlDeviceGetTotalEccErrors(
                device, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        }
        for name, question in questions.items():
            with contextlib.suppress(nvml.NVMLError):  # what this model or this user cannot ask
                yield f"gpu.{index}.{name}", float(question())

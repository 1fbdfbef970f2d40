"""Counters of a host for its executor's beat: network, GPUs, load, memory, disk. What this host has not, is left out.

The question to the disk can hang with a dead network file system, and one to a GPU with its driver, so `Counters` asks in a thread of its
own. Names and units: see `read_counters`.
"""

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
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
AGE = "counters.age_s"
STALE_S = 30.0
"""Age from which values are not told any more: a counter that stands still would look like a network that does."""

_logger = logging.getLogger(__name__)


class Counters:
    """The newest of what ``read`` returns, asked every ``every_s`` in a thread of its own, whatever becomes of that thread."""

    def __init__(self, read: Callable[[], dict[str, float]], every_s: float = 1.0):
        self._read, self._every_s = read, every_s
        self._newest: tuple[float, dict[str, float]] = time.monotonic(), {}
        self._error = ""
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to ask. Without a thread to be had there are no counters, which their age says."""
        try:
            threading.Thread(target=self._run, name="counters", daemon=True).start()
        except RuntimeError as error:
            _logger.warning("no counters: %s", error)

    def close(self) -> None:
        """Ask no more; a question that hangs is not waited for."""
        self._ended.set()

    def newest(self) -> dict[str, float]:
        """The last values and, as ``counters.age_s``, their age; those older than `STALE_S` are left out. Neither waits nor raises."""
        at_s, values = self._newest
        age_s = time.monotonic() - at_s
        return {**(values if age_s < STALE_S else {}), AGE: age_s}

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._newest = time.monotonic(), self._read()
                self._error = ""
            except Exception as error:
                if (text := f"{type(error).__name__}: {error}") != self._error:
                    _logger.warning("the counters of this host cannot be read: %s", text)
                self._error = text
            self._ended.wait(self._every_s)


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
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError:  # the driver is gone, or reloaded
        return
    for index in range(count):
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

"""Checks of GPUs through NVML (package ``nvidia-ml-py``, imported only here, and only when there is an NVIDIA driver) and the kernel's log.

Counters named volatile run since the driver was loaded. Xids: NVIDIA's list of Xid errors.
"""

import os
import re
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from megascale_jax.cluster.diagnose.checks import Number, Outcome, Status, not_run, outcome

ROOT = Path("/")
MANY_CORRECTED = 1000
MANY_REPLAYS = 1000
"""NVLink replays that are normal over a long uptime; a recovery or a CRC error of data is never normal."""
HOT_MARGIN_C = 3
"""Degrees Celsius below the slowdown threshold at which a GPU counts as hot."""
HELD_BY_NOBODY_GIB = 1.0
XID_HOURS = 24
FATAL_XIDS = {
    48: "double-bit ECC error",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fell off the bus",
    95: "uncontained memory error",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
}
SERIOUS_XIDS = {63: "row remapped, reset the GPU", 94: "contained memory error"}
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([^)]+)\): (\d+)")
GIB = 2**30

type Problems = list[tuple[Status, str]]


class NoDriver(Exception):
    """NVML cannot be asked; the message says why."""


def load_nvml(root: Path = ROOT) -> ModuleType:
    """The NVML module. Raises NoDriver."""
    if not any((root / "dev").glob("nvidia[0-9]*")) and not (root / "proc/driver/nvidia").is_dir():
        raise NoDriver("no NVIDIA driver")
    try:
        return import_module("pynvml")
    except ImportError as error:
        raise NoDriver("nvidia-ml-py is not installed; install megascale_jax[gpu]") from error


def _on_gpus(check: str, load: Callable[[], Any], look: Callable[[Any, str, Any], tuple[Problems, list[Number]]]) -> Outcome:
    """``look`` at each GPU. One that NVML has lost has failed."""
    try:
        nvml = load()
    except NoDriver as error:
        return not_run(check, str(error))
    problems: Problems = []
    numbers: list[Number] = []
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return outcome(check, [("fail", f"NVML does not start: {error}")])
    for index in range(count):
        name = f"GPU {index}"
        try:
            found, measured = look(nvml, name, nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError as error:
            problems.append(("fail", f"{name}: NVML says {error}"))
            continue
        problems += found
        numbers += measured
    nvml.nvmlShutdown()
    return outcome(check, problems, numbers) if count else not_run(check, "the NVIDIA driver has no GPU")


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """The answer, ``None`` where this GPU has no such thing. Raises NVMLError for everything else."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
        return None


def gpu_memory(load: Callable[[], Any] = load_nvml) -> Outcome:
    """ECC errors, remapped rows and retired pages."""

    def look(nvml: Any, name: str, handle: Any) -> tuple[Problems, list[Number]]:
        problems: Problems = []
        kinds = (("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED), ("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED))
        counts = {word: _ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, kind, nvml.NVML_VOLATILE_ECC) for word, kind in kinds}
        if counts["uncorrected"] is None:
            problems.append(("warn", f"{name}: ECC is off or not there"))
        if counts["uncorrected"]:
            problems.append(("fail", f"{name}: {counts['uncorrected']} uncorrected ECC errors"))
        if (counts["corrected"] or 0) >= MANY_CORRECTED:
            problems.append(("warn", f"{name}: {counts['corrected']} corrected ECC errors"))
        numbers = [Number(name=f"{word} ECC", value=count, unit="errors", part=name) for word, count in counts.items() if count is not None]
        rows = _ask(nvml, "nvmlDeviceGetRemappedRows", handle)
        if rows is not None:
            corrected, uncorrected, is_pending, has_failed = rows
            numbers.append(Number(name="remapped", value=corrected + uncorrected, unit="rows", part=name))
            if has_failed:
                problems.append(("fail", f"{name}: a row could not be remapped; replace the GPU"))
            if is_pending:
                problems.append(("fail", f"{name}: a row waits to be remapped; reset the GPU"))
        elif _ask(nvml, "nvmlDeviceGetRetiredPagesPendingStatus", handle):
            problems.append(("fail", f"{name}: a page waits to be retired; reset the GPU"))
        return problems, numbers

    return _on_gpus("gpu_memory", load, look)


def gpu_nvlink(load: Callable[[], Any] = load_nvml) -> Outcome:
    """Links that are down, and their error counters."""
    counters = ("REPLAY", "RECOVERY", "CRC_FLIT", "CRC_DATA")
    seen = 0

    def look(nvml: Any, name: str, handle: Any) -> tuple[Problems, list[Number]]:
        nonlocal seen
        states = {link: _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)}
        states = {link: state for link, state in states.items() if state is not None}
        if not states:
            return [], []
        seen += 1
        totals = dict.fromkeys(counters, 0)
        for link, state in states.items():
            for counter in counters if state else ():
                totals[counter] += (
                    _ask(nvml, "nvmlDeviceGetNvLinkErrorCounter", handle, link, getattr(nvml, f"NVML_NVLINK_ERROR_DL_{counter}")) or 0
                )
        problems: Problems = []
        if down := [str(link) for link, state in states.items() if not state]:
            problems.append(("fail", f"{name}: NVLink {', '.join(down)} down"))
        if wrong := [f"{totals[counter]} {counter.lower()}" for counter in ("RECOVERY", "CRC_DATA") if totals[counter]]:
            problems.append(("fail", f"{name}: NVLink errors: {', '.join(wrong)}"))
        if totals["REPLAY"] + totals["CRC_FLIT"] >= MANY_REPLAYS:
            problems.append(("warn", f"{name}: {totals['REPLAY']} NVLink replays, {totals['CRC_FLIT']} flit CRC errors"))
        numbers = [Number(name="links up", value=sum(map(bool, states.values())), unit="links", part=name)]
        return problems, numbers + [
            Number(name=word.lower(), value=count, unit="errors", part=name) for word, count in totals.items() if count
        ]

    found = _on_gpus("gpu_nvlink", load, look)
    return found if seen or found.status != "pass" else not_run("gpu_nvlink", "these GPUs have no NVLink")


def gpu_clocks(load: Callable[[], Any] = load_nvml) -> Outcome:
    """What slows a GPU down now: heat, power brake; its temperature and power."""

    def look(nvml: Any, name: str, handle: Any) -> tuple[Problems, list[Number]]:
        problems: Problems = []
        reasons = _ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle) or 0
        causes = (
            (nvml.nvmlClocksEventReasonHwThermalSlowdown, "by heat (hardware)"),
            (nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, "by the power brake"),
            (nvml.nvmlClocksEventReasonSwThermalSlowdown, "by heat (software)"),
        )
        problems.extend(("fail", f"{name}: slowed down {text}") for bit, text in causes if reasons & bit)
        if reasons & nvml.nvmlClocksEventReasonHwSlowdown and not problems:
            problems.append(("fail", f"{name}: slowed down by the hardware"))
        degrees = _ask(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
        limit = _ask(nvml, "nvmlDeviceGetTemperatureThreshold", handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        if degrees is not None and limit and degrees >= limit - HOT_MARGIN_C:
            problems.append(("warn", f"{name}: {degrees} °C, slowdown at {limit} °C"))
        power_mw, most_mw = _ask(nvml, "nvmlDeviceGetPowerUsage", handle), _ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)
        values = (("temperature", degrees, 1, "°C"), ("power", power_mw, 1e-3, "W"), ("power limit", most_mw, 1e-3, "W"))
        return problems, [Number(name=n, value=v * scale, unit=unit, part=name) for n, v, scale, unit in values if v is not None]

    return _on_gpus("gpu_clocks", load, look)


def gpu_free(load: Callable[[], Any] = load_nvml) -> Outcome:
    """Processes that compute on a GPU, and memory that is held though there are none."""

    def look(nvml: Any, name: str, handle: Any) -> tuple[Problems, list[Number]]:
        pids = [process.pid for process in _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or () if process.pid != os.getpid()]
        memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
        problems: Problems = [("fail", f"{name}: in use by pid {', '.join(map(str, pids))}")] if pids else []
        if memory is None:
            return problems, []
        used_gib = memory.used / GIB
        if not pids and used_gib > HELD_BY_NOBODY_GIB:
            problems.append(("fail", f"{name}: {used_gib:.1f} GiB held, by no process that is seen"))
        return problems, [Number(name="memory used", value=used_gib, unit="GiB", part=name)]

    return _on_gpus("gpu_free", load, look)


def kernel_log(limit_bytes: int = 4 << 20) -> list[tuple[float, str]] | None:
    """Lines of the kernel's log with their age in seconds; ``None`` when it may not be read."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    now_s, lines, size = time.clock_gettime(time.CLOCK_MONOTONIC), [], 0
    try:
        while size < limit_bytes:
            try:
                record = os.read(descriptor, 8192)
            except BrokenPipeError:
                continue  # overwritten while it was being read; the next one follows
            size += len(record)
            head, _, text = record.decode(errors="replace").partition(";")
            lines.append((now_s - int(head.split(",")[2]) / 1e6, text.splitlines()[0] if text else ""))
    except (BlockingIOError, ValueError, IndexError):
        pass  # the end
    except PermissionError:
        return None
    finally:
        os.close(descriptor)
    return lines


def gpu_xid(load: Callable[[], Any] = load_nvml, read: Callable[[], list[tuple[float, str]] | None] = kernel_log) -> Outcome:
    """Xids of the last day. Those that a program causes by itself (13, 31, 43, 45) are only counted."""
    try:
        load()
    except NoDriver as error:
        return not_run("gpu_xid", str(error))
    lines = read()
    if lines is None:
        return not_run("gpu_xid", "the kernel log may not be read; run as root, or set kernel.dmesg_restrict=0")
    found = [(match[1], int(match[2])) for age_s, line in lines if age_s < XID_HOURS * 3600 and (match := _XID.search(line))]
    problems: Problems = [("fail", f"Xid {xid} on {place}: {FATAL_XIDS[xid]}") for place, xid in found if xid in FATAL_XIDS]
    problems.extend(("warn", f"Xid {xid} on {place}: {SERIOUS_XIDS[xid]}") for place, xid in found if xid in SERIOUS_XIDS)
    return outcome("gpu_xid", problems, [Number(name=f"in {XID_HOURS} hours", value=len(found), unit="Xids")])

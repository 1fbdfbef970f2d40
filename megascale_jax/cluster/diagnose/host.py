"""Checks of a host, from what the kernel shows. ``root``: the file system's root, another folder in tests.

Counters run since the host was started. Limits are constants here, each in the unit of its name.
"""

import ctypes
import hashlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale_jax.cluster.diagnose.checks import SOFTWARE, Number, Outcome, Status, not_run, outcome

ROOT = Path("/")
MIN_FREE_GIB, LOW_FREE_SHARE = 1.0, 0.05
TRIAL_BYTES = 8 << 20
MIN_MEMORY_SHARE, LOW_MEMORY_SHARE = 0.02, 0.1
MANY_CORRECTED = 1000
MIN_SHM_MIB, LOW_SHM_MIB = 16, 256
MOST_OFFSET_S = 1.0
THROTTLE_WATCH_S = 1.0
PACKAGES = ("megascale_jax", "jax", "jaxlib", "nvidia-nccl-cu13", "nvidia-cuda-runtime", "nvidia-cudnn-cu13")
DAEMONS = ("nvidia-persiste", "nvidia-smi", "nv-hostengine", "dcgm", "dcgm-exporter", "nvsm", "nv-fabricmanage")
"""What holds GPUs open on a healthy host; names as long as the kernel keeps them, 15 characters."""
GIB, MIB = 2**30, 2**20


def disk(folders: Sequence[Path]) -> Outcome:
    """Space and inodes that are left where the run writes."""
    problems: list[tuple[Status, str]] = []
    numbers = []
    for folder in folders:
        try:
            found = os.statvfs(folder)
        except OSError as error:
            problems.append(("fail", f"{folder}: {error.strerror}"))
            continue
        free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        numbers.append(Number(name="free", value=free / GIB, unit="GiB", part=str(folder)))
        if free < MIN_FREE_GIB * GIB:
            problems.append(("fail", f"{folder}: {free / GIB:.2f} GiB left, less than {MIN_FREE_GIB:g}"))
        elif free < LOW_FREE_SHARE * total:
            problems.append(("warn", f"{folder}: {free / total:.0%} left"))
        if found.f_files and found.f_favail < 1000:
            problems.append(("fail", f"{folder}: {found.f_favail} inodes left"))
    return outcome("disk", problems, numbers) if folders else not_run("disk", "no folder given (--folder)")


def storage(folders: Sequence[Path]) -> Outcome:
    """Write a small file, read it back past the page cache, compare; in each folder."""
    problems: list[tuple[Status, str]] = []
    numbers = []
    for folder in folders:
        try:
            written_s, read_s, is_same = _try_storage(folder)
        except OSError as error:
            problems.append(("fail", f"{folder}: {error.strerror}"))
            continue
        for name, seconds in (("write", written_s), ("read", read_s)):
            numbers.append(Number(name=name, value=TRIAL_BYTES / max(seconds, 1e-6) / 1e6, unit="MB/s", part=str(folder)))
        if not is_same:
            problems.append(("fail", f"{folder}: what is read is not what was written"))
    return outcome("storage", problems, numbers) if folders else not_run("storage", "no folder given (--folder)")


def _try_storage(folder: Path) -> tuple[float, float, bool]:
    content = os.urandom(TRIAL_BYTES)
    trial = folder / f".megascale-diagnose-{os.getpid()}"
    try:
        began_s = time.monotonic()
        with trial.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        written_s = time.monotonic() - began_s
        with trial.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began_s = time.monotonic()
            found = stream.read()
        return written_s, time.monotonic() - began_s, hashlib.blake2b(found).digest() == hashlib.blake2b(content).digest()
    finally:
        trial.unlink(missing_ok=True)


def memory(root: Path = ROOT) -> Outcome:
    """Memory that is left."""
    lines = _read(root / "proc/meminfo").splitlines()
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in map(str.split, lines) if len(words) > 1}
    if "MemAvailable" not in sizes:
        return not_run("memory", "the kernel does not tell MemAvailable")
    free, total = sizes["MemAvailable"], sizes["MemTotal"]
    numbers = [Number(name=name, value=size / GIB, unit="GiB") for name, size in (("available", free), ("total", total))]
    problems: list[tuple[Status, str]] = []
    if free < LOW_MEMORY_SHARE * total:
        problems.append(("fail" if free < MIN_MEMORY_SHARE * total else "warn", f"{free / GIB:.1f} GiB available, {free / total:.0%}"))
    return outcome("memory", problems, numbers)


def memory_errors(root: Path = ROOT) -> Outcome:
    """Errors of the host's memory that were corrected, and those that were not."""
    controllers = sorted((root / "sys/devices/system/edac/mc").glob("mc[0-9]*"))
    if not controllers:
        return not_run("memory_errors", "no EDAC driver counts memory errors here")
    corrected, uncorrected = (sum(int(_read(one / name) or 0) for one in controllers) for name in ("ce_count", "ue_count"))
    problems: list[tuple[Status, str]] = []
    if uncorrected:
        problems.append(("fail", f"{uncorrected} uncorrected memory errors"))
    if corrected >= MANY_CORRECTED:
        problems.append(("warn", f"{corrected} corrected memory errors: a DIMM is going bad"))
    counts = (("corrected", corrected), ("uncorrected", uncorrected))
    return outcome("memory_errors", problems, [Number(name=name, value=count, unit="errors") for name, count in counts])


def shared_memory(root: Path = ROOT) -> Outcome:
    """Space in /dev/shm, where NCCL and others put their buffers."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError as error:
        return not_run("shared_memory", f"/dev/shm: {error.strerror}")
    free = found.f_bavail * found.f_frsize / MIB
    problems: list[tuple[Status, str]] = []
    if free < LOW_SHM_MIB:
        problems.append(("fail" if free < MIN_SHM_MIB else "warn", f"{free:.0f} MiB free in /dev/shm"))
    return outcome("shared_memory", problems, [Number(name="free", value=free, unit="MiB")])


@dataclass(frozen=True)
class KernelClock:
    """Whether the kernel's clock is kept in step by someone, and how far it may be off."""

    is_synchronized: bool
    max_error_s: float


def kernel_clock() -> KernelClock | None:
    """From ``ntp_adjtime`` (struct timex), whoever keeps the clock; ``None`` where there is none."""
    try:
        libc = ctypes.CDLL(None)
        buffer = ctypes.create_string_buffer(512)  # modes 0: only read
        state = libc.ntp_adjtime(buffer)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    max_error_us = ctypes.c_long.from_buffer(buffer, 3 * ctypes.sizeof(ctypes.c_long)).value
    return KernelClock(state != 5, max_error_us / 1e6)  # 5: TIME_ERROR, not synchronized


def clock(offset_s: float | None, read: Callable[[], KernelClock | None] = kernel_clock) -> Outcome:
    """Offset against another host's clock as its caller measured it, and whether anyone keeps this one in step."""
    problems: list[tuple[Status, str]] = []
    numbers = []
    if offset_s is not None:
        numbers.append(Number(name="offset", value=offset_s * 1e3, unit="ms"))
        if abs(offset_s) > MOST_OFFSET_S:  # no more than a warning: whose clock is wrong is not known, and nothing depends on it
            problems.append(("warn", f"{offset_s:+.1f} s off the clock of the node that leads"))
    kernel = read()
    if kernel is None:
        problems.append(("not_run", "the kernel does not tell whether its clock is kept in step"))
    elif kernel.is_synchronized:
        numbers.append(Number(name="largest error", value=kernel.max_error_s * 1e3, unit="ms"))
    else:
        problems.append(("warn", "nobody keeps the clock in step (no chrony, no ntp)"))
    return outcome("clock", problems, numbers)


def software(root: Path = ROOT) -> Outcome:
    """What is installed, as facts; whether it is alike is seen only beside other nodes."""
    facts = {"kernel": platform.release(), "python": platform.python_version(), "machine": platform.machine()}
    if driver := _read(root / "sys/module/nvidia/version"):
        facts["driver"] = driver
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    missing = [package for package in ("jax", "jaxlib") if package not in facts]
    return outcome(SOFTWARE, [("fail", f"{', '.join(missing)} not installed")] if missing else [], facts=facts)


def leftovers(root: Path = ROOT, own: int | None = None) -> Outcome:
    """Processes that hold a GPU open, and zombies. Only the files of other users' processes need root."""
    holders, zombies, hidden = [], 0, 0
    gpus = (root / "dev").is_dir() and any((root / "dev").glob("nvidia[0-9]*"))
    for process in (root / "proc").glob("[0-9]*"):
        name, state = _name_and_state(process)
        zombies += state == "Z"
        if not gpus or int(process.name) == (own or os.getpid()) or name in DAEMONS:
            continue
        try:
            targets = {str(link.readlink()) for link in (process / "fd").iterdir()}
        except PermissionError:
            hidden += 1
            continue
        except OSError:
            continue  # it has ended meanwhile
        if held := sorted(target for target in targets if target.removeprefix("/dev/nvidia").isdecimal()):
            holders.append(f"{name} (pid {process.name}) holds {', '.join(held)}")
    problems: list[tuple[Status, str]] = [("fail", text) for text in holders]
    if hidden:
        problems.append(("warn", f"{hidden} processes of other users could not be looked into"))
    numbers = [Number(name="zombies", value=zombies, unit="processes"), Number(name="GPU holders", value=len(holders), unit="processes")]
    return outcome("leftovers", problems, numbers)


def _name_and_state(process: Path) -> tuple[str, str]:
    """From ``/proc/PID/stat``: ``PID (NAME) STATE ...``, where a name may hold anything."""
    text = _read(process / "stat")
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, rest.split()[0] if rest.split() else ""


def throttling(root: Path = ROOT, sleep: Callable[[float], None] = time.sleep) -> Outcome:
    """Whether CPUs are being slowed down by heat now; the counters since the host was started are told too."""
    files = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/*_throttle_count"))
    if not files:
        return not_run("throttling", "the kernel does not count CPU throttling here")
    before = sum(int(_read(file) or 0) for file in files)
    sleep(THROTTLE_WATCH_S)
    rise = sum(int(_read(file) or 0) for file in files) - before
    problems: list[tuple[Status, str]] = [("warn", f"CPUs are slowed down by heat: {rise} times in {THROTTLE_WATCH_S:g} s")] if rise else []
    return outcome("throttling", problems, [Number(name="since start", value=before, unit="times")])


def _read(file: Path) -> str:
    """A small file without its line end; empty when it cannot be read."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""

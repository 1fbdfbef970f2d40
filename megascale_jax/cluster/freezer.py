"""Processes that live and do nothing, by the kernel's freezer (cgroup v2): neither stopped nor gone, as when a device never answers."""

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megascale_jax.errors import UsageError

_MOUNTS = Path("/proc/self/mounts")
_TRIES = 50


def freezer_root() -> Path | None:
    """Where groups of processes can be made here; ``None``: no cgroup v2, or not for this user."""
    for line in _MOUNTS.read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            probe = Path(place) / f"megascale-{secrets.token_hex(4)}"
            with suppress(OSError):
                probe.mkdir()
                can = (probe / "cgroup.freeze").exists()
                probe.rmdir()
                return Path(place) if can else None
    return None


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process, and what it starts, does nothing in here; SIGKILL still ends it. Raises UsageError where that cannot be done."""
    with _group(pid) as group:
        (group / "cgroup.freeze").write_text("1")
        try:
            yield
        finally:
            (group / "cgroup.freeze").write_text("0")


@contextmanager
def slowed(pid: int, share: float, period_s: float = 0.2) -> Iterator[None]:
    """A process gets only ``share`` of the time in here, in slices. Raises UsageError where that cannot be done."""
    ended = threading.Event()
    with _group(pid) as group:

        def beat() -> None:
            while not ended.is_set():
                for state, part in (("1", 1 - share), ("0", share)):
                    (group / "cgroup.freeze").write_text(state)
                    time.sleep(part * period_s)

        thread = threading.Thread(target=beat, name="slowed", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            (group / "cgroup.freeze").write_text("0")


@contextmanager
def _group(pid: int) -> Iterator[Path]:
    root = freezer_root()
    if root is None:
        raise UsageError("processes can only be frozen where this user may make groups of cgroup v2; run the drill as root")
    before = _group_of(pid, root)
    group = root / f"megascale-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        yield group
    finally:
        for _ in range(_TRIES):  # a killed process is still in its group for a moment
            with suppress(OSError):
                for member in (group / "cgroup.procs").read_text().split():
                    with suppress(OSError):
                        (before / "cgroup.procs").write_text(member)
                group.rmdir()
                break
            time.sleep(0.1)


def _group_of(pid: int, root: Path) -> Path:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, _, path = line.split(":", 2)
        if number == "0":
            return root / path.lstrip("/")
    return root

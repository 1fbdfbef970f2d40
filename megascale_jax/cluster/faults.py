"""The faults that a drill injects into a live local job: signals to real processes, nodes switched off, rotten checkpoints."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import psutil

from megascale_jax.cluster.backends.local import executor_process, switch_off, switch_on
from megascale_jax.errors import UsageError


class Job(Protocol):
    """A job under drill."""

    folder: Path
    """Its run folder."""

    def status(self) -> dict[str, Any] | None:
        """What the driver says; ``None`` while there is none."""
        ...

    def kill_driver(self) -> None:
        """SIGKILL to the driver, and its command again."""
        ...


@dataclass(frozen=True)
class Fault:
    """A kind of fault. ``inject`` returns what undoes it once the job has recovered."""

    inject: Callable[[Job, dict[str, Any], str], Callable[[], None]]
    hits_node: bool = True
    interrupts: bool = True


def _nothing() -> None:
    return None


def _pid(status: Mapping[str, Any], node: str) -> int:
    return status["nodes"][node]["processes"][0]["pid"]


def _node_folder(job: Job, node: str) -> Path:
    return job.folder / "cluster" / "nodes" / node


def _executor(job: Job, node: str) -> int:
    process = executor_process(_node_folder(job, node))
    if process is None:
        raise UsageError(f"{node} has no executor on this machine: a drill needs a local job")
    return process.pid


def _process_killed(job: Job, status: dict[str, Any], node: str) -> Callable[[], None]:
    os.kill(_pid(status, node), signal.SIGKILL)
    return _nothing


def _process_halted(job: Job, status: dict[str, Any], node: str) -> Callable[[], None]:
    os.kill(_pid(status, node), signal.SIGSTOP)
    return _nothing


def _executor_killed(job: Job, status: dict[str, Any], node: str) -> Callable[[], None]:
    os.kill(_executor(job, node), signal.SIGKILL)
    return _nothing


def _executor_halted(job: Job, status: dict[str, Any], node: str) -> Callable[[], None]:
    """Its beats stop while its training goes on: what a partition of the control network looks like."""
    pid = _executor(job, node)
    os.kill(pid, signal.SIGSTOP)

    def undo() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    return undo


def _beats_delayed(job: Job, status: dict[str, Any], node: str) -> Callable[[], None]:
    pid = _executor(job, node)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(pid, signal.SIGCONT)
    return _nothing


def _driver_killed(job: Job, status: dict[str, Any], node: str) -> Callable[[], None]:
    job.kill_driver()
    return _nothing


def _node_down(job: Job, status: dict[str, Any], node: str) -> Callable[[], None]:
    folder = _node_folder(job, node)
    switch_off(folder)
    return lambda: switch_on(folder)


def _checkpoint_corrupt(job: Job, status: dict[str, Any], node: str) -> Callable[[], None]:
    """Everything in memory is lost, and the newest checkpoint on the disk is rotten."""
    steps = sorted((int(path.name) for path in (job.folder / "checkpoints").iterdir() if path.name.isdecimal()), reverse=True)
    complete = [step for step in steps if (job.folder / "checkpoints" / str(step) / "manifest.json").is_file()]
    if len(complete) > 1:
        files = [path for path in (job.folder / "checkpoints" / str(complete[0])).rglob("*") if path.is_file() and "/d/" in str(path)]
        largest = max(files, key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            file.seek(largest.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0xFF]))
    for keeper in _keepers(job):
        with suppress(psutil.NoSuchProcess):
            keeper.kill()
    return _process_killed(job, status, node)


def _keepers(job: Job) -> Iterator[psutil.Process]:
    place = str(job.folder / "cluster" / "nodes")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any("keeper_process" in word for word in process.cmdline()) and any(place in word for word in process.cmdline()):
                yield process


KINDS: Mapping[str, Fault] = {
    "process_killed": Fault(_process_killed),
    "process_halted": Fault(_process_halted),
    "executor_killed": Fault(_executor_killed),
    "executor_halted": Fault(_executor_halted),
    "beats_delayed": Fault(_beats_delayed, interrupts=False),
    "driver_killed": Fault(_driver_killed, hits_node=False, interrupts=False),
    "node_down": Fault(_node_down),
    "checkpoint_corrupt": Fault(_checkpoint_corrupt),
}


def draw(faults: int, seed: int) -> list[tuple[str, int]]:
    """A random scenario over all kinds: kind, and a number that chooses the node. Every kind comes before one comes again."""
    random, drawn = Random(seed), []
    while len(drawn) < faults:
        kinds = list(KINDS)
        random.shuffle(kinds)
        drawn += [(kind, random.randrange(1 << 16)) for kind in kinds]
    return drawn[:faults]

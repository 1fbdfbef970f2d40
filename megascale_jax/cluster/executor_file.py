"""Which process is the executor of a node's folder: ``executor.json``, written by the executor itself, with pid and start time."""

import json
import os
from contextlib import suppress
from pathlib import Path

import psutil

from megascale_jax.observe.report import replace_file

EXECUTOR_FILE = "executor.json"


def record_executor(node: Path) -> None:
    """Say that this process is the executor of a node's folder. Raises OSError."""
    record = {"pid": os.getpid(), "started": started_ticks(os.getpid())}
    replace_file(node / EXECUTOR_FILE, json.dumps(record).encode())


def executor_process(node: Path) -> psutil.Process | None:
    """The executor of a node's folder if it runs on this machine."""
    try:
        record = json.loads((node / EXECUTOR_FILE).read_text())
        process = psutil.Process(record["pid"])
        if process.status() == psutil.STATUS_ZOMBIE or started_ticks(record["pid"]) != record["started"]:
            return None
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return None
    return process


def has_started(executor: int, pid: int) -> bool:
    """Whether a process lives here and was started by an executor, itself or through another: numbers of dead ones are used again."""
    with suppress(psutil.Error):
        return executor in (parent.pid for parent in psutil.Process(pid).parents())
    return False


def started_ticks(pid: int) -> int:
    """When a process was started, in the kernel's ticks since boot: unlike a date, no clock can change it. Raises OSError without it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])

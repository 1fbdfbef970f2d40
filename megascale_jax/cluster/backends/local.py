"""Nodes as processes of this machine, so that a laptop shows the whole loop.

A node is a folder with a process: ``executor.json`` says which, ``executor.log`` what it says. Executors have
sessions of their own and outlive the driver, which finds them again. A file named ``down`` in the folder makes the node a
machine that is switched off: its executor is not started.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megascale_jax.cluster.backends.base import NODES_FOLDER, Start
from megascale_jax.cluster.executor_file import executor_process
from megascale_jax.errors import BackendError

DOWN_FILE = "down"


class LocalEngine:
    """So many nodes of this machine."""

    host = "127.0.0.1"
    launch = ""

    def __init__(self, number: int):
        self.names = tuple(f"node-{index}" for index in range(number))

    def backend(self, start: Start) -> "LocalBackend":
        """Processes below ``nodes`` of the job's folder."""
        return LocalBackend(start.folder / NODES_FOLDER, local_command(start.driver, start.security, start.training))

    def start_over(self) -> str:
        """This machine is all there is."""
        return ""


class LocalBackend:
    """Executors below ``folder``; ``command`` starts one, with the node's name and folder between its two parts."""

    def __init__(self, folder: Path, command: tuple[Sequence[str], Sequence[str]], *, retry_s: float = 0.5):
        self._folder, self._command, self._retry_s = folder, command, retry_s
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._tried: dict[str, float] = {}

    def ensure(self, name: str) -> None:
        """Start the executor unless it runs; not more often than every ``retry_s``."""
        node = self._folder / name
        now = time.monotonic()
        if (node / DOWN_FILE).exists() or self.is_alive(name) or now < self._tried.get(name, 0.0) + self._retry_s:
            return
        self._tried[name] = now
        try:
            node.mkdir(parents=True, exist_ok=True, mode=0o700)
            with (node / "executor.log").open("ab") as log:
                child = subprocess.Popen(
                    [*self._command[0], "--node", name, "--folder", str(node), *self._command[1]],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._children[name] = child
        except OSError as error:
            raise BackendError(f"its executor cannot be started: {error}") from error

    def is_alive(self, name: str) -> bool | None:
        """Whether the process that was started, or the one of ``executor.json``, is there."""
        child = self._children.get(name)
        return (child is not None and child.poll() is None) or executor_process(self._folder / name) is not None

    def remove(self, name: str, machine: str, reason: str) -> None:
        """End the executor; the kernel ends its processes with it. The driver asks for this once they are no longer needed."""
        self.release(name)

    def restore(self, name: str, machine: str) -> None:
        """Nothing to do: `ensure` starts it again."""

    def taken_back(self) -> Mapping[str, str]:
        """Nobody can put a process back without the driver."""
        return {}

    def switch(self, machine: str) -> None:
        """All nodes are on one machine."""

    def release(self, name: str) -> None:
        """End the executor, as in `remove`."""
        if (child := self._children.get(name)) is not None:
            child.kill()  # it may not have said yet which process it is
        process = executor_process(self._folder / name)
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def facts(self) -> Mapping[str, str]:
        """The folder of the nodes."""
        return {"nodes": str(self._folder)}


def local_command(driver: tuple[str, int], security: Path, training: Sequence[str]) -> tuple[list[str], list[str]]:
    """How an executor of this installation is started: what comes before the node's own options, and what comes after."""
    start = [sys.executable, "-m", "megascale_jax.cluster.executor_process", "--driver", f"{driver[0]}:{driver[1]}"]
    return [*start, "--security", str(security)], ["--", *training]


def end_executors(nodes: Path) -> None:
    """Kill all executors below a folder, and their processes with them: the last resort of whoever started them."""
    for node in nodes.glob("*"):
        process = executor_process(node)
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                process.kill()


class LocalPower:
    """Switches nodes below ``folder`` off, as if they had lost power, and on again."""

    def __init__(self, folder: Path):
        self._folder = folder

    def off(self, node: str) -> None:
        """Nothing of it runs, and nothing starts."""
        place = self._folder / node
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        (place / DOWN_FILE).touch()
        process = executor_process(place)
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                os.kill(process.pid, signal.SIGKILL)

    def on(self, node: str) -> None:
        """The contrary."""
        (self._folder / node / DOWN_FILE).unlink(missing_ok=True)

"""Jobs under drill: one that the drill starts for itself, as a user would, and one that runs already."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from megascale_jax.cluster.asking import ask_driver
from megascale_jax.cluster.backends.local import NODES_FOLDER, LocalPower, end_executors
from megascale_jax.cluster.driver_process import DRIVER_FILE, driver_pid
from megascale_jax.cluster.injury import Power
from megascale_jax.cluster.job import job_folder
from megascale_jax.cluster.ports import free_ports
from megascale_jax.cluster.proxy import Proxy
from megascale_jax.cluster.slow_compile import CACHE
from megascale_jax.cluster.small_disk import mount_small_disk, unmount
from megascale_jax.errors import MegascaleError, UsageError
from megascale_jax.observe.marks import DRILL

ISOLATES = "cluster.slow_nodes.action=act"
"""Of the command of a job that acts on slow nodes."""
END_S = 60.0
"""Longest that a driver may take to end its job."""
SUCCESSOR_S = 20.0
"""Time in which whatever looks after a driver that was killed may start another one."""
DISK_BYTES = 2 << 30
_ELSEWHERE = ("slurm", "kubernetes")
"""Backends whose nodes are, by their nature, other machines."""


class OwnJob:
    """A local job of the drill's own: ``command`` drives it, with the run folder still to be added."""

    flips_bits = True

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        is_ours: bool,
        shrinks: bool = False,
        compiles_anew: bool = False,
        isolates: bool = False,
    ):
        """Nodes reach their driver through a proxy; with ``is_ours`` the folder is the drill's, and a small disk where one may be mounted.

        Raises UsageError when the folder is there already.
        """
        self.folder, self.shrinks, self.compiles_anew, self.isolates = folder, shrinks, compiles_anew, isolates
        self.power: Power | None = LocalPower(job_folder(folder) / NODES_FOLDER)
        self.log = folder.parent / f"{folder.name}.driver.log"
        self._environment = dict(os.environ) | {DRILL: "1"} | ({CACHE: "false"} if compiles_anew else {})
        self._driver: subprocess.Popen[bytes] | None = None
        port = free_ports("127.0.0.1", 1)[0]
        self.proxy: Proxy | None = Proxy(("127.0.0.1", port))
        try:
            folder.mkdir(parents=True)
        except FileExistsError as error:
            raise UsageError(
                f"{folder} is there already; a drill's job begins in a new folder (--attach hurts a run that goes on)"
            ) from error
        self.has_small_disk = is_ours and mount_small_disk(folder, DISK_BYTES)
        host, advertised = self.proxy.address
        self._command = [*command, "--run-folder", str(folder), "--port", str(port), "--advertise", f"{host}:{advertised}"]

    def start(self) -> None:
        """Start the driver, as a user would."""
        with self.log.open("ab") as log:
            self._driver = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self._environment,
            )

    def status(self) -> dict[str, Any] | None:
        """What the driver says; ``None`` while there is none. Raises UsageError when it has ended."""
        if self._driver is not None and (code := self._driver.poll()) is not None:
            raise UsageError(f"the driver ended with code {code}; its words are in {self.log}")
        return _status(self.folder)

    def kill_driver(self) -> None:
        """SIGKILL, and the same command again."""
        assert self._driver is not None, "only a driver of our own is killed"
        self._driver.kill()
        self._driver.wait()
        self.start()

    def end(self) -> None:
        """Stop the job; with force when it does not stop by itself."""
        if self._driver is not None and self._driver.poll() is None:
            self._driver.send_signal(signal.SIGTERM)
            try:
                self._driver.wait(END_S)
            except subprocess.TimeoutExpired:
                self._driver.kill()
        end_executors(job_folder(self.folder) / NODES_FOLDER)
        if self.proxy is not None:
            self.proxy.close()

    def clear(self) -> None:
        """Give the small disk back."""
        if self.has_small_disk:
            unmount(self.folder)


class RunningJob:
    """A job that somebody started, with its driver and its nodes on this machine. Nothing of it is ended here."""

    proxy: Proxy | None = None
    shrinks = False

    def __init__(self, folder: Path):
        """Raises RunFolderError when no driver has that folder, UsageError when it does not run on this machine."""
        self.folder = folder
        driver = self._driver()
        command, environment = driver.cmdline(), driver.environ()
        is_local = not any(word.removeprefix("--backend=") in _ELSEWHERE for word in command)
        self.power: Power | None = LocalPower(job_folder(folder) / NODES_FOLDER) if is_local else None
        self.has_small_disk = folder.is_mount() and shutil.disk_usage(folder).total <= DISK_BYTES
        self.flips_bits = DRILL in environment
        self.compiles_anew = environment.get(CACHE) == "false"
        self.isolates = ISOLATES in command

    def status(self) -> dict[str, Any] | None:
        """What the driver says; ``None`` while there is none."""
        return _status(self.folder)

    def kill_driver(self) -> None:
        """SIGKILL; its very command again if nothing else starts one."""
        driver = self._driver()
        command, folder, environment, parent = driver.cmdline(), driver.cwd(), driver.environ(), driver.parent()
        driver.kill()
        driver.wait(END_S)
        (job_folder(self.folder) / DRIVER_FILE).unlink(missing_ok=True)
        limit = time.monotonic() + SUCCESSOR_S
        while time.monotonic() < limit:
            if (job_folder(self.folder) / DRIVER_FILE).exists() or _has_child(parent, command):
                return
            time.sleep(0.2)
        command = [word for word in command if word != "--fresh"]  # it counts for the first driver alone
        subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def _driver(self) -> psutil.Process:
        pid = driver_pid(job_folder(self.folder))
        with suppress(psutil.Error):
            driver = psutil.Process(pid)
            if "drive" in driver.cmdline():
                return driver
        raise UsageError(f"process {pid} is no driver: that of {self.folder} does not run on this machine")

    def end(self) -> None:
        """It goes on."""


def _has_child(parent: psutil.Process | None, command: Sequence[str]) -> bool:
    """Whether whatever had started a driver has started another one, which may take long to say where it is."""
    wanted = [word for word in command if word != "--fresh"]
    with suppress(psutil.Error):
        for child in parent.children() if parent is not None else ():
            with suppress(psutil.Error):
                if [word for word in child.cmdline() if word != "--fresh"] == wanted:
                    return True
    return False


def _status(folder: Path) -> dict[str, Any] | None:
    with suppress(MegascaleError, OSError):
        return ask_driver(folder, None, "status").status
    return None

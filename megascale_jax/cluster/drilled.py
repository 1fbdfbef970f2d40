"""Jobs under drill: one that the drill starts for itself, as a user would, and one that runs already."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from megascale_jax.cluster.asking import ask_driver
from megascale_jax.cluster.backends.local import NODES_FOLDER, end_executors
from megascale_jax.cluster.driver_process import DRIVER_FILE, driver_pid
from megascale_jax.cluster.job import job_folder
from megascale_jax.cluster.ports import free_ports
from megascale_jax.cluster.proxy import Proxy
from megascale_jax.cluster.small_disk import mount_small_disk, unmount
from megascale_jax.errors import MegascaleError, UsageError
from megascale_jax.observe.marks import DRILL

END_S = 60.0
"""Longest that a driver may take to end its job."""
SUCCESSOR_S = 20.0
"""Time in which whatever looks after a driver that was killed may start another one."""
DISK_BYTES = 2 << 30


class OwnJob:
    """A local job of the drill's own: ``command`` drives it, with the run folder still to be added."""

    flips_bits = True

    def __init__(self, folder: Path, command: Sequence[str], *, is_ours: bool, shrinks: bool = False):
        """Nodes reach their driver through a proxy; with ``is_ours`` the folder is the drill's, and a small disk where one may be mounted.

        Raises UsageError when the folder is there already.
        """
        self.folder, self.shrinks = folder, shrinks
        self.log = folder.parent / f"{folder.name}.driver.log"
        self._environment = dict(os.environ) | {DRILL: "1"}
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
    has_small_disk = False
    shrinks = False
    flips_bits = False

    def __init__(self, folder: Path):
        """Raises RunFolderError when no driver has that folder."""
        self.folder = folder
        driver_pid(job_folder(folder))

    def status(self) -> dict[str, Any] | None:
        """What the driver says; ``None`` while there is none."""
        return _status(self.folder)

    def kill_driver(self) -> None:
        """SIGKILL; its very command again if nothing else starts one."""
        place = job_folder(self.folder)
        driver = psutil.Process(driver_pid(place))
        command, folder, environment = driver.cmdline(), driver.cwd(), driver.environ()
        if "drive" not in command:
            raise UsageError(f"process {driver.pid} is no driver: that of {self.folder} does not run on this machine")
        driver.kill()
        driver.wait(END_S)
        (place / DRIVER_FILE).unlink(missing_ok=True)
        limit = time.monotonic() + SUCCESSOR_S
        while time.monotonic() < limit:
            if (place / DRIVER_FILE).exists():
                return
            time.sleep(0.2)
        command = [word for word in command if word != "--fresh"]  # it counts for the first driver alone
        subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def end(self) -> None:
        """It goes on."""


def _status(folder: Path) -> dict[str, Any] | None:
    with suppress(MegascaleError, OSError):
        return ask_driver(folder, None, "status").status
    return None

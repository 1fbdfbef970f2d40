"""The process of a loader, as local rank 0 starts it, watches it and ends it.

Three things tie the two together: the listening socket, which rank 0 keeps so that ranks stay in line for the next loader; a pipe as
standard input, whose end tells the loader that rank 0 has died; and a pipe that only the loader holds, whose end tells rank 0 that the
loader has. What the loader writes goes into a file without a name.
"""

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from megascale_jax.data.host import HostGroup
from megascale_jax.data.wire import Connection, listen

COMMAND = (sys.executable, "-P", "-m", "megascale_jax.data.loader")
"""Starts a loader; its arguments follow."""

END_LIMIT_S = 3.0
"""Longest wait for a loader or a thread that was told to end; then it is killed."""
_LEAVE_LIMIT_S = 1.0
"""The same for a loader that others may still use; it is left behind."""
_LAST_LINES = 12


class LoaderProcess:
    """The loader as local rank 0 sees it: the listening socket, which outlives it, and one process at a time."""

    def __init__(self, group: HostGroup, limit_s: float):
        """Raises ``OSError`` (EADDRINUSE) while another run has the group's name."""
        self._listener = listen(group.name)
        self._arguments = [str(self._listener.fileno()), str(group.local_size), str(limit_s)]
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (as long-lived as this object)
        self._process: subprocess.Popen[bytes] | None = None
        self._sign_of_life = -1

    @property
    def pid(self) -> int | None:
        """Process id of the newest loader."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the newest loader; None while it runs."""
        return None if self._process is None else self._process.returncode

    def start(self) -> None:
        """Start a loader; the former one has ended. Ranks may connect at once. Raises ``OSError`` when the system cannot."""
        self._words.seek(0)
        self._words.truncate()
        # It must find the modules that this process finds, wherever it found them.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        sign_of_life, held_by_loader = os.pipe()
        self._process = subprocess.Popen(
            [*COMMAND, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=self._words,
            stderr=self._words,
            pass_fds=[self._listener.fileno(), held_by_loader],
            env=environment,
        )
        os.close(held_by_loader)
        self._sign_of_life = sign_of_life

    def is_readable(self, connection: Connection) -> bool:
        """Wait for something to read from ``connection``; False when the loader has died before it accepted it.

        Such a connection is still in line, for the next loader.
        """
        readable, _, _ = select.select([connection, self._sign_of_life], [], [])
        if connection not in readable:
            self.end(kill=True)
            readable, _, _ = select.select([connection], [], [], 0)
        return connection in readable

    def end(self, *, kill: bool) -> str:
        """Wait for the process to end, then kill it if asked to; how it ended."""
        if self._process is None:
            return "was never started"
        try:
            code = self._process.wait(END_LIMIT_S if kill else _LEAVE_LIMIT_S)
        except subprocess.TimeoutExpired:
            if not kill:
                return "has not ended"
            self.kill()
            code = self._process.wait()
        if self._sign_of_life >= 0 and self._process.stdin is not None:
            self._process.stdin.close()
            os.close(self._sign_of_life)
            self._sign_of_life = -1
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """SIGKILL to the process, if it lives."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def last_words(self) -> str:
        """The last lines that it wrote."""
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:]) or "(it wrote nothing)"

    def close(self, *, kill: bool) -> None:
        """Refuse all connections from now on, and end the process as in ``end``. May be called again."""
        if not self._words.closed:
            self._listener.close()
            self.end(kill=kill)
            self._words.close()

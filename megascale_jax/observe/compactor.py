"""When a training run's events are compacted: by a process of its own behind it (`event_compaction.py`). No JAX, and no pyarrow."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from megascale_jax.observe.event_paths import found

RESTED_S = 60.0
"""A segment that was written to since is not looked at."""
PERIOD_S = 600.0
"""Between two looks at the latest."""


class Compactor:
    """Compactions in a process of their own, at the lowest priority; never raises, and waits for none."""

    def __init__(self, run: Path, keep_mb: float | None, keep_days: float | None):
        self._run = run
        limits = {"--keep-mb": keep_mb, "--keep-days": keep_days}
        self._options = [word for name, value in limits.items() if value is not None for word in (name, str(value))]
        self._process: subprocess.Popen[bytes] | None = None
        self._looked_s = time.monotonic()

    def start(self) -> None:
        """Begin one, unless one is at work or there is nothing to do: all segments are still written to."""
        self._start(RESTED_S, stderr=None)

    def start_in_time(self) -> None:
        """The same, when `PERIOD_S` have passed since the last time; may be called as often as one likes."""
        if time.monotonic() - self._looked_s >= PERIOD_S:
            self.start()

    def finish(self) -> None:
        """Begin the last one, of what this process has just closed; it may go on after this process."""
        self._start(0.0, stderr=subprocess.DEVNULL)  # whoever reads ours to its end must not wait for it

    def _start(self, rested_s: float, stderr: int | None) -> None:
        self._looked_s = time.monotonic()
        if self._process is not None and self._process.poll() is None:
            return
        with suppress(OSError):
            now = time.time()
            if any(now - path.stat().st_mtime >= rested_s for path in found(self._run)[0]):
                command = [sys.executable, "-m", "megascale_jax.observe.event_compaction", str(self._run), *self._options]
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)

"""The dashboard beside a driver: a process of its own, so nothing that happens in it disturbs the driver, and it dies with the driver."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megascale_jax.cluster import die_with_parent
from megascale_jax.cluster.job import job_folder

LOG_FILE = "dashboard.log"
NICENESS = 10
_STOP_S = 6.0


@contextmanager
def beside_driver(run: Path, port: int, security: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """Have `megascale serve` run in here, at 127.0.0.1; without it when it cannot be started. What it says is in the job's folder."""
    serve = [sys.executable, "-m", "megascale_jax.cli.main", "serve", str(run), "--port", str(port)]
    serve += [] if security is None else ["--security", str(security)]
    command = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *serve]
    log = job_folder(run) / LOG_FILE
    try:
        with log.open("wb") as stream:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True)
    except OSError as error:
        say(f"no dashboard: {error}")
        yield
        return
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    say(f"dashboard at {'http' if security is None else 'https'}://127.0.0.1:{port}/ (its log: {log})")
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)

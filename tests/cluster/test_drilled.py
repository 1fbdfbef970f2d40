"""A job that somebody else started: what a drill may do to it, and its driver killed under whatever looks after it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megascale_jax.cluster import drilled
from megascale_jax.cluster.drilled import RunningJob
from megascale_jax.cluster.driver_process import DRIVER_FILE
from megascale_jax.cluster.job import job_folder
from megascale_jax.cluster.slow_compile import CACHE
from megascale_jax.errors import UsageError
from megascale_jax.observe.marks import DRILL

LIMIT_S = 20.0
SLOW_S = 2.0
"""After so long the driver says where it is; what looks after it has started it at once."""
DRIVER = f"""
import json, os, sys, time
time.sleep({SLOW_S})
with open(sys.argv[2], "w") as file:
    json.dump({{"host": "127.0.0.1", "port": 1, "pid": os.getpid()}}, file)
time.sleep(100)
"""
FOREVER = 'while true; do "$@"; done'


class Started:
    """Processes with the job's folder in their command lines, all ended afterwards."""

    def __init__(self, folder: Path):
        self.run, self.file = folder / "run", job_folder(folder / "run") / DRIVER_FILE
        self.file.parent.mkdir(parents=True)
        self.script = folder / "driver.py"
        self.script.write_text(DRIVER)

    def start(self, *before: str, backend: str = "slurm", **variables: str) -> RunningJob:
        command = [*before, sys.executable, str(self.script), "drive", str(self.file), "--backend", backend]
        subprocess.Popen(command, env=os.environ | variables)
        limit = time.monotonic() + LIMIT_S
        while not self.file.exists() or not self.file.read_text():
            assert time.monotonic() < limit
            time.sleep(0.05)
        return RunningJob(self.run)

    def drivers(self) -> list[psutil.Process]:
        found = [process for process in psutil.process_iter(["cmdline"]) if str(self.script) in (process.info["cmdline"] or ())]
        return [process for process in found if process.info["cmdline"][0] == sys.executable]

    def end(self) -> None:
        for process in psutil.process_iter(["cmdline"]):
            if str(self.script) in (process.info["cmdline"] or ()):
                process.kill()


@pytest.fixture
def started(tmp_path) -> Iterator[Started]:
    started = Started(tmp_path)
    yield started
    for _ in range(2):  # a shell may have started another one meanwhile
        started.end()


@pytest.mark.parametrize("looked_after", [True, False])
def test_after_a_driver_was_killed_there_is_one_again_and_never_two(started, monkeypatch, looked_after):
    monkeypatch.setattr(drilled, "SUCCESSOR_S", SLOW_S / 2)
    job = started.start(*(["bash", "-c", FOREVER, "sh"] if looked_after else []))
    (before,) = started.drivers()
    job.kill_driver()
    limit = time.monotonic() + LIMIT_S
    while not started.file.exists() or not started.file.read_text():
        assert time.monotonic() < limit
        time.sleep(0.05)
    (after,) = started.drivers()
    assert json.loads(started.file.read_text())["pid"] == after.pid != before.pid
    assert ("bash" in after.parent().name()) == looked_after


def test_what_a_drill_may_do_to_it_is_seen_from_its_driver(started):
    job = started.start()
    assert (job.power, job.flips_bits, job.compiles_anew, job.isolates, job.has_small_disk) == (None, False, False, False, False)
    started.end()
    started.file.unlink()
    job = started.start(backend="local", **{DRILL: "1", CACHE: "false"})
    assert job.power is not None and job.flips_bits and job.compiles_anew


def test_a_driver_of_another_machine_is_not_taken_for_a_process_of_this_one(started):
    started.file.write_text(json.dumps({"host": "127.0.0.1", "port": 1, "pid": os.getpid()}))
    with pytest.raises(UsageError, match="does not run on this machine"):
        RunningJob(started.run)

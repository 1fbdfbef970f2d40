"""Eight jax.distributed processes, pipe 2 x data 2 x tensor 2, of which one stands still: named by the event files of all."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from megascale_jax.errors import RunFolderError
from megascale_jax.observe.marks import SECTIONS
from megascale_jax.views.progress import read_progress
from megascale_jax.views.why import judge
from tests.build import TINY

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
STUCK = 5
PROGRAM = """
import os, pathlib, signal, sys, time

def stand_still(*_):
    while True:  # all other threads go on, the one that writes events too
        time.sleep(1)

signal.signal(signal.SIGUSR1, stand_still)
pathlib.Path(sys.argv.pop(1), os.environ["MEGASCALE_PROCESS_ID"]).write_text(str(os.getpid()))
from megascale_jax.cli.main import main
main()
"""
OVERRIDES = [
    *TINY,
    "train.steps=100000",
    "train.evaluation.every=null",
    "train.checkpoint.every=100000",
    "train.digest_every=null",
    "train.logging.tensorboard=false",
    "train.sample_prompt=null",
]


@pytest.fixture
def job(tmp_path):
    """A running job: its folder, its processes by rank, and how far it is."""
    corpus, pids, program, run = (tmp_path / name for name in ("corpus", "pids", "program.py", "run"))
    corpus.mkdir()
    pids.mkdir()
    program.write_text(PROGRAM)
    for index in range(30):
        (corpus / f"{index:02}.txt").write_text(f"line {index} of a small corpus, {index * index} words\n" * 12)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("XLA", "JAX", "MEGASCALE"))}
    environment |= {
        "MEGASCALE_COMMAND": f"{sys.executable} {program} {pids} train",
        "MEGASCALE_CACHE": str(tmp_path / "cache"),
        "MEGASCALE_KEEPER_IDLE_S": "5",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "TMPDIR": str(tmp_path),
    }
    command = [str(ROOT / "launch/local.sh"), "-n", "8", "quickstart", *OVERRIDES, f"train.data.source={corpus}", "--run-folder", str(run)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process, run, pids, tmp_path / "log"
    finally:
        for path in pids.iterdir():
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        process.wait(60)


def wait_for(process, log, condition):
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        if (found := condition()) is not None:
            return found
        assert process.poll() is None, log.read_text(errors="replace")
        time.sleep(1)
    raise AssertionError(f"not within {LIMIT_S} s:\n{log.read_text(errors='replace')}")


def test_a_rank_that_stands_still_is_named_by_the_events_of_all(job):
    process, run, pids, log = job

    def trains():
        try:
            progress = read_progress(run)
        except RunFolderError:
            return None
        steps = [one.step for one in progress.ranks if one.passes.get("step", 0) > 2 and one.devices]
        return progress if len(steps) == len(progress.ranks) == 8 else None

    def stands():
        found = judge(read_progress(run))
        return found if found.verdict in ("slow", "hang") else None

    progress = wait_for(process, log, trains)
    assert progress.mesh == (2, 2, 2) and [place for one in progress.ranks for place in one.places] == list(product(range(2), repeat=3))
    assert judge(progress).verdict == "running"
    os.kill(int((pids / str(STUCK)).read_text()), signal.SIGUSR1)
    found = wait_for(process, log, stands)
    assert found.named == (STUCK,), found
    states = {one.rank: one for one in found.ranks}
    assert states[STUCK].state == "stuck" and states[STUCK].section in SECTIONS and states[STUCK].coordinates == ((1, 0, 1),)
    assert {one.state for one in found.ranks if one.rank != STUCK} == {"waiting"}
    assert found.until - (states[STUCK].last_seen or 0) < 15, "it is alive, and says so"

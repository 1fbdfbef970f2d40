"""`megascale drive --backend slurm` on a real Slurm of this machine: batch script, steps, drains, spares, a new queue.

A killed training process is in `test_drive.py`: no backend takes part in it.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megascale_jax.cluster.asking import ask_driver
from megascale_jax.cluster.executor_file import executor_process
from megascale_jax.cluster.job import token_file
from megascale_jax.cluster.link.security import Security, make_token
from megascale_jax.cluster.link.tokens import Role
from megascale_jax.errors import MegascaleError
from tests.multiprocess.test_drive import has_beats
from tests.multiprocess.test_resume import OVERRIDES, ROOT
from tests.real_slurm import RealSlurm, missing_programs, real_slurm

LIMIT_S = 120.0
ADOPTED_S = 2.0
"""A driver looks at its steps as soon as it is there; what it would start twice would be there by then."""
REVOKED_S = 3.0
"""Nodes refuse a job that comes again in the second in which it was ended; Slurm by itself waits for two minutes."""
pytestmark = pytest.mark.skipif(bool(missing_programs()), reason=f"Slurm is not installed: no {', '.join(missing_programs())}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[RealSlurm]:
    with real_slurm(tmp_path_factory.mktemp("slurm"), 5) as cluster:
        yield cluster


class BatchJob:
    """The batch script of a driven run, in a queue."""

    def __init__(self, slurm: RealSlurm, folder: Path, nodes: int, *arguments: str):
        self.run, self._slurm, self._log = folder / "run", slurm, folder / "job.log"
        program = folder / "bin" / "megascale"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m megascale_jax.cli.main "$@"\n')
        program.chmod(0o755)
        corpus = folder / "corpus.txt"
        corpus.write_text("".join(f"line {number} of a small corpus, {number * number} words\n" for number in range(400)))
        settings = [*OVERRIDES, "train.steps=100000", "train.checkpoint.every=10", f"train.data.source={corpus}"]
        settings += [f"cluster.slurm.node_folder={self.run}/cluster/nodes"]
        environment = {name: value for name, value in slurm.environment.items() if not name.startswith(("XLA", "JAX", "MEGASCALE"))}
        environment |= {"PATH": f"{program.parent}:{environment['PATH']}", "PYTHONPATH": str(ROOT)}
        environment |= {"MEGASCALE_CACHE": str(folder.parent / "cache"), "MEGASCALE_KEEPER_IDLE_S": "8"}
        environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        options = ["--parsable", "--gpus-per-node=0", f"--output={self._log}", f"--nodes={nodes}", "--chdir", str(folder)]
        script = [str(ROOT / "launch/slurm-drive.sbatch"), "quickstart", *settings, *arguments, "--run-folder", str(self.run)]
        self._slurm = RealSlurm(slurm.folder, slurm.names, environment)
        self.number = self._slurm.ask("sbatch", *options, *script).strip()

    def status(self) -> dict[str, Any]:
        try:
            return ask_driver(self.run, None, "status").status
        except MegascaleError:
            return {"phase": "unreachable", "step": 0, "incidents": [], "nodes": {}, "seats": [], "attempt": 0}

    def until(self, what: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        limit = time.monotonic() + LIMIT_S
        while not condition(status := self.status()):
            assert time.monotonic() < limit, f"{what}: {status}\n{self.words()[-4000:]}"
            time.sleep(0.3)
        return status

    def words(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def steps(self) -> dict[str, str]:
        """Number of the executor's step of each node; fails when a node has two."""
        lines = self._slurm.ask("squeue", "--steps", "--noheader", "--jobs", self.number, "--format=%i|%N|%j").splitlines()
        found = [(line.split("|")[1], line.split("|")[0]) for line in lines if "|megascale-" in line]
        assert len(dict(found)) == len(found), lines
        return dict(found)

    def order(self, action: str, by: str | None = None, **values: Any) -> str:
        place = self.run / "cluster" / "security"
        answer = ask_driver(self.run, None if by is None else token_file(place, by), action, **values)
        assert answer.is_done, answer.text
        return answer.text

    def evict(self, node: str) -> None:
        """By two admins."""
        place = self.run / "cluster" / "security"
        if not token_file(place, "second").exists():
            make_token(Security.load(place, role="driver"), "second", Role.ADMIN, days=1, path=token_file(place, "second"))
        number = int(self.order("evict", node=node).rpartition(" ")[2])
        self.order("confirm", by="second", number=number)

    def state(self) -> str:
        return self._slurm.ask("squeue", "--noheader", "--states=all", "--jobs", self.number, "--format=%T").strip()

    def left(self) -> list[str]:
        """Command lines of processes that have to do with the run."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or ())
            if str(self.run) in words:
                found.append(words)
        return found


def is_well(status: dict[str, Any]) -> bool:
    return status["phase"] == "running" and has_beats(status) and all(one["restored_s"] is not None for one in status["incidents"])


def wait_for(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, what()
        time.sleep(0.2)


def test_a_driven_allocation_heals(slurm, tmp_path) -> None:
    job = BatchJob(slurm, tmp_path, 3, "cluster.grace_s=8", "cluster.wait_s=12", "--nodes", "2", "--spares", "1")
    status = job.until("start", lambda status: is_well(status) and status["step"] >= 3 and len(status["nodes"]) == 3)
    assert set(status["nodes"]) == set(job.steps()) == set(slurm.names[:3])
    first, victim = status["seats"]
    status = kill_executor(job, status, victim)
    status = kill_driver(job, status)
    spare = evict(slurm, job, status, victim)

    job.order("uncordon", node=victim)
    job.until("uncordoned", lambda status: status["nodes"][victim]["status"] == "ready" and status["step"] >= 20)
    wait_for(lambda: "DRAIN" not in slurm.states()[victim], slurm.states)

    job.evict(victim)
    job.evict(spare)
    wait_for(lambda: f"job {job.number} is queued again" in job.words(), job.words)
    wait_for(lambda: job.state() == "PENDING", job.words)
    assert {name for name, state in slurm.states().items() if "DRAIN" in state} == {victim, spare}, "so Slurm gives others"
    assert (job.run / "cluster" / "journal.sqlite").exists()
    time.sleep(REVOKED_S)
    slurm.ask("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    status = job.until("on other nodes", lambda status: is_well(status) and status["attempt"] == 1)
    assert set(status["nodes"]) == set(slurm.names) - {victim, spare} and first in status["nodes"]
    assert status["step"] >= 10, "from the checkpoint on storage"

    slurm.ask("scancel", "--batch", "--signal=TERM", job.number)  # as Slurm does before the time limit
    wait_for(lambda: job.state() == "FAILED", job.words)
    assert "ExitCode=75:0" in slurm.ask("scontrol", "--oneliner", "show", "job", job.number)
    wait_for(lambda: not job.left(), job.left)


def kill_executor(job: BatchJob, status: dict[str, Any], victim: str) -> dict[str, Any]:
    before = job.steps()
    executor = executor_process(job.run / "cluster" / "nodes" / victim)
    assert executor is not None
    executor.kill()
    status = job.until("killed executor", lambda status: is_well(status) and len(status["incidents"]) == 1)
    assert status["incidents"][0]["named"] == [victim] and status["seats"][1] == victim, "it came back within its grace"
    after = job.steps()
    assert {name for name in after if after[name] != before[name]} == {victim}
    return status


def kill_driver(job: BatchJob, status: dict[str, Any]) -> dict[str, Any]:
    steps, processes = job.steps(), processes_of(status)
    os.kill(json.loads((job.run / "cluster" / "driver.json").read_text())["pid"], signal.SIGKILL)
    job.until("killed driver", lambda status: is_well(status) and "the driver was killed" in job.words())
    time.sleep(ADOPTED_S)
    status = job.status()
    assert (job.steps(), processes_of(status), len(status["incidents"])) == (steps, processes, 1), "adopted, and nothing else"
    return status


def evict(slurm: RealSlurm, job: BatchJob, status: dict[str, Any], victim: str) -> str:
    spare = next(name for name in status["nodes"] if name not in status["seats"])
    job.evict(victim)
    status = job.until("evicted", lambda status: is_well(status) and len(status["incidents"]) == 2)
    assert status["seats"][1] == spare
    wait_for(lambda: "DRAIN" in slurm.states()[victim] and victim not in job.steps(), slurm.states)
    assert "Reason=megascale: by owner and second" in slurm.ask("scontrol", "--oneliner", "show", "node", victim)
    return spare


def processes_of(status: dict[str, Any]) -> dict[str, list[int]]:
    return {name: [process["pid"] for process in node["processes"]] for name, node in status["nodes"].items()}

"""`megascale drive --backend slurm` on a real Slurm of this machine: batch script, steps, drains, spares, a new queue."""

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

from megascale_jax.cli.job import ask_driver
from megascale_jax.cluster.executor_file import executor_process
from megascale_jax.cluster.job import token_file
from megascale_jax.cluster.link.security import Security, make_token
from megascale_jax.cluster.link.tokens import Role
from megascale_jax.errors import MegascaleError
from tests.multiprocess.test_drive import has_beats
from tests.multiprocess.test_resume import OVERRIDES, ROOT
from tests.real_slurm import RealSlurm, missing_programs, real_slurm

LIMIT_S = 90.0
pytestmark = pytest.mark.skipif(bool(missing_programs()), reason=f"Slurm is not installed: no {', '.join(missing_programs())}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[RealSlurm]:
    with real_slurm(tmp_path_factory.mktemp("slurm"), 4) as cluster:
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
    job = BatchJob(slurm, tmp_path, 3, "cluster.grace_s=6", "--nodes", "2", "--spares", "1")
    status = job.until("start", lambda status: is_well(status) and status["step"] >= 3 and len(status["nodes"]) == 3)
    assert set(status["nodes"]) == set(job.steps()) == {"n1", "n2", "n3"}

    victim = status["seats"][1]
    os.kill(status["nodes"][victim]["processes"][0]["pid"], signal.SIGKILL)
    status = job.until("killed process", lambda status: is_well(status) and len(status["incidents"]) == 1)
    assert status["incidents"][0]["named"] == [victim]

    before = job.steps()
    executor = executor_process(job.run / "cluster" / "nodes" / victim)
    assert executor is not None
    executor.kill()
    status = job.until("killed executor", lambda status: is_well(status) and len(status["incidents"]) == 2)
    assert status["incidents"][1]["named"] == [victim] and status["seats"][1] == victim, "it came back within its grace"
    after = job.steps()
    assert {name: number for name, number in after.items() if name != victim} == {n: number for n, number in before.items() if n != victim}
    assert after[victim] != before[victim]

    pids = {name: [process["pid"] for process in node["processes"]] for name, node in status["nodes"].items()}
    os.kill(json.loads((job.run / "cluster" / "driver.json").read_text())["pid"], signal.SIGKILL)
    status = job.until("killed driver", lambda status: is_well(status) and "the driver was killed" in job.words())
    assert {name: [process["pid"] for process in node["processes"]] for name, node in status["nodes"].items()} == pids, "adopted"
    time.sleep(6.0)  # longer than the driver takes to look at its steps
    assert job.steps() == after and len(job.status()["incidents"]) == 2

    spare = next(name for name in status["nodes"] if name not in status["seats"])
    job.evict(victim)
    status = job.until("evicted", lambda status: is_well(status) and len(status["incidents"]) == 3)
    assert status["seats"][1] == spare
    wait_for(lambda: "DRAIN" in slurm.states()[victim] and victim not in job.steps(), slurm.states)
    assert "megascale: by" in slurm.ask("scontrol", "--oneliner", "show", "node", victim)
    job.order("uncordon", node=victim)
    job.until("uncordoned", lambda status: status["nodes"][victim]["status"] == "ready")
    wait_for(lambda: "DRAIN" not in slurm.states()[victim], slurm.states)

    job.order("stop")
    wait_for(lambda: job.state() in ("COMPLETED", ""), job.words)
    wait_for(lambda: not job.left(), job.left)
    assert "stopped" in job.words()


def test_a_job_without_enough_nodes_is_queued_again_and_goes_on_with_others(slurm, tmp_path) -> None:
    job = BatchJob(slurm, tmp_path, 2, "cluster.grace_s=1", "cluster.wait_s=2", "--nodes", "2", "--spares", "0")
    status = job.until("start", lambda status: is_well(status) and status["step"] >= 12)
    first, victim = status["seats"]
    job.evict(victim)
    wait_for(lambda: f"job {job.number} is queued again" in job.words(), job.words)
    wait_for(lambda: job.state() == "PENDING", job.words)
    assert "DRAIN" in slurm.states()[victim], "so Slurm gives another one"
    slurm.ask("scontrol", "update", f"JobId={job.number}", "StartTime=now")  # Slurm itself would wait for two minutes
    status = job.until("again", lambda status: is_well(status) and status["attempt"] == 1 and victim not in status["nodes"])
    assert status["step"] >= 10, "from the checkpoint on storage"
    assert len(status["seats"]) == 2 and victim not in status["seats"] and first in slurm.names
    assert (job.run / "cluster" / "journal-1.sqlite").exists()

    slurm.ask("scancel", "--batch", "--signal=TERM", job.number)  # as Slurm does before the time limit
    wait_for(lambda: job.state() == "FAILED", job.words)
    assert "ExitCode=75:0" in slurm.ask("scontrol", "--oneliner", "show", "job", job.number)
    wait_for(lambda: not job.left(), job.left)
    slurm.ask("scontrol", "update", f"NodeName={victim}", "State=RESUME")

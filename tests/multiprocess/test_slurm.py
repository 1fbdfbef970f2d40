"""`megascale drive --backend slurm` on a real Slurm of this machine: batch script, steps, drains, spares, a new queue.

What breaks without a hand of Slurm, `megascale drill` breaks, as it would any run that goes on.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from megascale_jax.cli.main import app
from megascale_jax.cluster.asking import ask_driver
from megascale_jax.cluster.job import token_file
from megascale_jax.cluster.link.security import Security, make_token
from megascale_jax.cluster.link.tokens import Role
from megascale_jax.errors import MegascaleError
from tests.multiprocess.test_drive import has_beats
from tests.multiprocess.test_resume import OVERRIDES
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
        self.run, self._log = folder / "run", folder / "job.log"
        corpus = folder / "corpus.txt"
        corpus.write_text("".join(f"line {number} of a small corpus, {number * number} words\n" for number in range(400)))
        settings = [*OVERRIDES, "train.steps=100000", "train.checkpoint.every=10", f"train.data.source={corpus}"]
        variables = {"MEGASCALE_CACHE": str(folder.parent / "cache"), "MEGASCALE_KEEPER_IDLE_S": "8"}
        variables["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        self._slurm, self.number = slurm.submit_drive(
            folder, nodes, self.run, "quickstart", *settings, *arguments, log=self._log, **variables
        )

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
    break_it(job, victim)
    spare = evict(slurm, job, job.status(), victim)

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


def break_it(job: BatchJob, victim: str) -> None:
    """`megascale drill --attach`: nodes, a process and the driver."""
    steps = job.steps()
    faults = drilled(job, "executor_killed", "process_killed")
    assert [fault["right_node_named"] for fault in faults] == [True, True]
    assert job.status()["seats"][1] == victim, "it came back within its grace"
    after, processes = job.steps(), processes_of(job.status())
    assert {name for name in after if after[name] != steps[name]} == {victim}, "a killed process needs no other step"

    (fault,) = drilled(job, "driver_killed")
    assert fault["detected_s"] is None and "the driver was killed" in job.words()
    time.sleep(ADOPTED_S)
    assert (job.steps(), processes_of(job.status())) == (after, processes), "adopted, and nothing else"


def drilled(job: BatchJob, *kinds: str) -> list[dict[str, Any]]:
    """Each of the faults, on the second rank; all healed."""
    scenario, seen = job.run.parent / "scenario.yaml", job.run.parent / "drill.json"
    scenario.write_text("".join(f"- {{kind: {kind}, node: 1}}\n" for kind in kinds))
    done = CliRunner().invoke(app, ["drill", str(scenario), "--attach", str(job.run), "--pause-s", "0", "--json", str(seen)])
    assert done.exit_code == 0, f"{done.output}\n{job.words()[-4000:]}"
    found = json.loads(seen.read_text())
    assert found["recovered"] == len(kinds) and not found["healthy_evicted"]
    return found["faults"]


def evict(slurm: RealSlurm, job: BatchJob, status: dict[str, Any], victim: str) -> str:
    spare = next(name for name in status["nodes"] if name not in status["seats"])
    job.evict(victim)
    status = job.until("evicted", lambda status: is_well(status) and len(status["incidents"]) == 3)
    assert status["seats"][1] == spare
    wait_for(lambda: "DRAIN" in slurm.states()[victim] and victim not in job.steps(), slurm.states)
    assert "Reason=megascale: by owner and second" in slurm.ask("scontrol", "--oneliner", "show", "node", victim)
    return spare


def processes_of(status: dict[str, Any]) -> dict[str, list[int]]:
    return {name: [process["pid"] for process in node["processes"]] for name, node in status["nodes"].items()}

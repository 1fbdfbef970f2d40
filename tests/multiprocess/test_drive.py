"""`megascale drive` as its user runs it: real driver, executors and trainers; a killed process, a killed driver, and the end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megascale_jax.cluster.asking import ask_driver
from megascale_jax.cluster.link.audit import verify
from megascale_jax.errors import MegascaleError
from megascale_jax.observe.metrics import read_metrics
from tests.multiprocess.test_resume import OVERRIDES, ROOT

LIMIT_S = 120.0
STEPS = 60


class Driven:
    """A driven run in a folder."""

    def __init__(self, folder: Path, *arguments: str):
        self.run, self.log = folder / "run", folder / "driver.log"
        self._command = [sys.executable, "-m", "megascale_jax.cli.main", "drive", *arguments, "--run-folder", str(self.run)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("XLA", "JAX", "MEGASCALE"))}
        self._environment = environment | {"MEGASCALE_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
        self._environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.driver = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, env=self._environment)

    def status(self) -> dict[str, Any]:
        try:
            return ask_driver(self.run, None, "status").status
        except MegascaleError:
            return {"phase": "unreachable", "step": 0, "incidents": [], "nodes": {}}

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        limit = time.monotonic() + LIMIT_S
        while not condition(status := self.status()):
            assert time.monotonic() < limit and self.driver.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.3)
        return status


def has_beats(status: dict[str, Any]) -> bool:
    """Whether every node that trains has been heard of."""
    return all(node["processes"] for node in status["nodes"].values() if node["status"] == "assigned")


def test_a_driven_run_heals_and_its_driver_may_die(tmp_path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"line {number} of a small corpus, {number * number} words\n" for number in range(400)))
    steps = [f"train.steps={STEPS}", "train.checkpoint.every=10", f"train.data.source={corpus}", "cluster.grace_s=5"]
    driven = Driven(tmp_path, "quickstart", *OVERRIDES, *steps, "--nodes", "2", "--spares", "1")
    try:
        status = driven.until(lambda status: status["phase"] == "running" and status["step"] >= 3)
        victim = status["seats"][1]
        os.kill(status["nodes"][victim]["processes"][0]["pid"], signal.SIGKILL)
        status = driven.until(lambda status: status["phase"] == "running" and bool(status["incidents"]))
        (incident,) = status["incidents"]
        assert incident["named"] == [victim]
        assert status["seats"][1] == victim, "a killed process is no reason to leave a node"
        pids = {name: [process["pid"] for process in node["processes"]] for name, node in status["nodes"].items()}

        driven.driver.kill()
        driven.driver.wait()
        driven.start()
        driven.until(lambda status: status["phase"] == "running" and has_beats(status))
        status = driven.status()
        assert {name: [process["pid"] for process in node["processes"]] for name, node in status["nodes"].items()} == pids, "adopted"
        assert driven.driver.wait(LIMIT_S) == 0
    finally:
        driven.driver.kill()
    assert "finished: all" in driven.log.read_text()
    summary = json.loads((driven.run / "summary.json").read_text())
    assert summary["steps"] == STEPS
    trained = [line["step"] for line in read_metrics(driven.run, "train")]
    assert trained == list(range(1, STEPS + 1)), "every step once"
    assert verify(driven.run / "cluster" / "audit.jsonl").problem == ""

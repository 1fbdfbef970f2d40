"""The rendered commands, run: real driver, executors and trainers in the place of containers, before the API server of the tests."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megascale_jax.cluster.asking import ask_driver
from megascale_jax.cluster.backends.kubernetes.manifests import render
from megascale_jax.cluster.backends.kubernetes.plan import Plan
from megascale_jax.cluster.backends.kubernetes.secrets import prepare
from megascale_jax.cluster.ports import free_ports
from megascale_jax.errors import MegascaleError
from tests.cluster.kubernetes.fake_kubernetes import FakeKubernetes
from tests.multiprocess.test_resume import OVERRIDES, ROOT

LIMIT_S = 120.0


class Kubelets:
    """Runs the containers of a plan's pods as processes of this machine, with the paths of a folder."""

    def __init__(self, fake: FakeKubernetes, url: str, folder: Path):
        self.fake, self.url, self.folder = fake, url, folder
        jobset = next(one for one in render(fake.plan) if one["kind"] == "JobSet")
        jobs = {job["name"]: job["template"]["spec"]["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}
        self._driver, self._executor = (jobs[role]["containers"][0] for role in ("driver", "executor"))
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("XLA", "JAX", "MEGASCALE"))}
        flags = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0", "MEGASCALE_CACHE": str(folder / "cache")}
        self._environment = environment | flags
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.exits: dict[str, list[int]] = {}
        prepare(fake.plan, folder / "security")
        self.driver = self._start("driver", self._driver, {}, ["-m", "tests.multiprocess.kubernetes_driver", url, fake.plan.namespace])

    def step(self) -> None:
        """Start what should run, end what should not, and say how it is."""
        self.fake.reconcile()
        there = {pod["metadata"]["uid"]: pod for pod in self.fake.pods.values()}
        for uid, process in list(self.running.items()):
            if uid not in there and process.poll() is None:
                process.terminate()
            if process.poll() is not None:
                self.exits.setdefault(uid, []).append(self.running.pop(uid).returncode)
                if uid in there and self.exits[uid][-1] == 0:
                    there[uid]["status"] = {"phase": "Succeeded"}
        for uid, pod in there.items():
            if pod["status"]["phase"] == "Running" and uid not in self.running:
                index = next(iter(pod["metadata"]["annotations"].values()))
                values = {"JOB_COMPLETION_INDEX": index, "MACHINE": pod["spec"]["nodeName"], "POD_IP": "127.0.0.1"}
                self.running[uid] = self._start(uid, self._executor, values, ["-m", "megascale_jax.cli.main"])

    def _start(self, name: str, container: dict[str, Any], values: dict[str, str], program: list[str]) -> subprocess.Popen[bytes]:
        scratch = self.folder / f"scratch-{name}"
        token = self.folder / "security/tokens" / f"node-{values.get('JOB_COMPLETION_INDEX')}"
        places = {"/volume": self.folder / "work", "/security": self.folder / "security", "/scratch": scratch, "/token/node": token}
        places |= {"run-driver-0-0.run:": "127.0.0.1:"}

        def here(text: str) -> str:
            text = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], text)
            for place, real in places.items():
                text = text.replace(place, str(real), 1) if text.startswith(place) else text
            return text

        arguments = [here(text) for text in [*container["command"][1:], *container.get("args", [])]]
        own = {one["name"]: here(one["value"]) for one in container["env"] if "value" in one and one["name"] != "MEGASCALE_CACHE"}
        own |= {"MEGASCALE_JOBSET": self.fake.plan.name, "MEGASCALE_LAUNCH": "launch-1"} if name == "driver" else {}
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, *program, *arguments]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=self._environment | own, cwd=self.folder)


def test_the_rendered_commands_train_and_an_evicted_node_comes_back_elsewhere(tmp_path, monkeypatch) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"line {number} of a small corpus, {number * number} words\n" for number in range(400)))
    overrides = (*OVERRIDES, "train.steps=40", f"train.data.source={corpus}", "cluster.two_persons=false", "cluster.settle_s=1.5")
    plan = Plan(
        name="run",
        namespace="team",
        image="image",
        experiment="quickstart",
        overrides=overrides,
        nodes=2,
        spares=1,
        gpus_per_node=0,
        run_volume="work",
        port=free_ports("127.0.0.1", 1)[0],
    )
    run = tmp_path / "work/runs/run"
    monkeypatch.setenv("MEGASCALE_SECURITY", str(tmp_path / "security"))
    fake = FakeKubernetes(plan, machines=5)

    def status() -> dict[str, Any]:
        try:
            return ask_driver(run, None, "status").status
        except MegascaleError:
            return {"phase": "unreachable", "step": 0, "nodes": {}}

    def until(condition) -> dict[str, Any]:
        limit = time.monotonic() + LIMIT_S
        while not condition(found := status()):
            assert time.monotonic() < limit and kubelets.driver.poll() is None, (tmp_path / "driver.log").read_text()[-3000:]
            kubelets.step()
            time.sleep(0.2)
        return found

    with fake.serving():
        kubelets = Kubelets(fake, fake.url, tmp_path)
        try:
            found = until(lambda status: status["phase"] == "running" and status["step"] >= 3)
            victim = found["seats"][1]
            machine, uid = fake.machine_of(victim), fake.pod_of(victim)["metadata"]["uid"]
            assert ask_driver(run, None, "evict", node=victim).is_done
            until(lambda status: status["nodes"].get(victim, {}).get("status") == "ready")
            assert fake.nodes[machine]["spec"]["unschedulable"]
            assert fake.machine_of(victim) != machine
            assert 0 not in kubelets.exits[uid], "its index is not complete"
            limit = time.monotonic() + LIMIT_S
            while kubelets.driver.poll() is None or kubelets.running:
                assert time.monotonic() < limit, (tmp_path / "driver.log").read_text()[-3000:]
                kubelets.step()
                time.sleep(0.2)
            assert kubelets.driver.returncode == 0
            assert {pod["status"]["phase"] for pod in fake.pods.values()} == {"Succeeded"}
            assert not fake.violations
        finally:
            for process in (kubelets.driver, *kubelets.running.values()):
                process.kill()
                process.wait()

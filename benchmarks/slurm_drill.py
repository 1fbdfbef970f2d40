"""Faults of a driven run on a real Slurm of this machine, in slices that append to one result.

    python benchmarks/slurm_drill.py --json benchmarks/results/drill_slurm.json

Starts munge, a controller and a daemon for each node, submits `launch/slurm-drive.sbatch` (quickstart), and lets
`megascale drill SCENARIO --attach RUN` break it. Nodes that lose their power, Slurm's daemon with all below it, are not in that command's
hand; they are broken here, by the same drill. Afterwards the same steps without faults are compared, loss by loss.
"""

import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from fault_drill import ROOT, append, drilled, scenario_of
from step_report import birth_certificate

from megascale_jax.cluster.asking import ask_driver
from megascale_jax.cluster.drill import Drill, Record, compared, losses, summary
from megascale_jax.cluster.drilled import DISK_BYTES, RunningJob
from megascale_jax.cluster.executor_file import executor_process
from megascale_jax.cluster.small_disk import mount_small_disk, unmount
from megascale_jax.errors import MegascaleError

sys.path.insert(0, str(ROOT))  # the cluster is the tests'
from tests.real_slurm import RealSlurm, missing_programs, real_slurm

NODES, SPARES = 2, 2
KINDS = (
    *("process_killed", "executor_killed", "driver_killed", "process_halted", "process_frozen", "executor_halted", "beats_delayed"),
    *("process_slowed", "checkpoint_corrupt", "silent_corruption", "disk_full"),
)
"""What `megascale drill --attach` can do here."""
OUTAGES = ("node_down", "node_flapping")
OVERRIDES = (
    *("train.steps=100000", "train.checkpoint.every=5", "train.evaluation.every=null", "train.checkpoint.keep=3"),
    *("cluster.strikes=1000", "cluster.max_evictions=1000", "cluster.fruitless_recoveries=50"),
)
"""As those of a drill's own job."""
type Losses = dict[int, float | None]
START_LIMIT_S, STOP_LIMIT_S, BACK_LIMIT_S = 600.0, 120.0, 600.0


class Submitted:
    """A driven run in a queue; its folder is a small disk where one may be mounted."""

    def __init__(self, slurm: RealSlurm, folder: Path, name: str):
        self.run, self.log = folder / name, folder / f"{name}.log"
        place = folder / f"{name}.submitted"
        self.run.mkdir()
        place.mkdir()
        self._has_disk = mount_small_disk(self.run, DISK_BYTES)
        arguments = ["quickstart", *OVERRIDES, "--nodes", str(NODES), "--spares", str(SPARES)]
        variables = {"MEGASCALE_DRILL": "1", "MEGASCALE_CACHE": str(folder / "cache")}
        self.slurm, self.number = slurm.submit_drive(place, NODES + SPARES, self.run, *arguments, log=self.log, **variables)

    def step(self) -> int:
        """Steps that are done, 0 while the job does not train."""
        try:
            status: dict[str, Any] = ask_driver(self.run, None, "status").status
        except MegascaleError:
            return 0
        return status["step"] if status["phase"] == "running" else 0

    def until(self, step: int, limit_s: float) -> None:
        limit = time.monotonic() + limit_s
        while self.step() < step:
            if time.monotonic() > limit:
                raise SystemExit(f"step {step} did not come within {limit_s:.0f} s:\n{self.log.read_text()[-4000:]}")
            time.sleep(1.0)

    def stop(self) -> None:
        """As an operator does; it saves first."""
        with suppress(MegascaleError):  # it may have ended
            ask_driver(self.run, None, "stop")
        limit = time.monotonic() + STOP_LIMIT_S
        while self.slurm.ask("squeue", "--noheader", "--jobs", self.number) and time.monotonic() < limit:
            time.sleep(0.5)

    def clear(self) -> None:
        if self._has_disk:
            unmount(self.run)


class Outage:
    """Nodes of the cluster without power: their daemon, and every process of the run there, end at once."""

    def __init__(self, slurm: RealSlurm, run: Path):
        self._slurm, self._nodes = slurm, run / "cluster" / "nodes"

    def off(self, node: str) -> None:
        executor = executor_process(self._nodes / node)
        step = executor.parent() if executor is not None else None  # slurmstepd
        members = {one.pid for one in (step, *(step.children(recursive=True) if step is not None else ())) if one is not None}
        for process in psutil.process_iter():  # keepers have left the tree
            with suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if "keeper_process" in words and f"{self._nodes / node}/" in words:
                    members.add(process.pid)
        for pid in (self._slurm.daemon(node), *members):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def on(self, node: str) -> None:
        self._slurm.start_node(node)


def cut_power(job: RunningJob, slurm: RealSlurm, kinds: list[str], pause_s: float) -> list[Record]:
    """Outages one after the other, of nodes without the driver; ends early where the job does."""
    job.power = Outage(slurm, job.folder)
    drill = Drill(job, typer.echo)
    try:
        for kind in kinds:
            seats = (job.status() or {}).get("seats", ())
            drill.run(kind, next((number for number, name in enumerate(seats) if name != slurm.names[0]), 0), pause_s)
    except MegascaleError as error:
        typer.echo(f"the outages end here: {error}")
    return drill.records


def all_back_s(job: RunningJob) -> float | None:
    """How long after the last fault every node of the job is there again, seconds; ``None`` when they are not."""
    began = time.monotonic()
    while time.monotonic() < began + BACK_LIMIT_S:
        status = job.status() or {"nodes": {}}
        if status["nodes"] and all(node["status"] in ("assigned", "ready") for node in status["nodes"].values()):
            return time.monotonic() - began
        time.sleep(1.0)
    return None


def main(
    json_path: Annotated[Path, typer.Option("--json", help="result that this slice is added to")],
    kinds: Annotated[list[str] | None, typer.Option("--kind", help="fault of this slice, in this order; default each once")] = None,
    pause_s: Annotated[float, typer.Option(min=0, help="seconds of training before each fault")] = 5.0,
    limit_s: Annotated[int, typer.Option(min=60, help="longest that the faults may take")] = 3600,
) -> None:
    """Run a slice: outages last. Exit code 1 when a fault was not healed, a node wrongly named, evicted or not back, or a loss differs."""
    if missing := missing_programs():
        raise SystemExit(f"Slurm is not installed: no {', '.join(missing)}")
    own = f"python benchmarks/slurm_drill.py{''.join(f' --kind {kind}' for kind in kinds or ())} --pause-s {pause_s:g} --json PATH"
    record = birth_certificate(ROOT, own)
    chosen = kinds or [*KINDS, *OUTAGES]
    with tempfile.TemporaryDirectory(prefix="slurm-drill-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        with real_slurm(folder, NODES + SPARES) as slurm:
            found, steps = broken(slurm, folder, chosen, pause_s, limit_s)
            found |= compared(steps, unbroken(slurm, folder, max(steps), limit_s), 0.0)
    title = f"# Faults of a driven run on a real Slurm of one machine: quickstart on {NODES} nodes and {SPARES} spares"
    append(json_path, record | found, title)
    healed = found["injected"] == len(chosen) == found["recovered"] and found["all_nodes_back_s"] is not None
    named = found["right_node_named"] == found["nodes_to_name"] and not found["healthy_evicted"]
    raise SystemExit(not (healed and named and found["losses_agree"]))


def broken(
    slurm: RealSlurm, folder: Path, kinds: list[str], pause_s: float, limit_s: int
) -> tuple[dict[str, Any], dict[int, float | None]]:
    """What became of the faults, and the losses of the run."""
    job = Submitted(slurm, folder, "broken")
    try:
        job.until(1, START_LIMIT_S)
        records: list[Record] = []
        if attached := [kind for kind in kinds if kind not in OUTAGES]:
            arguments = [str(scenario_of(attached, folder)), "--attach", str(job.run), "--pause-s", str(pause_s)]
            records += [Record(**fault) for fault in drilled(arguments, limit_s)[1]["faults"]]
        running = RunningJob(job.run)
        records += cut_power(running, slurm, [kind for kind in kinds if kind in OUTAGES], pause_s)
        back_s = all_back_s(running)
        job.stop()
        return summary(records) | {"all_nodes_back_s": back_s}, losses(job.run)
    finally:
        typer.echo(job.log.read_text())
        job.clear()


def unbroken(slurm: RealSlurm, folder: Path, steps: int, limit_s: int) -> Losses:
    """Losses of the same steps without faults."""
    job = Submitted(slurm, folder, "whole")
    try:
        job.until(steps + 1, START_LIMIT_S + limit_s)
        job.stop()
        return losses(job.run)
    finally:
        job.clear()


if __name__ == "__main__":
    typer.run(main)

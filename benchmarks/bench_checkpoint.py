"""What a checkpoint costs and what a restart waits for, as ratios measured in one run.

    python benchmarks/bench_checkpoint.py --json checkpoint.json

**Saving** (one process, two virtual devices, a real step of a model whose state is about 1 GiB): how long a save holds the training
up, over a plain copy of the same arrays into memory that is there already, taken just before each save; how much longer the ten
steps after it take than the ten before; how long stage 2 takes. **Restoring** (four processes of one data-parallel group, a checkpoint
that was saved whole): every rank reads what it needs, against one reader and broadcast, both from a storage that gives 100 MB/s
in all; then from the memory of the host. **Data**: `bench_data.py` in the same run.

Nothing is asserted about time. Times of CPU runs say nothing about GPUs: what carries over is which copies and which reads there are.
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from bench_data import hand_over, storage, synthetic_data
from rich.console import Console
from rich.table import Table
from step_report import birth_certificate, hardware_slug
from throttled_storage import throttled

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = "benchmarks/configs/experiment/30m.yaml"
LARGE = (
    "model.num_layers=12",
    "model.hidden_size=768",
    "model.num_heads=12",
    "model.mlp_size=3072",
    "model.sequence_length=64",
    "model.window=full",
)
MB_PER_S = 100
LIMIT_S = 900

Measured = list[dict[str, Any]]


class Bench:
    """Processes of the worker on one folder."""

    def __init__(self, folder: Path):
        self.folder, self.checkpoints = folder, folder / "checkpoints"

    def run(self, processes: int, overrides: tuple[str, ...], **settings: Any) -> Measured:
        """Start so many and wait; what each measured. Ends the benchmark when one fails."""
        result = self.folder / "result"
        defaults = {
            "experiment": EXPERIMENT,
            "overrides": overrides,
            "run": str(self.folder),
            "storage": str(self.checkpoints),
            "result": str(result),
        }
        (self.folder / "settings.json").write_text(json.dumps(defaults | settings))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        children = []
        for rank in range(processes):
            environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "MEGASCALE_KEEPER": str(self.folder / "keeper")}
            if processes > 1:
                environment |= {"MEGASCALE_COORDINATOR": f"127.0.0.1:{port}", "MEGASCALE_NUM_PROCESSES": str(processes)}
                environment |= {"MEGASCALE_PROCESS_ID": str(rank)}
            command = [sys.executable, str(ROOT / "benchmarks/checkpoint_worker.py"), str(self.folder / "settings.json")]
            children.append(subprocess.Popen(command, cwd=ROOT, env=environment))
        if any(child.wait(timeout=LIMIT_S) for child in children):
            raise SystemExit("a worker failed; its error is above")
        return [json.loads(Path(f"{result}.{rank}").read_text()) for rank in range(processes)]


def main(
    json_path: Annotated[Path, typer.Option("--json", help="file for everything measured")],
    rounds: Annotated[int, typer.Option(min=1, help="saves measured, after none")] = 5,
    layers: Annotated[int, typer.Option(min=1, help="layers of the model that is saved; 12: a state of about 1 GiB")] = 12,
) -> None:
    """Measure, print a table, write JSON and benchmarks/results/checkpoint_<hardware>_<yyyymm>.md."""
    command = f"python benchmarks/bench_checkpoint.py --json PATH --rounds {rounds} --layers {layers}"
    record: dict[str, Any] = birth_certificate(ROOT, command)
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as name:
        record |= saving(Bench(Path(name)), rounds, layers)
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as name:
        record |= restoring(Bench(Path(name)))
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as name:
        data = synthetic_data(Path(name))
        record["disk_reads_per_host"] = storage(data, shared=True)["loader_x"]
        handed = hand_over(data, rounds=15, batches=16)
        record |= {"handover_ratio": handed["ratio"], "handover_ratio_all": handed["ratios"]}
    record["load_after"] = os.getloadavg()
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(record, indent=1) + "\n")
    show(record)


def saving(bench: Bench, rounds: int, layers: int) -> dict[str, Any]:
    """`block_ratio`, `stretch_10_steps` and what surrounds them."""
    mesh = ("parallel.data=2", "parallel.micro_batch_size=2", "train.global_batch_size=4")
    (measured,) = bench.run(1, (*LARGE, f"model.num_layers={layers}", *mesh), mode="steps", rounds=rounds)
    copy_s = statistics.median(measured["copies_s"])
    blocked = [one["blocked_s"] for one in measured["rounds"]]
    stretches = [sum(one["disturbed_s"]) / sum(one["quiet_s"]) - 1 for one in measured["rounds"]]
    windows = [one["window_s"] for one in measured["rounds"]]
    step_s = statistics.median(time for one in measured["rounds"] for time in one["quiet_s"])
    return {
        "state_bytes": measured["num_bytes"],
        "host_bytes": measured["host_bytes"],
        "plain_copy_s": copy_s,
        "blocked_s": statistics.median(blocked),
        "blocked_s_all": blocked,
        "block_ratio": statistics.median(blocked) / copy_s,
        "stretch_10_steps": statistics.median(stretches),
        "stretch_10_steps_all": stretches,
        "step_s": step_s,
        "async_window_s": statistics.median(windows),
        "steps_at_risk": statistics.median(windows) / step_s,
        "saving_rounds": measured["rounds"],
    }


def restoring(bench: Bench) -> dict[str, Any]:
    """`broadcast_speedup`, `local_speedup` and what surrounds them."""
    whole = (*LARGE, "model.num_layers=3", "parallel.data=1", "parallel.micro_batch_size=1", "train.global_batch_size=4")
    group = (*whole, "parallel.data=4")
    (saved,) = bench.run(1, whole, mode="save")
    size = json.loads(json.loads((bench.checkpoints / "1/manifest.json").read_text())["manifest"])["num_bytes"]
    result: dict[str, Any] = {"restored_bytes": size}
    for way in ("plain", "broadcast"):
        with throttled(bench.checkpoints, MB_PER_S * 1e6) as (address, throttle):
            measured = bench.run(4, group, mode="restore", step=1, storage=address, checkpoint={"restore": way})
            result[f"{way}_s"] = max(one["seconds"] for one in measured)
            result[f"{way}_copies_read"] = throttle.passed / size
    disk = bench.run(4, group, mode="restore", step=1)
    result["disk_s"] = max(one["seconds"] for one in disk)
    shutil.rmtree(bench.checkpoints)
    bench.run(4, group, mode="save", over=False)
    local = bench.run(4, group, mode="restore")
    assert all(one["tier"] == "local" for one in local), "the keeper has it"
    result["local_s"] = max(one["seconds"] for one in local)
    return result | {
        "broadcast_speedup": result["plain_s"] / result["broadcast_s"],
        "local_speedup": result["broadcast_s"] / result["local_s"],
        "local_speedup_over_this_disk": result["disk_s"] / result["local_s"],
        "storage_bytes_per_s": size / result["broadcast_s"],
        "write_s": saved["seconds"],
    }


def rows(record: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What is asked for, what was measured, and of what."""
    gib = record["state_bytes"] / 2**30
    copies = f"{record['plain_copies_read']:.2f} and {record['broadcast_copies_read']:.2f}"
    return [
        (
            "step blocked by a save / plain copy",
            f"{record['block_ratio']:.2f}",
            f"{record['blocked_s']:.3f} s / {record['plain_copy_s']:.3f} s, {gib:.2f} GiB",
        ),
        (
            "stretch of the next 10 steps",
            f"{record['stretch_10_steps']:+.1%}",
            f"median of {', '.join(f'{s:+.1%}' for s in record['stretch_10_steps_all'])}; step {record['step_s']:.2f} s",
        ),
        (
            "stage 2",
            f"{record['async_window_s']:.1f} s",
            f"{record['steps_at_risk']:.1f} steps at risk; {record['host_bytes'] / 2**30:.2f} GiB of slots",
        ),
        (
            "everyone reads / broadcast",
            f"{record['broadcast_speedup']:.2f}",
            f"{record['plain_s']:.1f} s / {record['broadcast_s']:.1f} s; {copies} copies read at {MB_PER_S} MB/s",
        ),
        (
            "broadcast from that storage / memory",
            f"{record['local_speedup']:.1f}",
            f"{record['broadcast_s']:.1f} s / {record['local_s']:.2f} s; from this disk, cached, {record['disk_s']:.2f} s",
        ),
        (
            "bytes asked of files, 8 ranks with a loader / one reader",
            f"{record['disk_reads_per_host']:.2f}",
            "8 ranks that need the same rows",
        ),
        (
            "hand-over of a batch / memcpy, each of 8 readers",
            f"{record['handover_ratio']:.2f}",
            f"16 MiB; {min(record['handover_ratio_all']):.2f} to {max(record['handover_ratio_all']):.2f} over rounds",
        ),
    ]


def show(record: dict[str, Any]) -> None:
    table = Table(title="checkpoints, measured in one run", title_justify="left")
    for name in ("", "ratio", "of"):
        table.add_column(name)
    lines = [f"# Checkpoints: {record['hardware']}", "", f"*Measured*, {record['date']}, commit {record['commit']}"]
    lines[-1] += " (with changes)" if record["changed_since_commit"] else ""
    lines += ["", f"`{record['command']}`", "", "| | ratio | of |", "| --- | --- | --- |"]
    for row in rows(record):
        table.add_row(*row)
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", "CPU times say nothing about GPUs. What is compared is in the head of `benchmarks/bench_checkpoint.py`.", ""]
    month = record["date"][:7].replace("-", "")
    report = ROOT / f"benchmarks/results/checkpoint_{hardware_slug(record)}_{month}.md"
    report.write_text("\n".join(lines))
    console = Console()
    console.width = max(console.width, 150)
    console.print(table)
    console.print(f"wrote {report.relative_to(ROOT)}")


if __name__ == "__main__":
    typer.run(main)

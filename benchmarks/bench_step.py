"""Cost of a training step: ours on 1, 2, 4, 8 virtual devices beside plain single-device JAX of the same model, in one run.

    python benchmarks/bench_step.py --json step.json
    python benchmarks/bench_step.py --json peer.json --models peer-58m --devices 8 --steps 4 --peer-python PEER_VENV/bin/python

Each device count is a process of its own (`step_worker.py`); inside it, one step of every variant is taken in turn, so
that whatever else loads the machine hits all of them alike. With ``--peer-python`` (a Python that has MaxText) the peer
trains ``peer-58m`` between two halves of our steps. CPU-seconds (all threads) are the main figure: virtual devices share
the cores, so wall time says how busy the machine was. Nothing here is asserted about time; that the plain step is the
same model is: its losses must equal ours.

Failure case: a worker that dies ends the benchmark with its own error on the terminal and nothing written.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from peer_maxtext import peer_steps
from rich.console import Console
from step_report import birth_certificate, summary, table, write_markdown

from megascale_jax.comm.init import CPU_THREADS_PER_DEVICE
from megascale_jax.config.load import load_experiment

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = Path("benchmarks/configs/experiment")
MODELS = {"quickstart": "quickstart", "30m": f"{CONFIGS}/30m.yaml", "peer-58m": f"{CONFIGS}/peer-58m.yaml"}
PEER_MODEL = "peer-58m"
LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3}
"""Relative: other orders of summation, over all steps of a run. Random weights already agree to 1e-2 with any model."""

Step = dict[str, Any]


def main(
    json_path: Annotated[Path, typer.Option("--json", help="file for every measured step")],
    models: Annotated[str, typer.Option(help=f"of {', '.join(MODELS)}")] = "quickstart,30m",
    devices: Annotated[str, typer.Option(help="virtual device counts")] = "1,2,4,8",
    steps: Annotated[int, typer.Option(min=2, help="measured steps of each variant, after one for warm-up")] = 6,
    peer_python: Annotated[Path | None, typer.Option(help="Python that has MaxText; rerun the peer in this run")] = None,
) -> None:
    """Measure, print a table, write JSON and benchmarks/results/step_<hardware>_<yyyymm>.md."""
    names, counts = models.split(","), [int(count) for count in devices.split(",")]
    if unknown := set(names) - set(MODELS):
        raise typer.BadParameter(f"unknown model {', '.join(sorted(unknown))}; known: {', '.join(MODELS)}")
    command = f"python benchmarks/bench_step.py --json PATH --models {models} --devices {devices} --steps {steps}"
    record: dict[str, Any] = birth_certificate(ROOT, command + (" --peer-python PATH" if peer_python else ""))
    record["rows"] = []
    for name in names:
        for count in counts:
            wanted = variants(name, count)
            measured = []
            for step in run(wanted, count, steps, peer_python if name == PEER_MODEL else None):
                print(f"{name}, {count} devices: {step}", file=sys.stderr)
                measured.append(step)
            check_losses(wanted, measured)
            record["rows"] += summary(name, count, wanted, measured)
    record["load_after"] = os.getloadavg()
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(record, indent=1) + "\n")
    markdown = write_markdown(ROOT / "benchmarks/results", record)
    console = Console()
    console.width = max(console.width, 140)  # a table in a log file keeps its columns
    console.print(table(record["rows"]))
    console.print(f"wrote {json_path} and {markdown.relative_to(ROOT)}")


def variants(model: str, devices: int) -> list[dict[str, Any]]:
    """What is compared on so many devices: data N, tensor 2 x data N/2, plain JAX; for the peer's model also types and remat."""
    layouts = [(devices, 1)] + ([(devices // 2, 2)] if devices % 2 == 0 else [])
    if model != PEER_MODEL:
        return [*(ours(model, data, tensor) for data, tensor in layouts), plain(model)]
    # plain bf16 is left out: its weight gradients miss the fast CPU kernels
    precisions = ("train.compute_dtype=bfloat16", "train.compute_dtype=float32")
    wide = [ours(model, devices, 1, dtype, f"parallel.remat={remat}") for dtype in precisions for remat in ("none", "full")]
    tensor_parallel = [ours(model, data, tensor, precisions[0], "parallel.remat=none") for data, tensor in layouts[1:]]
    return [*wide, *tensor_parallel, plain(model, precisions[1], "parallel.remat=none")]


def ours(model: str, data: int, tensor: int, *overrides: str) -> dict[str, Any]:
    """One variant of the package's step: all rows of a step in one micro-batch."""
    rows = {"quickstart": 32, "30m": 8, PEER_MODEL: 16}[model]
    layout = f"tensor {tensor} x data {data}" if tensor > 1 else f"data {data}"
    mesh = (f"parallel.data={data}", f"parallel.tensor={tensor}", f"parallel.micro_batch_size={rows // data}")
    return variant("megascale_jax", model, layout, (*mesh, *overrides))


def plain(model: str, *overrides: str) -> dict[str, Any]:
    """The yardstick of the same experiment."""
    return variant("plain", model, "one device", ours(model, 1, 1, *overrides)["overrides"])


def variant(implementation: str, model: str, layout: str, overrides: Sequence[str]) -> dict[str, Any]:
    """A request to the worker; ``variant`` names it within one process."""
    options = ", ".join(text.split("=")[1] for text in overrides if text.startswith(("train.compute", "parallel.remat")))
    return {
        "variant": f"{implementation}, {layout}" + (f", {options}" if options else ""),
        "implementation": implementation,
        "layout": layout,
        "experiment": MODELS[model],
        "overrides": list(overrides),
    }


def run(wanted: list[dict[str, Any]], devices: int, steps: int, peer_python: Path | None) -> Iterator[Step]:
    """Every reply of one worker, and the peer's steps between the halves."""
    halves = [steps] if peer_python is None else [steps - steps // 2, steps // 2]
    with worker(devices) as talk:
        yield from talk(json.dumps({"variants": wanted}))
        for half in halves:
            yield from talk(str(half))
            if peer_python is not None:
                yield from peer_steps(peer_python, half)


@contextmanager
def worker(devices: int) -> Iterator[Any]:
    """A worker process; what comes out sends one line and yields the replies to it."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PJRT_NPROC": str(CPU_THREADS_PER_DEVICE * devices),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(ROOT / "benchmarks/step_worker.py")]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stdin, stdout = process.stdin, process.stdout
    assert stdin and stdout

    def talk(line: str) -> Iterator[Step]:
        stdin.write(line + "\n")
        stdin.flush()
        for answer in stdout:
            reply = json.loads(answer)
            if "done" in reply:
                return
            yield reply
        raise SystemExit(f"the worker for {devices} devices ended early with code {process.wait()}; its error is above")

    try:
        yield talk
    finally:
        stdin.close()
        process.wait()


def check_losses(wanted: list[dict[str, Any]], measured: list[Step]) -> None:
    """All variants of one process start from the same weights and see the same rows: step by step, their losses agree."""
    losses = {item["variant"]: [step["loss"] for step in measured if step["variant"] == item["variant"]] for item in wanted}
    tolerance = max(LOSS_TOLERANCE[load_experiment(item["experiment"], item["overrides"]).train.compute_dtype] for item in wanted)
    reference = next(item["variant"] for item in wanted if item["implementation"] == "plain")
    for name, own in losses.items():
        if any(not abs(loss - expected) <= tolerance * expected for loss, expected in zip(own, losses[reference], strict=True)):
            raise SystemExit(f"losses of {name} are {own}, of {reference} {losses[reference]}: not the same model, no comparison")


if __name__ == "__main__":
    typer.run(main)

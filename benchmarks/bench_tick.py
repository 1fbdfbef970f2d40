"""Does a step take as long as its schedule says? Pipelined steps of 8 and 16 micro-batches on 8 virtual devices, in one run.

    python benchmarks/bench_tick.py --json tick.json

The difference of the two steps, over the units between them, is one steady tick with all stages busy. A step of ``m``
micro-batches should then take ``m v + p - 1`` such ticks: warm-up and cool-down ticks do only a part of a steady one, and
together as much as the ticks that the formula counts. Times are CPU-seconds of one process; rounds alternate between
both. Nothing is asserted.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from bench_step import ROOT, run
from step_report import birth_certificate

from megascale_jax.config.load import load_experiment

PIPE, CHUNKS, DATA = 4, 2, 2
MODEL = "benchmarks/configs/experiment/30m.yaml"
COUNTS = (8, 16)


def main(
    json_path: Annotated[Path, typer.Option("--json", help="file for every measured step")],
    steps: Annotated[int, typer.Option(min=2, help="measured steps of each, after one for warm-up")] = 5,
) -> None:
    """Measure, print and write JSON."""
    record: dict[str, Any] = birth_certificate(ROOT, f"python benchmarks/bench_tick.py --json PATH --steps {steps}")
    wanted = [variant(count) for count in COUNTS]
    measured: dict[str, list[dict[str, float]]] = {item["variant"]: [] for item in wanted}
    for step in run(wanted, PIPE * DATA, steps, None):
        print(step, file=sys.stderr)
        if "cpu_s" in step:
            measured[step["variant"]].append(step)
    medians = {
        clock: [statistics.median(step[clock] for step in measured[item["variant"]]) for item in wanted] for clock in ("cpu_s", "wall_s")
    }
    record["steps"] = measured
    for clock, (few_s, many_s) in medians.items():
        tick_s = (many_s - few_s) / ((COUNTS[1] - COUNTS[0]) * CHUNKS)
        ticks = [count * CHUNKS + PIPE - 1 for count in COUNTS]
        record[clock] = {
            "steady_tick": tick_s,
            "step_over_ticks": {str(count): step_s / n / tick_s for count, step_s, n in zip(COUNTS, (few_s, many_s), ticks, strict=True)},
        }
        print(f"{clock}: steady tick {tick_s:.3f} s; step / (m v + p - 1) ticks: {record[clock]['step_over_ticks']}")
    json_path.write_text(json.dumps(record, indent=1) + "\n")


def variant(micro_batches: int) -> dict[str, Any]:
    """A pipelined step of so many micro-batches."""
    overrides = [
        f"parallel.pipe={PIPE}",
        f"parallel.virtual_stages={CHUNKS}",
        f"parallel.data={DATA}",
        "parallel.micro_batch_size=2",
        "model.window=[128]",
        f"train.global_batch_size={micro_batches * DATA * 2}",
    ]
    assert load_experiment(MODEL, overrides).num_micro_batches == micro_batches
    return {"variant": f"m {micro_batches}", "experiment": MODEL, "overrides": overrides, "implementation": "ours"}


if __name__ == "__main__":
    typer.run(main)

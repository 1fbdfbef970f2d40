"""Do LAMB at four times the batch, the parallel block and windowed attention learn as well as AdamW, the serial block and full attention?

    python benchmarks/bench_convergence.py --json benchmarks/results/convergence.json      36 short runs
    python benchmarks/bench_convergence.py --seeds 2 --tokens 0.25                          a quick look

Real training by the package's own loop, *measured*: a model of 0.13 M parameters on the quickstart's bytes, all variants at equal tokens,
on the same rows in the same order. Each pair of an optimizer and a batch chooses its peak rate from as many candidates, on a seed that is
not scored; block and attention take the baseline's rate. Losses are compared seed by seed. Nothing is asserted.
"""

import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from step_report import birth_certificate

from megascale_jax.comm.init import cache_folder, start
from megascale_jax.comm.processes import Processes
from megascale_jax.config.load import load_experiment
from megascale_jax.config.schema import Experiment
from megascale_jax.data.select import open_training_data
from megascale_jax.observe.report import write_json
from megascale_jax.train.folder import RunFolder
from megascale_jax.train.loop import Trainer
from megascale_jax.train.stop import StopRequest
from megascale_jax.views.curve import read_run

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = ROOT / "benchmarks/configs/experiment/convergence.yaml"
TUNING_SEED = 1000
RATES = {"adamw": (3e-3, 1e-2, 3e-2), "lamb": (1e-2, 3e-2, 1e-1)}
BASELINE = "AdamW, batch x 1"
OPTIMIZERS = {BASELINE: ("adamw", 1), "AdamW, batch x 4": ("adamw", 4), "LAMB, batch x 1": ("lamb", 1), "LAMB, batch x 4": ("lamb", 4)}
MODELS = {"serial block": "model.block=serial", "full attention": "model.window=full"}
"""Each differs from the baseline in one thing."""
PIECES = 24
"""Of a curve: means of the training loss over equal numbers of tokens."""


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
    seeds: Annotated[int, typer.Option(min=2, help="runs of each variant")] = 4,
    tokens: Annotated[float, typer.Option(min=0.05, max=4, help="share of the experiment's tokens")] = 1.0,
) -> None:
    """Choose the rates, then train every variant with every seed."""
    began = time.process_time()
    base = load_experiment(str(EXPERIMENT))
    start(base.system, 1, Processes.from_environment())
    data = open_training_data(base, cache_folder() / "data", progress=False)

    def run(name: str, changes: list[str], seed: int) -> dict[str, Any]:
        found = trained(load_experiment(str(EXPERIMENT), [*changes, f"train.seed={seed}"]), data)
        print(f"{time.process_time() - began:.0f} s: {name}, seed {seed}: {found['held_out']:.4f}", file=sys.stderr)
        return found

    rates: dict[str, dict[str, Any]] = {}
    for name, (optimizer, batch) in OPTIMIZERS.items():
        tried = [(rate, run(f"{name}, rate {rate:g}", of(optimizer, batch, rate, tokens), TUNING_SEED)) for rate in RATES[optimizer]]
        best = min(tried, key=lambda one: one[1]["held_out"])[0]
        rates[name] = {"rate": best, "tried": [{"rate": rate, "held_out": found["held_out"]} for rate, found in tried]}
    variants = {name: of(*pair, rates[name]["rate"], tokens) for name, pair in OPTIMIZERS.items()}
    variants |= {name: [*variants[BASELINE], change] for name, change in MODELS.items()}
    runs = {name: [run(name, changes, seed) for seed in range(seeds)] for name, changes in variants.items()}
    result = birth_certificate(ROOT, f"python benchmarks/bench_convergence.py --seeds {seeds} --tokens {tokens:g}")
    result |= {
        "cpu_s": time.process_time() - began,
        "tokens": base.tokens_per_step * round(base.train.steps * tokens),
        "parameters": runs[BASELINE][0]["parameters"],
        "bigram_nats": runs[BASELINE][0]["bigram_nats"],
        "baseline": BASELINE,
        "rates": rates,
        "variants": [summary(name, found, runs[BASELINE]) for name, found in runs.items()],
    }
    print(json.dumps(result, indent=1))
    if json_path is not None:
        write_json(json_path, result)


def of(optimizer: str, batch: int, rate: float, tokens: float) -> list[str]:
    """Overrides of a variant: so many times the rows in as many times fewer steps."""
    base = load_experiment(str(EXPERIMENT))
    rows, steps, epsilon = base.train.global_batch_size, round(base.train.steps * tokens), {"adamw": 1e-8, "lamb": 1e-6}[optimizer]
    return [
        f"train.optimizer.name={optimizer}",
        f"train.optimizer.learning_rate={rate}",
        f"train.optimizer.epsilon={epsilon}",
        f"train.global_batch_size={rows * batch}",
        f"parallel.micro_batch_size={rows * batch}",
        f"train.steps={steps // batch}",
        f"train.schedule.warmup_steps={steps // batch // 10}",
        f"train.evaluation.final_batches={(base.train.evaluation.final_batches or batch) // batch}",
    ]


def trained(experiment: Experiment, data: Any) -> dict[str, Any]:
    """One run: its held-out loss, and its curve."""
    with tempfile.TemporaryDirectory(prefix="bench-convergence-") as place, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(place) / "run"
        with StopRequest() as stop:
            outcome = Trainer(experiment, RunFolder(folder), data).run(stop)
        if outcome.summary is None:  # by a signal, which the loop takes for "stop after this step"
            raise typer.Abort
        losses = read_run(folder).train.losses
    size = max(1, len(losses) // PIECES)
    curve = [float(losses[first : first + size].mean()) for first in range(0, len(losses) - size + 1, size)]
    summary = outcome.summary
    return {
        "held_out": summary.validation_loss,
        "curve": curve,
        "curve_tokens": [(index + 0.5) * size * experiment.tokens_per_step for index in range(len(curve))],
        "parameters": summary.parameters,
        "bigram_nats": summary.bigram_nats,
    }


def summary(name: str, runs: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> dict[str, Any]:
    """Losses by seed, and what they are above the baseline's of the same seed."""
    losses = [run["held_out"] for run in runs]
    above = [loss - run["held_out"] for loss, run in zip(losses, baseline, strict=True)]
    return {
        "name": name,
        "held_out": losses,
        "above_baseline": above,
        "mean": statistics.mean(losses),
        "deviation": statistics.stdev(losses),
        "curve_tokens": runs[0]["curve_tokens"],
        "curve": [statistics.mean(points) for points in zip(*(run["curve"] for run in runs), strict=True)],
    }


if __name__ == "__main__":
    typer.run(main)

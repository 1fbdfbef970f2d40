"""Part (c): MFU of full training steps on one device: 1.3 B and 2.7 B parameters, each operator swapped in turn."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from step_worker import batches_of

from megascale_jax.config.load import load_experiment
from megascale_jax.config.schema import Experiment
from megascale_jax.kernels.target import Target
from megascale_jax.model.flops import mfu
from megascale_jax.parallel.plan import VOTE_PARTITION, make_plan
from megascale_jax.train.state import initial_state
from megascale_jax.train.step import make_steps, place_batch

ALONE = ["parallel.data=1", "parallel.tensor=1", "parallel.pipe=1", "model.vocab_size=50304", "model.tied_head=true"]
MODELS = {
    "1.3B": [*ALONE, "model.sequence_length=2048"],
    "2.7B": [*ALONE, "model.num_layers=32", "model.hidden_size=2560", "model.num_heads=20", "model.mlp_size=10240"],
}
"""Changes of gpt-1b: parallel block, windows of 1,024 and full attention in turn. 2.7B with heads of 128."""
TINY = [*ALONE[:3], "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.mlp_size=64", "model.vocab_size=64"]
TINY += ["model.sequence_length=32", "model.window=[8, full]"]
SWAPS = ("", "attention=triton", "attention=cudnn", "norm=triton", "activation=triton", "loss=reference")
ROWS = (16, 8, 4, 2, 1)
MICRO_BATCHES, STEPS = 4, 5


def step_rows(target: Target, dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The default of every model first, then the swaps, whose losses must be the same."""
    models, expected = {"tiny": TINY} if dry else MODELS, {}
    for swap in SWAPS:
        for name, overrides in models.items():
            if not (dry and swap.endswith("cudnn")):
                yield f"{name} {swap or 'as shipped'}", partial(compared, name, overrides, swap, dry, expected)


def compared(name: str, overrides: list[str], swap: str, dry: bool, expected: dict[tuple[str, int], list[float]]) -> dict[str, Any]:
    """`largest`, whose losses are held against those of the first run of a model and batch."""
    row = largest(name, overrides, swap, dry)
    losses = expected.setdefault((name, row["micro_batch_size"]), row["losses"])
    worst = max(abs(loss - other) / other for loss, other in zip(row["losses"], losses, strict=True))
    wrong = [f"{name} {swap}: losses differ by {worst:.1e} of themselves"] if worst > (1e-5 if dry else 2e-3) else []
    return row | {"result": f"wrong losses; {row['result']}" if wrong else row["result"], "wrong": wrong}


def largest(name: str, overrides: list[str], swap: str, dry: bool) -> dict[str, Any]:
    """MFU at the most rows a micro-batch that fit the memory."""
    for rows in ROWS[-1:] if dry else ROWS:
        batch = [f"parallel.micro_batch_size={rows}", f"train.global_batch_size={rows * MICRO_BATCHES}"]
        changes = [*overrides, *batch, *([f"system.kernels.{swap}"] if swap else [])]
        try:
            return {"model": name, "swap": swap, "micro_batch_size": rows, **utilisation(experiment_of(changes, dry))}
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
                raise
    raise MemoryError(f"{name} does not fit with one row")


def experiment_of(changes: list[str], dry: bool) -> Experiment:
    """gpt-1b with changes, for this device."""
    kind = jax.devices()[0].device_kind
    system = "cpu" if dry else next(name for name in ("h200", "h100", "b200", "a100") if name in kind.lower())
    return load_experiment("gpt-1b", [f"system={system}", *changes, *(["train.compute_dtype=float32"] if dry else [])])


def utilisation(experiment: Experiment) -> dict[str, Any]:
    """Median time of some steps of random tokens, the first left out, and what it means."""
    plan = make_plan(experiment, jax.devices()[:1])
    steps = make_steps(experiment, plan)
    state = initial_state(plan, steps.optimizer, experiment.train.seed)
    votes = jax.device_put(np.zeros(1, np.int32), plan.sharding(VOTE_PARTITION))
    batches, times, losses = batches_of(experiment), [], []
    for _ in range(1 + STEPS):
        batch = place_batch(plan, next(batches))
        began_s = time.perf_counter()
        state, metrics = steps.train(state, batch, votes)
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - began_s)
    step_s = statistics.median(times[1:])
    tokens_per_s = experiment.tokens_per_step / step_s
    utilised = mfu(experiment.model, tokens_per_s, 1, experiment.system.peak_tflops or 1.0)
    found = {"step_s": step_s, "first_step_s": times[0], "mfu": utilised, "tokens_per_s": tokens_per_s}
    return {"result": f"MFU {found['mfu']:.1%}, {step_s:.3f} s a step", "losses": losses, **found}

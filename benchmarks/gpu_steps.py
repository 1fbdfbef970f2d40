"""MFU of full training steps on one device: 1.3 B and 2.7 B parameters, each operator swapped in turn; losses must stay the same."""

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
from megascale_jax.model.flops import mfu
from megascale_jax.parallel.plan import DEVICE_PARTITION, make_plan
from megascale_jax.train.state import initial_state
from megascale_jax.train.step import make_steps, place_batch

ALONE = ["parallel.data=1", "parallel.tensor=1", "parallel.pipe=1"]
VOCABULARY = ["model.vocab_size=50304", "model.tied_head=true"]
MODELS = {
    "1.3B": [*ALONE, *VOCABULARY],
    "2.7B": [*ALONE, *VOCABULARY, "model.num_layers=32", "model.hidden_size=2560", "model.num_heads=20", "model.mlp_size=10240"],
}
"""Changes of gpt-1b: parallel block, windows of 1,024 and full attention in turn, length 2,048. 2.7B with heads of 128."""
TINY = [*ALONE, "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.mlp_size=64", "model.vocab_size=64"]
TINY += ["model.sequence_length=16", "model.window=8"]
SWAPS = ("attention=triton", "attention=cudnn", "norm=reference", "activation=triton", "loss=reference")
DRY_SWAPS = ("attention=triton", "norm=triton", "activation=triton", "loss=triton")
ROWS = (16, 8, 4, 2, 1)
MICRO_BATCHES = 4
_fitting: dict[str, int] = {}
"""Rows of a micro-batch that fitted a model's last run: others begin there."""


def step_jobs(dry: bool, *, swaps: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The 1.3 B step as shipped; or with ``swaps`` once more, then with each operator swapped, then 2.7 B as shipped."""
    name, overrides = ("tiny", TINY) if dry else ("1.3B", MODELS["1.3B"])
    expected: dict[int, dict[str, Any]] = {}
    yield f"{name} as shipped", partial(compared, name, overrides, "", dry, expected)
    if not swaps:
        return
    for swap in DRY_SWAPS if dry else SWAPS:
        yield f"{name} {swap}", partial(compared, name, overrides, swap, dry, expected)
    if not dry:
        yield "2.7B as shipped", partial(compared, "2.7B", MODELS["2.7B"], "", dry, {})


def compared(name: str, overrides: list[str], swap: str, dry: bool, expected: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """`largest`, whose losses and gradient norms are held against those of the first run of the model and batch."""
    row = largest(name, overrides, swap, dry)
    first = expected.setdefault(row["micro_batch_size"], row)
    limits = {"losses": 1e-5 if dry else 2e-3, "norms": 1e-4 if dry else 3e-2}
    wrong = []
    for what, limit in limits.items():
        worst = float(np.max(np.abs(np.divide(row[what], first[what]) - 1)))  # NaN where one is
        if not worst <= limit:
            wrong.append(f"{what} differ by {worst:.1e} of themselves, limit {limit:.0e}")
    return row | {"result": f"wrong: {'; '.join(wrong)}" if wrong else row["result"]}


def largest(name: str, overrides: list[str], swap: str, dry: bool) -> dict[str, Any]:
    """MFU at the most rows a micro-batch that fit the memory."""
    for rows in ROWS[-1:] if dry else [rows for rows in ROWS if rows <= _fitting.get(name, ROWS[0])]:
        micro_batches = 2 if dry else MICRO_BATCHES
        batch = [f"parallel.micro_batch_size={rows}", f"train.global_batch_size={rows * micro_batches}"]
        changes = [*overrides, *batch, *([f"system.kernels.{swap}"] if swap else [])]
        try:
            found = utilisation(experiment_of(changes, dry), steps=1 if dry else 5)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
                raise
        else:
            _fitting[name] = rows
            return {"model": name, "swap": swap, "micro_batch_size": rows, **found}
    raise MemoryError(f"{name} does not fit with one row")


def experiment_of(changes: list[str], dry: bool) -> Experiment:
    """gpt-1b with changes, for this device."""
    kind = jax.devices()[0].device_kind.lower()
    system = "cpu" if dry else next(name for name in ("h200", "h100", "b200", "a100") if name in kind)
    return load_experiment("gpt-1b", [f"system={system}", *changes, *(["train.compute_dtype=float32"] if dry else [])])


def utilisation(experiment: Experiment, steps: int) -> dict[str, Any]:
    """Median time of some steps of random tokens, the first left out, and what it means."""
    plan = make_plan(experiment, jax.devices()[:1])
    functions = make_steps(experiment, plan)
    state = initial_state(plan, functions.optimizer, experiment.train.seed)
    votes = jax.device_put(np.zeros(1, np.int32), plan.sharding(DEVICE_PARTITION))
    batches, times, losses, norms = batches_of(experiment), [], [], []
    for _ in range(1 + steps):
        batch = place_batch(plan, next(batches))
        began_s = time.perf_counter()
        state, metrics = functions.train(state, batch, votes)
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - began_s)
        norms.append(float(metrics["grad_norm"]))
    step_s = statistics.median(times[1:])
    tokens_per_s = experiment.tokens_per_step / step_s
    utilised = mfu(experiment.model, tokens_per_s, 1, experiment.system.peak_tflops or 1.0)
    found = {"step_s": step_s, "first_step_s": times[0], "mfu": utilised, "tokens_per_s": tokens_per_s}
    return {"result": f"MFU {utilised:.1%}, {step_s:.3f} s a step", "losses": losses, "norms": norms, **found}

"""Small experiments, batches and logical views of parameters, shared by the tests."""

from typing import Any

import jax
import numpy as np

from megascale_jax.config.schema import (
    EventsConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    SystemConfig,
    TrainConfig,
)
from megascale_jax.parallel.plan import Plan, make_plan

TINY = [
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.mlp_size=32",
    "model.window=8",
    "model.sequence_length=32",
]
"""Overrides of the quickstart that make it small enough to be run in a test."""

MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 34,
    "num_heads": 8,
    "head_size": 4,
    "mlp_size": 40,
    "vocab_size": 61,
    "sequence_length": 16,
    "window": (3, "full"),
    "initializer_std": 0.2,
}


def experiment(
    data: int = 1, tensor: int = 1, *, train: dict[str, Any] | None = None, parallel: dict[str, Any] | None = None, **model: Any
) -> Experiment:
    """A tiny experiment, fp32, without stamps, which cost time to compile; three micro-batches unless ``parallel`` says otherwise."""
    settings: dict[str, Any] = {
        "steps": 10,
        "global_batch_size": 24,
        "compute_dtype": "float32",
        "digest_every": None,
        "events": EventsConfig(stamps=False),
        "optimizer": OptimizerConfig(learning_rate=1e-2),
        "schedule": ScheduleConfig(name="constant"),
    }
    return Experiment(
        name="tiny",
        model=ModelConfig(**(MODEL | model)),
        parallel=ParallelConfig(**({"data": data, "tensor": tensor, "micro_batch_size": 8 // data} | (parallel or {}))),
        system=SystemConfig(platform="cpu", device="CPU"),
        train=TrainConfig(**(settings | (train or {}))),
    )


def plan_of(config: Experiment) -> Plan:
    """The plan on this process's virtual devices."""
    return make_plan(config, jax.devices())


def random_batch(config: Experiment, seed: int = 0, valid: tuple[int, ...] = (7, 0, 1)) -> dict[str, np.ndarray]:
    """Rows of several documents; micro-batch ``i`` holds ``valid[i]`` valid targets (``-1`` entries: all)."""
    rng = np.random.default_rng(seed)
    rows = config.parallel.data * config.parallel.micro_batch_size
    shape = (len(valid), rows, config.model.sequence_length)
    tokens = rng.integers(0, config.model.vocab_size, shape)
    starts = rng.random(shape) < 0.15
    starts[..., 0] = True
    segments = np.cumsum(starts, -1)
    index = np.arange(shape[-1])
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), -1)
    targets = rng.integers(0, config.model.vocab_size, shape)
    for micro_batch, count in enumerate(valid):
        if count >= 0:
            kept = rng.choice(targets[micro_batch].size, count, replace=False)
            mask = np.full(targets[micro_batch].size, -1)
            mask[kept] = targets[micro_batch].ravel()[kept]
            targets[micro_batch] = mask.reshape(targets[micro_batch].shape)
    arrays = {"tokens": tokens, "targets": targets, "segment_ids": segments, "positions": positions}
    return {key: value.astype(np.int32) for key, value in arrays.items()}


def logical(plan: Plan, tree: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Padded, stacked global arrays as ``[L, ...]`` NumPy arrays without pads."""
    result = {}
    for name, value in tree.items():
        spec = plan.zero.specs[name]
        array = np.asarray(value)
        if spec.per_layer:
            table = np.array(plan.layout.stages.table)
            array = np.stack([array[tuple(np.argwhere(table == layer)[0])] for layer in range(plan.experiment.model.num_layers)])
        cut = tuple(slice(size) for size in spec.shape)
        result[name] = array[(slice(None), *cut) if spec.per_layer else cut]
    return result


def perturbed(plan: Plan, params: dict[str, jax.Array], seed: int = 1) -> dict[str, jax.Array]:
    """Parameters with every vector away from its initial 0 or 1, so that its gradient path is tested; pads stay zero."""
    rng = np.random.default_rng(seed)
    result = {}
    for name in sorted(params):
        array, spec = np.array(params[name]), plan.zero.specs[name]
        layers = range(plan.experiment.model.num_layers) if spec.per_layer else [None]
        table = np.array(plan.layout.stages.table)
        for layer in layers:
            place = () if layer is None else tuple(np.argwhere(table == layer)[0])
            array[(*place, *(slice(size) for size in spec.shape))] += 0.1 * rng.standard_normal(spec.shape)
        result[name] = jax.device_put(array, params[name].sharding)
    return result


def random_parameters(plan: Plan) -> tuple[dict[str, np.ndarray], dict[str, jax.Array]]:
    """Parameters drawn on the host, the same for every layout: logical ones, and as the plan lays them out; nothing is compiled."""
    plain, placed = {}, {}
    table = np.array(plan.layout.stages.table)
    for index, (name, spec) in enumerate(sorted(plan.zero.specs.items())):
        shape = plan.logical_shape(name)
        noise = np.random.default_rng(index).standard_normal(shape)
        plain[name] = ((1.0 if spec.init == "ones" else 0.0) + (0.2 if spec.init == "normal" else 0.1) * noise).astype(np.float32)
        padded = np.zeros(plan.zero.arrays[name].shape, np.float32)
        for layer in range(len(plain[name])) if spec.per_layer else [None]:
            place = () if layer is None else tuple(np.argwhere(table == layer)[0])
            padded[(*place, *(slice(size) for size in spec.shape))] = plain[name] if layer is None else plain[name][layer]
        placed[name] = jax.device_put(padded, plan.sharding(plan.zero.partitions[name]))
    return plain, placed

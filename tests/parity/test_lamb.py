"""LAMB inside the sharded step against a hand-written float64 one: stacked layers, padded, fused and sharded buffers."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megascale_jax.config.schema import OptimizerConfig
from megascale_jax.train.saved import named_arrays
from megascale_jax.train.state import TrainState, initial_state
from megascale_jax.train.step import make_steps, place_batch
from tests.build import experiment, logical, perturbed, plan_of, random_batch
from tests.reference import lamb_reference, mean_loss, x64

OPTIMIZER = {"learning_rate": 0.02, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0}
MODEL = {"num_layers": 2, "window": 3, "activation": "swiglu", "num_kv_heads": 4, "mlp_bias": True, "tied_head": True}
STEPS = 3
VALID = (40, 7, 0, 16)
DECAYING = {"embedding", "q", "k", "v", "o", "gate", "up", "down"}


@cache
def compiled(mesh):
    """One plan, its steps and a state on the host for each mesh, so that each program is compiled once."""
    pipe, data, tensor = mesh
    train = {"optimizer": OptimizerConfig(**OPTIMIZER), "global_batch_size": 32}
    config = experiment(data, tensor, train=train, parallel={"pipe": pipe}, **MODEL)
    plan = plan_of(config)
    steps = make_steps(config, plan)
    state = initial_state(plan, steps.optimizer, 0)
    state = TrainState(state.step, perturbed(plan, state.params), state.optimizer, state.rng)
    return config, plan, steps, jax.tree.map(np.array, state), jax.tree.map(lambda leaf: leaf.sharding, state)


@cache
def reference_gradient():
    """Called in float64. Model and batch are the same for every mesh."""
    config = compiled((1, 1, 1))[0]
    batch = random_batch(config, valid=VALID)
    return jax.jit(jax.grad(lambda params: mean_loss(config.model, params, batch)))


def start(mesh):
    config, plan, steps, stored, shardings = compiled(mesh)
    return config, plan, steps, jax.device_put(stored, shardings)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 4, 2), (2, 2, 2)], ids=lambda m: f"pipe{m[0]}-data{m[1]}-tensor{m[2]}")
def test_lamb_equals_float64_reference_when_layers_are_stacked_and_sharded(mesh):
    config, plan, steps, state = start(mesh)
    batch = random_batch(config, valid=VALID)
    params = logical(plan, state.params)
    specs = plan.zero.specs
    with x64():
        expected = lamb_reference(
            params,
            reference_gradient(),
            STEPS,
            {name for name, spec in specs.items() if spec.per_layer},
            {name: name in DECAYING for name in specs},
            lr=OPTIMIZER["learning_rate"],
            b1=OPTIMIZER["beta1"],
            b2=OPTIMIZER["beta2"],
            eps=OPTIMIZER["epsilon"],
            decay=OPTIMIZER["weight_decay"],
            clip=OPTIMIZER["clip_norm"],
        )
    placed, votes, metrics = place_batch(plan, batch), np.zeros(plan.mesh.size, np.int32), {}
    for _ in range(STEPS):
        state, metrics = steps.train(state, placed, votes)
    assert float(metrics["grad_norm"]) > OPTIMIZER["clip_norm"], "the case must clip"
    got = logical(plan, state.params)
    for name, value in expected.items():
        moved = np.abs(value - params[name]).max()
        assert moved > 1e-3, f"{name} hardly moved: the case proves nothing"
        assert np.abs(got[name] - value).max() < 2e-3 * moved, name
    for name, value in state.params.items():
        kept = np.square(got[name].astype(np.float64)).sum()
        assert np.square(np.asarray(value, np.float64)).sum() == pytest.approx(kept, rel=1e-9), f"{name}: a pad moved"


class PoisonedExecutor:
    """Adds an infinity to one element of one rank's gradient; the loss stays finite."""

    def __init__(self, executor, rank):
        self.executor, self.rank, self.clock = executor, rank, executor.clock

    def loss_and_gradients(self, *arguments):
        loss, gradients = self.executor.loss_and_gradients(*arguments)
        here = jnp.array([jax.lax.axis_index(axis) for axis in ("pipe", "data", "tensor")]) == jnp.array(self.rank)
        first = gradients["up"][(0,) * gradients["up"].ndim]
        return loss, gradients | {"up": gradients["up"].at[(0,) * gradients["up"].ndim].set(jnp.where(here.all(), jnp.inf, first))}


@pytest.mark.parametrize("rank", [(0, 0, 0), (1, 1, 1)], ids=["first-rank", "last-rank"])
def test_all_ranks_skip_when_one_rank_has_an_infinite_gradient(rank):
    config, plan, healthy, state = start((2, 2, 2))
    batch = place_batch(plan, random_batch(config, valid=(-1, -1, -1, -1)))
    votes = np.zeros(8, np.int32)
    state, _ = healthy.train(state, batch, votes)
    before = jax.tree.map(np.array, named_arrays(state))
    poisoned = make_steps(config, replace(plan, executor=PoisonedExecutor(plan.executor, rank)))
    state, metrics = poisoned.train(state, batch, votes)
    after = jax.tree.map(np.array, named_arrays(state))
    assert int(metrics["skipped"]) == 1 and np.isfinite(float(metrics["loss"]))
    assert int(after.pop("step")) == int(before.pop("step")) + 1
    jax.tree.map(np.testing.assert_array_equal, after, before)
    for value in jax.tree.leaves(state):
        shards = value.addressable_shards
        for shard in shards:
            same = next(other for other in shards if other.index == shard.index)
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(same.data))
    state, metrics = healthy.train(state, batch, votes)
    assert int(metrics["skipped"]) == 0


def test_learning_rate_and_counters_hold_when_a_step_is_skipped():
    config, plan, steps, state = start((1, 4, 2))
    batch = random_batch(config, valid=(-1, -1, -1, -1))
    healthy = state.params["embedding"]
    broken = jax.device_put(np.full(healthy.shape, np.nan, np.float32), healthy.sharding)
    votes = np.zeros(8, np.int32)
    state, _ = steps.train(
        TrainState(state.step, dict(state.params, embedding=broken), state.optimizer, state.rng), place_batch(plan, batch), votes
    )
    saved = named_arrays(state)
    assert (int(saved["step"]), int(saved["updates"])) == (1, 0)


@pytest.mark.parametrize("valid", [(0, 0, 0, 0), (1, 0, 0, 0)])
def test_numbers_stay_finite_when_a_batch_is_padding(valid):
    config, plan, steps, state = start((1, 4, 2))
    batch = random_batch(config, valid=valid)
    padding = batch["targets"] < 0
    for key in ("tokens", "segment_ids", "positions"):
        batch[key] = np.where(padding.all(-1, keepdims=True), 0, batch[key])
    state, metrics = steps.train(state, place_batch(plan, batch), np.zeros(8, np.int32))
    assert int(metrics["skipped"]) == 0
    assert int(metrics["tokens"]) == sum(valid)
    assert float(metrics["loss"]) == 0.0 if sum(valid) == 0 else float(metrics["loss"]) > 0
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state.params))

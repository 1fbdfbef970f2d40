"""What a step carries to the next: parameters, moments, counters, rng. All of it is in every checkpoint."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from megascale_jax.parallel.plan import Plan


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a run; the same tree also carries its shapes or its partitions.

    ``step`` (int32) counts attempted steps and so the batches consumed; the optimizer's own counters count applied
    updates. ``params`` are fp32 logical parameters, ``rng`` raw key data (uint32 ``[2]``) from which every random part
    of the next step is drawn.
    """

    step: Any
    params: dict[str, Any]
    optimizer: Any
    rng: Any


def _abstract_params(plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(array.shape, jnp.float32) for name, array in plan.zero.arrays.items()}


def state_partitions(plan: Plan, optimizer: optax.GradientTransformation) -> TrainState:
    """Partition of every leaf: moments lie as their parameters do, counters are replicated."""
    partitions = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, partition: partition,
        jax.eval_shape(optimizer.init, _abstract_params(plan)),
        plan.zero.partitions,
        transform_non_params=lambda _: PartitionSpec(),
    )
    return TrainState(PartitionSpec(), plan.zero.partitions, partitions, PartitionSpec())


def initial_state(plan: Plan, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """A fresh state on the plan's mesh, each array made in place by the devices that own it."""
    shardings = jax.tree.map(plan.sharding, state_partitions(plan, optimizer))

    def make() -> TrainState:
        params_key, run_key = jax.random.split(jax.random.key(seed))
        params = plan.initial_parameters(params_key)
        return TrainState(jnp.int32(0), params, optimizer.init(params), jax.random.key_data(run_key))

    return jax.jit(make, out_shardings=shardings)()


def abstract_state(plan: Plan, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes, types and shardings of the state, nothing allocated."""
    params = _abstract_params(plan)
    shapes = TrainState(
        jax.ShapeDtypeStruct((), jnp.int32), params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((2,), jnp.uint32)
    )
    return jax.tree.map(
        lambda leaf, partition: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=plan.sharding(partition)),
        shapes,
        state_partitions(plan, optimizer),
    )

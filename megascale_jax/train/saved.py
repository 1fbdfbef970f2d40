"""The state of a run in its stored form: logical names, layers in order, no pads, independent of the mesh.

    {"step", "updates", "rng", "params": {name: array}, "first_moment": {...}, "second_moment": {...}}

``updates`` is the one count of applied updates that the optimizer's transforms share.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from megascale_jax.parallel.plan import Plan
from megascale_jax.train.state import TrainState, abstract_state

Saved = dict[str, Any]


def applied_updates(optimizer_state: Any) -> jax.Array:
    """Number of updates that were applied; skipped steps are not among them."""
    return next(value for _, value in optax.tree_utils.tree_get_all_with_path(optimizer_state, "count"))


def to_saved(plan: Plan, state: TrainState) -> Saved:
    """The stored form; inside ``jit``."""
    return {
        "step": state.step,
        "updates": applied_updates(state.optimizer),
        "rng": state.rng,
        "params": plan.to_logical(state.params),
        "first_moment": plan.to_logical(optax.tree_utils.tree_get(state.optimizer, "mu")),
        "second_moment": plan.to_logical(optax.tree_utils.tree_get(state.optimizer, "nu")),
    }


def from_saved(plan: Plan, optimizer: optax.GradientTransformation, saved: Saved) -> TrainState:
    """The state on the plan's mesh; inside ``jit``."""
    params = plan.from_logical(saved["params"])
    optimizer_state = optax.tree_utils.tree_set(
        optimizer.init(params),
        count=saved["updates"],
        mu=plan.from_logical(saved["first_moment"]),
        nu=plan.from_logical(saved["second_moment"]),
    )
    return TrainState(saved["step"], params, optimizer_state, saved["rng"])


def abstract_saved(plan: Plan, *, params_only: bool = False) -> Saved:
    """Shapes, types and shardings of the stored form on the plan's mesh."""

    def array(shape: tuple[int, ...], dtype: Any, partition: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=plan.sharding(partition))

    def parameters() -> Saved:
        return {name: array(plan.logical_shape(name), jnp.float32, plan.logical_partition(name)) for name in plan.zero.specs}

    if params_only:
        return {"params": parameters()}
    scalar = array((), jnp.int32, PartitionSpec())
    return {
        "step": scalar,
        "updates": scalar,
        "rng": array((2,), jnp.uint32, PartitionSpec()),
        "params": parameters(),
        "first_moment": parameters(),
        "second_moment": parameters(),
    }


def restored_state(plan: Plan, optimizer: optax.GradientTransformation, saved: Saved) -> TrainState:
    """`from_saved`, compiled, each array in its place."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(plan, optimizer))
    return jax.jit(lambda tree: from_saved(plan, optimizer, tree), out_shardings=shardings)(saved)

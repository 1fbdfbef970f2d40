"""The state of a run by the names of its stored arrays (`checkpoint/grid.py`), and back.

    step  updates  rng  params.NAME  first_moment.NAME  second_moment.NAME

``updates`` is the one count of applied updates that the optimizer's transforms share. Arrays are those of the step, neither
copied nor moved.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from megascale_jax.parallel.plan import Plan
from megascale_jax.train.state import TrainState, abstract_state


def applied_updates(optimizer_state: Any) -> jax.Array:
    """Number of updates that were applied; skipped steps are not among them."""
    return next(value for _, value in optax.tree_utils.tree_get_all_with_path(optimizer_state, "count"))


def named_arrays(state: TrainState) -> dict[str, jax.Array]:
    """Every array of a state once, by name."""
    named = {"step": state.step, "updates": applied_updates(state.optimizer), "rng": state.rng}
    kinds = {
        "params": state.params,
        "first_moment": optax.tree_utils.tree_get(state.optimizer, "mu"),
        "second_moment": optax.tree_utils.tree_get(state.optimizer, "nu"),
    }
    return named | {f"{kind}.{name}": value for kind, tree in kinds.items() for name, value in tree.items()}


def named_state(plan: Plan, optimizer: optax.GradientTransformation, named: Mapping[str, jax.Array]) -> TrainState:
    """The inverse of `named_arrays`."""

    def tree(kind: str) -> dict[str, jax.Array]:
        return {name: named[f"{kind}.{name}"] for name in plan.zero.specs}

    optimizer_state = optax.tree_utils.tree_set(
        abstract_state(plan, optimizer).optimizer, count=named["updates"], mu=tree("first_moment"), nu=tree("second_moment")
    )
    # several transforms count; each gets an array of its own, since a step donates all of them
    optimizer_state = jax.tree.map(lambda leaf: jnp.copy(leaf) if leaf is named["updates"] else leaf, optimizer_state)
    return TrainState(named["step"], tree("params"), optimizer_state, named["rng"])

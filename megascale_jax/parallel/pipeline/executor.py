"""Runs the micro-batches of one step through this rank's chunks and adds up loss and gradients.

With one stage the schedule is the sequence of micro-batches: forward, then backward, each. Gradients accumulate in
fp32 whatever the compute type. Micro-batches without a valid token contribute zero.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from megascale_jax import axes
from megascale_jax.model.block import Rows
from megascale_jax.model.transformer import Transformer

Batch = Mapping[str, jax.Array]
"""``tokens``, ``targets``, ``segment_ids``, ``positions``: int32 ``[m, B, S]``, or ``[B, S]`` for one micro-batch."""


class OneStage:
    """The executor of a pipeline with one stage; runs inside ``shard_map``."""

    def __init__(self, transformer: Transformer):
        self.transformer = transformer

    def hidden(self, weights: Mapping[str, Any], batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """Output of the last layer for one micro-batch, ``[B, s, D]``."""
        model = self.transformer
        embed_key, layer_key = (None, None) if key is None else jax.random.split(key)
        x_BsD = model.embed(weights["ends"], batch["tokens"], batch["positions"], embed_key)
        rows = Rows(batch["positions"], batch["segment_ids"])
        chunk = {name: value[0] for name, value in weights["layers"].items()}
        return model.layers(chunk, x_BsD, rows, model.model.windows, layer_key)

    def loss(self, weights: Mapping[str, Any], batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """Sum of the negative log-likelihoods of one micro-batch on this rank, nats."""
        return self.transformer.loss(weights["ends"], self.hidden(weights, batch, key), batch["targets"])

    def loss_and_gradients(
        self, weights: Mapping[str, Any], batch: Batch, scale: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """``scale`` times the summed loss of all micro-batches of this rank, and its gradients, fp32.

        ``scale`` is one over the valid tokens of the global batch, so nothing is divided afterwards.
        """

        def one(weights: Any, micro_batch: Batch, key: jax.Array | None) -> jax.Array:
            return self.loss(weights, micro_batch, key) * scale

        count = batch["tokens"].shape[0]
        keys = None if key is None else jax.random.split(_fold_rank(key), count)

        def accumulate(carry: tuple[jax.Array, Any], xs: tuple[Batch, jax.Array | None]) -> tuple[tuple[jax.Array, Any], None]:
            loss, gradients = jax.value_and_grad(one)(weights, *xs)
            return (carry[0] + loss, jax.tree.map(lambda total, g: total + g.astype(jnp.float32), carry[1], gradients)), None

        if count == 1:
            loss, gradients = jax.value_and_grad(one)(weights, *jax.tree.map(lambda x: x[0], (batch, keys)))
            return loss, jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        zero = (jnp.float32(0), jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights))
        return jax.lax.scan(accumulate, zero, (batch, keys))[0]


def _fold_rank(key: jax.Array) -> jax.Array:
    """A key of this rank's own, so that no two ranks drop the same elements."""
    for axis in axes.MESH_AXES:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return key

"""Runs the micro-batches of one step through this rank's chunks and adds up loss and gradients.

`OneStage` is for a mesh without pipeline: each micro-batch forward, then backward, differentiated by JAX. `Pipeline`
(`interleaved.py`) is for all others. Both run inside ``shard_map``. Gradients accumulate in fp32 whatever the compute type.
Micro-batches without a valid token contribute zero.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from megascale_jax import axes
from megascale_jax.model.branch import Rows
from megascale_jax.model.transformer import Transformer
from megascale_jax.parallel.pipeline.tick_state import Batch
from megascale_jax.parallel.zero import Shards, ZeroSharding


class Executor(Protocol):
    """What the step asks of it; ``params`` are this rank's shards of the logical parameters, a batch is ``[m, B, S]``."""

    def loss(self, params: Shards, batch: Batch) -> jax.Array:
        """Sum of the negative log-likelihoods of this rank's rows, nats."""
        ...

    def loss_and_gradients(self, params: Shards, batch: Batch, scale: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, Shards]:
        """``scale`` times the summed loss of all micro-batches of this rank; its gradients, fp32, for this rank's shards.

        ``scale`` is one over the valid tokens of the global batch, so nothing is divided afterwards.
        """
        ...


class OneStage:
    """The executor of a pipeline with one stage."""

    def __init__(self, transformer: Transformer, zero: ZeroSharding):
        self.transformer, self.zero = transformer, zero

    def hidden(self, weights: Mapping[str, Any], batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """Output of the last layer for one micro-batch ``[B, S]``, ``[B, s, D]``."""
        model = self.transformer
        embed_key, layer_key = (None, None) if key is None else jax.random.split(key)
        x_BsD = model.embed(weights["ends"], batch["tokens"], batch["positions"], embed_key)
        rows = Rows(batch["positions"], batch["segment_ids"])
        chunk = {name: value[0] for name, value in weights["layers"].items()}
        return model.layers(chunk, x_BsD, rows, model.model.windows, layer_key)

    def loss(self, params: Shards, batch: Batch) -> jax.Array:
        """See `Executor`."""
        return jax.lax.map(partial(self._loss, self.zero.gather(params)), dict(batch)).sum()

    def _loss(self, weights: Mapping[str, Any], micro_batch: Batch, key: jax.Array | None = None) -> jax.Array:
        return self.transformer.loss(weights["ends"], self.hidden(weights, micro_batch, key), micro_batch["targets"])

    def loss_and_gradients(self, params: Shards, batch: Batch, scale: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, Shards]:
        """See `Executor`."""
        loss, gradients = self._operand_gradients(self.zero.gather(params), batch, scale, key)
        return loss, self.zero.scatter(gradients)

    def _operand_gradients(
        self, weights: Mapping[str, Any], batch: Batch, scale: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        def one(weights: Any, micro_batch: Batch, key: jax.Array | None) -> jax.Array:
            return self._loss(weights, micro_batch, key) * scale

        count = batch["tokens"].shape[0]
        keys = None if key is None else jax.random.split(fold_rank(key), count)

        def accumulate(carry: tuple[jax.Array, Any], xs: tuple[Batch, jax.Array | None]) -> tuple[tuple[jax.Array, Any], None]:
            loss, gradients = jax.value_and_grad(one)(weights, *xs)
            return (carry[0] + loss, jax.tree.map(lambda total, g: total + g.astype(jnp.float32), carry[1], gradients)), None

        if count == 1:
            loss, gradients = jax.value_and_grad(one)(weights, *jax.tree.map(lambda x: x[0], (batch, keys)))
            return loss, jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        return jax.lax.scan(accumulate, (jnp.float32(0), zero_gradients(weights)), (batch, keys))[0]


def zero_gradients(weights: Mapping[str, Any]) -> Any:
    """fp32 zeros like the weights."""
    return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)


def fold_rank(key: jax.Array) -> jax.Array:
    """A key of this rank's own, so that no two ranks drop the same elements."""
    for axis in axes.MESH_AXES:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return key

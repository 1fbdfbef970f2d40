"""Softmax cross-entropy over a vocabulary that is split over mesh axes.

Each rank holds the logits of its own slice of the vocabulary; what joins them is one gather of three numbers a token:
the maximum, the sum of exponentials and the target's logit. Both directions are written by hand, so that no collective
is differentiated: under a manual ``shard_map`` its transpose would count each rank's copy of the loss again.

Targets and losses are ``[B, S]``; logits are a rank's own columns, the first of them id ``vocab_offset``. Columns at or above
``vocab_size`` are padding and take no part; where the target is ``IGNORE`` the loss is 0.
"""

import jax
import jax.numpy as jnp

IGNORE = -1
"""Target id that carries no loss: padding, or a next token that belongs to another document."""


def local_statistics(logits_BSV: jax.Array, targets_BS: jax.Array, vocab_offset: jax.Array, vocab_size: int) -> jax.Array:
    """What a rank knows of the softmax over its own columns: maximum, sum of exponentials over it, the target's logit; ``[3, B, S]``."""
    width = logits_BSV.shape[-1]
    real_V = vocab_offset + jnp.arange(width) < vocab_size
    logits_BSV = jnp.where(real_V, logits_BSV.astype(jnp.float32), -jnp.inf)
    top_BS = jnp.maximum(logits_BSV.max(-1), jnp.finfo(jnp.float32).min)
    total_BS = jnp.exp(logits_BSV - top_BS[..., None]).sum(-1)
    local_BS = targets_BS - vocab_offset
    here_BS = (local_BS >= 0) & (local_BS < width) & (targets_BS != IGNORE)
    picked_BS = jnp.take_along_axis(logits_BSV, jnp.clip(local_BS, 0, width - 1)[..., None], -1)[..., 0]
    return jnp.stack([top_BS, total_BS, jnp.where(here_BS, picked_BS, 0.0)])


def join_statistics(statistics_n3BS: jax.Array, targets_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``(loss, log of the softmax's denominator)``, fp32 ``[B, S]``, from the `local_statistics` of all ranks."""
    tops_nBS, totals_nBS, picked_nBS = statistics_n3BS.swapaxes(0, 1)
    top_BS = tops_nBS.max(0)
    log_total_BS = top_BS + jnp.log((totals_nBS * jnp.exp(tops_nBS - top_BS)).sum(0))
    return jnp.where(targets_BS != IGNORE, log_total_BS - picked_nBS.sum(0), 0.0), log_total_BS


def logits_gradient(
    logits_BSV: jax.Array,
    log_total_BS: jax.Array,
    targets_BS: jax.Array,
    vocab_offset: jax.Array,
    vocab_size: int,
    gradient_BS: jax.Array,
) -> jax.Array:
    """Gradient of this rank's logits, in their type, given that of the losses."""
    ids_V = vocab_offset + jnp.arange(logits_BSV.shape[-1])
    weight_BS1 = jnp.where(targets_BS != IGNORE, gradient_BS, 0.0)[..., None]
    probability_BSV = jnp.where(ids_V < vocab_size, jnp.exp(logits_BSV.astype(jnp.float32) - log_total_BS[..., None]), 0.0)
    return ((probability_BSV - (targets_BS[..., None] == ids_V)) * weight_BS1).astype(logits_BSV.dtype)

"""Softmax cross-entropy over a vocabulary that is split over mesh axes.

Each rank holds the logits of its own slice of the vocabulary. Three reductions join them: the maximum, the sum of
exponentials and the target's logit. Both directions are written by hand, so that no reduction is differentiated:
the transpose of a ``psum`` under a manual ``shard_map`` would count each rank's copy of the loss again.
"""

from functools import partial

import jax
import jax.numpy as jnp

IGNORE = -1
"""Target id that carries no loss: padding, or a next token that belongs to another document."""


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cross_entropy(
    logits_BSV: jax.Array, targets_BS: jax.Array, vocab_offset: jax.Array, vocab_size: int, vocab_axes: tuple[str, ...]
) -> jax.Array:
    """Negative log-likelihood in nats, fp32 ``[B, S]``, 0 where the target is ``IGNORE``; equal on all ranks of ``vocab_axes``.

    ``logits_BSV`` are this rank's columns, the first of them id ``vocab_offset``; columns at or above ``vocab_size`` are
    padding and take no part. ``vocab_axes`` may be empty: the whole vocabulary is here.
    """
    return _forward(logits_BSV, targets_BS, vocab_offset, vocab_size, vocab_axes)[0]


def _reduce(operation, x, vocab_axes):
    return operation(x, vocab_axes) if vocab_axes else x


def _forward(logits_BSV, targets_BS, vocab_offset, vocab_size, vocab_axes):
    width = logits_BSV.shape[-1]
    real_V = vocab_offset + jnp.arange(width) < vocab_size
    logits_BSV = jnp.where(real_V, logits_BSV.astype(jnp.float32), -jnp.inf)
    top_BS = _reduce(jax.lax.pmax, jnp.maximum(logits_BSV.max(-1), jnp.finfo(jnp.float32).min), vocab_axes)
    total_BS = _reduce(jax.lax.psum, jnp.exp(logits_BSV - top_BS[..., None]).sum(-1), vocab_axes)
    log_total_BS = top_BS + jnp.log(total_BS)
    local_BS = targets_BS - vocab_offset
    here_BS = (local_BS >= 0) & (local_BS < width) & (targets_BS != IGNORE)
    picked_BS = jnp.take_along_axis(logits_BSV, jnp.clip(local_BS, 0, width - 1)[..., None], -1)[..., 0]
    target_logit_BS = _reduce(jax.lax.psum, jnp.where(here_BS, picked_BS, 0.0), vocab_axes)
    loss_BS = jnp.where(targets_BS != IGNORE, log_total_BS - target_logit_BS, 0.0)
    return loss_BS, (logits_BSV, log_total_BS, targets_BS, local_BS)


def _forward_rule(logits_BSV, targets_BS, vocab_offset, vocab_size, vocab_axes):
    loss_BS, residuals = _forward(logits_BSV, targets_BS, vocab_offset, vocab_size, vocab_axes)
    return loss_BS, (*residuals, jnp.zeros((), logits_BSV.dtype))


def _backward_rule(vocab_size, vocab_axes, residuals, gradient_BS):
    logits_BSV, log_total_BS, targets_BS, local_BS, like = residuals
    weight_BS1 = jnp.where(targets_BS != IGNORE, gradient_BS, 0.0)[..., None]
    one_hot_BSV = local_BS[..., None] == jnp.arange(logits_BSV.shape[-1])
    d_logits_BSV = (jnp.exp(logits_BSV - log_total_BS[..., None]) - one_hot_BSV) * weight_BS1
    return d_logits_BSV.astype(like.dtype), None, None


cross_entropy.defvjp(_forward_rule, _backward_rule)

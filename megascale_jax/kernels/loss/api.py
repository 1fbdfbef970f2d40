"""Softmax cross-entropy over a vocabulary that is split over mesh axes. One interface to two implementations.

A rank measures its own columns (`local_statistics`), one gather of three numbers a token joins the ranks (`join_statistics`), and
each differentiates its own columns (`logits_gradient`): logits are in the type of the head's product, never fp32, and never more
than those of one micro-batch of the pipeline. ``triton`` reads them once for the statistics, where ``reference`` leaves XLA to read
them for the maximum, the sum and the target.
"""

import jax
import jax.numpy as jnp

from megascale_jax.kernels.loss.reference import IGNORE, join_statistics
from megascale_jax.kernels.target import Implementation, KernelError, Target, in_order, load, resolve

__all__ = ["IGNORE", "join_statistics", "local_statistics", "logits_gradient"]


def local_statistics(
    logits: jax.Array, targets: jax.Array, vocab_offset: jax.Array, vocab_size: int, *, implementation: str | None = None, target: Target
) -> jax.Array:
    """Maximum, sum of exponentials over it and the target's logit of this rank's columns, fp32 ``[3, B, S]``.

    Shapes: logits ``[B, S, V]``, the columns from ``vocab_offset`` on; targets int32 ``[B, S]``, `IGNORE` where there is no loss.
    Columns at or above ``vocab_size`` are padding. Raises KernelError, a ValueError, while the program is traced.
    """
    chosen = _implementation(logits, targets, vocab_size, implementation, target)
    return chosen.run("local_statistics", logits, targets, vocab_offset, vocab_size)


def logits_gradient(
    logits: jax.Array,
    log_total: jax.Array,
    targets: jax.Array,
    vocab_offset: jax.Array,
    vocab_size: int,
    gradient: jax.Array,
    *,
    implementation: str | None = None,
    target: Target,
) -> jax.Array:
    """Gradient of this rank's logits, in their type, from that of the losses ``[B, S]`` and the denominator of `join_statistics`."""
    for name, array in (("log_total", log_total), ("gradient", gradient)):
        if array.shape != targets.shape:
            raise KernelError(f"{name} has shape {array.shape}; expected {targets.shape}, one a token")
    chosen = _implementation(logits, targets, vocab_size, implementation, target)
    return chosen.run("logits_gradient", logits, log_total, targets, vocab_offset, vocab_size, gradient)


def _implementation(logits, targets, vocab_size: int, implementation: str | None, target: Target) -> Implementation:
    if targets.shape != logits.shape[:-1] or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise KernelError(f"targets are {targets.dtype}{list(targets.shape)}; expected int32 {list(logits.shape[:-1])}, one a token")
    if vocab_size < 1:
        raise KernelError(f"vocab_size is {vocab_size}; it must be at least 1")
    refusals = in_order(target, {"triton": target.triton_refusal, "reference": None})
    return load("loss", resolve("loss", implementation, refusals), target)

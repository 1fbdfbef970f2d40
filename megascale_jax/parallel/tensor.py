"""Tensor and sequence parallel: the two fused operations, each the other's transpose.

``all_gather_matmul(x, w)`` and ``matmul_reduce_scatter(y, w)`` share one weight layout (``w`` is ``[D, F]``), so the
input gradient of each is the other one with the same operand. A pipeline tick runs gather, product and scatter apart, each
beside something else; `parallel/ring.py` has the same two operations with their communication inside.
"""

import jax
import jax.numpy as jnp

from megascale_jax import axes

SEQUENCE = 1
"""Dim of an activation that the tensor axis splits."""


def _gather(x_BsD: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x_BsD, axes.TENSOR, axis=SEQUENCE, tiled=True)


def _scatter(x_BSD: jax.Array) -> jax.Array:
    return jax.lax.psum_scatter(x_BSD, axes.TENSOR, scatter_dimension=SEQUENCE, tiled=True)


def all_gather_matmul(x_BsD: jax.Array, w_DF: jax.Array) -> jax.Array:
    """Gather the sequence over ``tensor``, multiply by this rank's columns: ``[B, S, F]``."""
    return jnp.einsum("bsd,df->bsf", _gather(x_BsD), w_DF)


def matmul_reduce_scatter(y_BSF: jax.Array, w_DF: jax.Array) -> jax.Array:
    """Multiply by the transpose of ``w``, add over ``tensor``, keep this rank's part of the sequence: ``[B, s, D]``."""
    return _scatter(jnp.einsum("bsf,df->bsd", y_BSF, w_DF))


class TensorParallel:
    """The layer's `Communication` inside a manual ``shard_map``; the vocabulary is split over ``pipe`` and ``tensor``."""

    vocab_axes: tuple[str, ...] = (axes.PIPE, axes.TENSOR)

    all_gather_matmul = staticmethod(all_gather_matmul)
    matmul_reduce_scatter = staticmethod(matmul_reduce_scatter)
    gather = staticmethod(_gather)
    reduce_scatter = staticmethod(_scatter)

    def local_sequence(self, x_BS: jax.Array) -> jax.Array:
        """This rank's part of dim 1."""
        length = x_BS.shape[SEQUENCE] // jax.lax.axis_size(axes.TENSOR)
        return jax.lax.dynamic_slice_in_dim(x_BS, jax.lax.axis_index(axes.TENSOR) * length, length, SEQUENCE)

    def vocab_offset(self, local_vocab: int) -> jax.Array:
        """First vocabulary id of this rank."""
        return jax.lax.axis_index(self.vocab_axes) * local_vocab

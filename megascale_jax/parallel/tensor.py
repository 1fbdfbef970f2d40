"""Tensor and sequence parallel: the two fused operations, each the other's transpose.

``all_gather_matmul(x, w)`` and ``matmul_reduce_scatter(y, w)`` share one weight layout (``w`` is ``[D, F]``), so the
input gradient of each is the other one with the same operand. Both are written with their own derivative: the
gathered input is not kept for the backward pass but gathered again, as sequence parallelism does.
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


@jax.custom_vjp
def all_gather_matmul(x_BsD: jax.Array, w_DF: jax.Array) -> jax.Array:
    """Gather the sequence over ``tensor``, multiply by this rank's columns: ``[B, S, F]``."""
    return jnp.einsum("bsd,df->bsf", _gather(x_BsD), w_DF)


@jax.custom_vjp
def matmul_reduce_scatter(y_BSF: jax.Array, w_DF: jax.Array) -> jax.Array:
    """Multiply by the transpose of ``w``, add over ``tensor``, keep this rank's part of the sequence: ``[B, s, D]``."""
    return _scatter(jnp.einsum("bsf,df->bsd", y_BSF, w_DF))


def _all_gather_matmul_forward(x_BsD, w_DF):
    return all_gather_matmul(x_BsD, w_DF), (x_BsD, w_DF)


def _all_gather_matmul_backward(residuals, dy_BSF):
    x_BsD, w_DF = residuals
    return matmul_reduce_scatter(dy_BSF, w_DF), jnp.einsum("bsd,bsf->df", _gather(x_BsD), dy_BSF)


def _matmul_reduce_scatter_forward(y_BSF, w_DF):
    return matmul_reduce_scatter(y_BSF, w_DF), (y_BSF, w_DF)


def _matmul_reduce_scatter_backward(residuals, dx_BsD):
    y_BSF, w_DF = residuals
    dx_BSD = _gather(dx_BsD)
    return jnp.einsum("bsd,df->bsf", dx_BSD, w_DF), jnp.einsum("bsd,bsf->df", dx_BSD, y_BSF)


@jax.custom_vjp
def all_gather_logits(x_BsD: jax.Array, table_VD: jax.Array) -> jax.Array:
    """Gather the sequence over ``tensor``, multiply by this rank's rows of a vocabulary table: ``[B, S, V]``.

    `all_gather_matmul` of the transposed table, but for the table's gradient: it is born as ``[V, D]``. Transposed
    afterwards, XLA folds the transpose into a product that its fast CPU kernels do not take in bf16.
    """
    return jnp.einsum("bsd,vd->bsv", _gather(x_BsD), table_VD)


def _all_gather_logits_forward(x_BsD, table_VD):
    return all_gather_logits(x_BsD, table_VD), (x_BsD, table_VD)


def _all_gather_logits_backward(residuals, dy_BSV):
    x_BsD, table_VD = residuals
    return _scatter(jnp.einsum("bsv,vd->bsd", dy_BSV, table_VD)), jnp.einsum("bsv,bsd->vd", dy_BSV, _gather(x_BsD))


all_gather_logits.defvjp(_all_gather_logits_forward, _all_gather_logits_backward)
all_gather_matmul.defvjp(_all_gather_matmul_forward, _all_gather_matmul_backward)
matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward)


class TensorParallel:
    """The layer's `Communication` inside a manual ``shard_map``; the vocabulary is split over ``pipe`` and ``tensor``."""

    vocab_axes: tuple[str, ...] = (axes.PIPE, axes.TENSOR)

    all_gather_matmul = staticmethod(all_gather_matmul)
    all_gather_logits = staticmethod(all_gather_logits)
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

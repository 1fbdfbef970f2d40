"""The fused operations of the tensor axis as rings: no gather and no scatter, but permutes under parts of the product.

Each rank sends its part of the sequence both ways round, and multiplies whatever part it holds while the next one moves: a
gather of ``n`` parts takes ``n // 2`` hops. A scatter runs the other way: two sums travel towards their rank, and each
rank on the way adds its own part. Derivatives are rings again. As many bytes move as in the plain operations, in ``n - 1`` times as many
messages, each with its own latency.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from megascale_jax import axes
from megascale_jax.parallel.tensor import TensorParallel


@jax.custom_vjp
def all_gather_matmul(x_BsD: jax.Array, w_DF: jax.Array) -> jax.Array:
    """`parallel.tensor.all_gather_matmul`."""
    parts = _whole(x_BsD, w_DF.shape[1])
    for owner, part_BsD in _travel(x_BsD):
        parts = _put(parts, jnp.einsum("bsd,df->bsf", part_BsD, w_DF), owner)
    return parts.reshape(x_BsD.shape[0], -1, w_DF.shape[1])


@jax.custom_vjp
def matmul_reduce_scatter(y_BSF: jax.Array, w_DF: jax.Array) -> jax.Array:
    """`parallel.tensor.matmul_reduce_scatter`."""
    n, index = jax.lax.axis_size(axes.TENSOR), jax.lax.axis_index(axes.TENSOR)
    parts_BnsF = y_BSF.reshape(y_BSF.shape[0], n, -1, y_BSF.shape[2])

    def product(distance: int) -> jax.Array:
        """This rank's summand for the rank so far ahead."""
        return jnp.einsum("bsf,df->bsd", _take(parts_BnsF, (index + distance) % n), w_DF)

    total = product(0)
    for far, towards in ((n // 2, 1), (n - 1 - n // 2, -1)):
        if far:
            travelling = product(towards * far)
            for distance in reversed(range(1, far)):
                travelling = _hop(travelling, towards) + product(towards * distance)
            total = total + _hop(travelling, towards)
    return total


def gathered_outer(x_BsD: jax.Array, y_BSF: jax.Array) -> jax.Array:
    """``x.T @ y`` over all tokens, ``x`` gathered: a weight gradient, fp32 ``[D, F]``."""
    n = jax.lax.axis_size(axes.TENSOR)
    parts_BnsF = y_BSF.reshape(y_BSF.shape[0], n, -1, y_BSF.shape[2])
    total = jnp.zeros((x_BsD.shape[2], y_BSF.shape[2]), jnp.float32)
    for owner, part_BsD in _travel(x_BsD):
        total = total + jnp.einsum("bsd,bsf->df", part_BsD, _take(parts_BnsF, owner), preferred_element_type=jnp.float32)
    return total


def _travel(x: jax.Array) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Every rank's ``x`` and its rank, this rank's first, the farthest last."""
    n, index = jax.lax.axis_size(axes.TENSOR), jax.lax.axis_index(axes.TENSOR)
    yield index, x
    up = down = x
    for hop in range(1, n // 2 + 1):
        up = _hop(up, 1)
        if 2 * hop < n:
            down = _hop(down, -1)
        yield (index - hop) % n, up
        if 2 * hop < n:
            yield (index + hop) % n, down


def _hop(x: jax.Array, by: int) -> jax.Array:
    n = jax.lax.axis_size(axes.TENSOR)
    return jax.lax.ppermute(x, axes.TENSOR, [(rank, (rank + by) % n) for rank in range(n)])


def _whole(x_BsD: jax.Array, width: int) -> jax.Array:
    n = jax.lax.axis_size(axes.TENSOR)
    return jnp.zeros((x_BsD.shape[0], n, x_BsD.shape[1], width), x_BsD.dtype)


def _take(parts: jax.Array, owner: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(parts, owner, 1, keepdims=False)


def _put(parts: jax.Array, part: jax.Array, owner: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(parts, part, owner, 1)


def _all_gather_matmul_forward(x_BsD, w_DF):
    return all_gather_matmul(x_BsD, w_DF), (x_BsD, w_DF)


def _all_gather_matmul_backward(residuals, dy_BSF):
    x_BsD, w_DF = residuals
    return matmul_reduce_scatter(dy_BSF, w_DF), gathered_outer(x_BsD, dy_BSF).astype(w_DF.dtype)


def _matmul_reduce_scatter_forward(y_BSF, w_DF):
    return matmul_reduce_scatter(y_BSF, w_DF), (y_BSF, w_DF)


def _matmul_reduce_scatter_backward(residuals, dx_BsD):
    y_BSF, w_DF = residuals
    return all_gather_matmul(dx_BsD, w_DF), gathered_outer(dx_BsD, y_BSF).astype(w_DF.dtype)


all_gather_matmul.defvjp(_all_gather_matmul_forward, _all_gather_matmul_backward)
matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward)


class RingTensorParallel(TensorParallel):
    """`TensorParallel` with its products as rings; embedding and head keep their plain collectives."""

    all_gather_matmul = staticmethod(all_gather_matmul)
    matmul_reduce_scatter = staticmethod(matmul_reduce_scatter)
    gathered_outer = staticmethod(gathered_outer)

"""What a layer may ask of the ranks that share it: fused operations and a few slices.

Layers receive an implementation and know no mesh. `OneDevice` is the plain meaning of each operation;
``parallel/tensor.py`` has the one for a tensor-parallel group. Shapes: capital S is the whole sequence, small s this
rank's part of it; F and V are this rank's columns.
"""

from typing import Protocol

import jax
import jax.numpy as jnp


class Communication(Protocol):
    """Tensor/sequence-parallel operations of one group of ranks."""

    vocab_axes: tuple[str, ...]
    """Mesh axes that split the vocabulary."""

    def all_gather_matmul(self, x_BsD: jax.Array, w_DF: jax.Array) -> jax.Array:
        """Gather the sequence, then multiply: ``[B, S, F]``."""
        ...

    def matmul_reduce_scatter(self, y_BSF: jax.Array, w_DF: jax.Array) -> jax.Array:
        """Multiply by the transpose, add up over the group, keep this rank's part of the sequence: ``[B, s, D]``."""
        ...

    def gather(self, x_BsD: jax.Array) -> jax.Array:
        """The whole sequence."""
        ...

    def reduce_scatter(self, x_BSD: jax.Array) -> jax.Array:
        """Add up over the ranks that split the vocabulary, keep this rank's part of the sequence."""
        ...

    def local_sequence(self, x_BS: jax.Array) -> jax.Array:
        """This rank's part of dim 1."""
        ...

    def vocab_offset(self, local_vocab: int) -> jax.Array:
        """First vocabulary id of this rank, when each rank holds ``local_vocab`` ids."""
        ...


class OneDevice:
    """The operations on a group of one."""

    vocab_axes: tuple[str, ...] = ()

    def all_gather_matmul(self, x_BsD: jax.Array, w_DF: jax.Array) -> jax.Array:
        """``x @ w``."""
        return jnp.einsum("bsd,df->bsf", x_BsD, w_DF)

    def matmul_reduce_scatter(self, y_BSF: jax.Array, w_DF: jax.Array) -> jax.Array:
        """``y @ w.T``."""
        return jnp.einsum("bsf,df->bsd", y_BSF, w_DF)

    def gathered_outer(self, x_BsD: jax.Array, y_BSF: jax.Array) -> jax.Array:
        """``x.T @ y``."""
        return jnp.einsum("bsd,bsf->df", x_BsD, y_BSF, preferred_element_type=jnp.float32)

    def gather(self, x_BsD: jax.Array) -> jax.Array:
        """The input."""
        return x_BsD

    def reduce_scatter(self, x_BSD: jax.Array) -> jax.Array:
        """The input."""
        return x_BSD

    def local_sequence(self, x_BS: jax.Array) -> jax.Array:
        """The input."""
        return x_BS

    def vocab_offset(self, local_vocab: int) -> jax.Array:
        """Zero."""
        return jnp.int32(0)

"""The order in which the tokens of a micro-batch lie in memory.

Where ``ways`` ranks share a sequence, a gather lays their parts one behind the other. Were rows the outermost dim, XLA would
shuffle every gathered activation in memory. So all rows lie in one, ``[1, T, ...]`` with ``T`` tokens in the order
``[way, half, row, token]``: each rank's part is one block, and so is each half of the sequence within it, which lets a forward
pass run one half before the other. Only attention cares which row a token belongs to: it takes and gives back its values in
the order of the text, ``[row, half, way, token]`` as ``[B, S, ...]``.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class TokenOrder:
    """The order of ``rows`` sequences on ``ways`` ranks, each of ``halves`` parts."""

    rows: int
    ways: int
    halves: int

    @property
    def of_half(self) -> "TokenOrder":
        """The order of one half alone."""
        return replace(self, halves=1)

    def to_text(self, x_1T: jax.Array) -> jax.Array:
        """``[1, T, ...]`` as ``[B, S, ...]``."""
        parts = x_1T.reshape(self.ways, self.halves, self.rows, -1, *x_1T.shape[2:])
        return jnp.moveaxis(parts, (2, 1), (0, 1)).reshape(self.rows, -1, *x_1T.shape[2:])

    def from_text(self, x_BS: jax.Array) -> jax.Array:
        """``[B, S, ...]`` as ``[1, T, ...]``."""
        parts = x_BS.reshape(self.rows, self.halves, self.ways, -1, *x_BS.shape[2:])
        return jnp.moveaxis(parts, (0, 1), (2, 1)).reshape(1, -1, *x_BS.shape[2:])

    def joined(self, first_1T: jax.Array, second_1T: jax.Array) -> jax.Array:
        """Both halves as one."""
        parts = [x.reshape(self.ways, -1, *x.shape[2:]) for x in (first_1T, second_1T)]
        return jnp.concatenate(parts, 1).reshape(1, -1, *first_1T.shape[2:])

    def first_half(self, x_1T: jax.Array) -> jax.Array:
        """The first half of both."""
        return x_1T.reshape(self.ways, 2, -1, *x_1T.shape[2:])[:, 0].reshape(1, -1, *x_1T.shape[2:])

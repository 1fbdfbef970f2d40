"""Pieces of a matrix, whatever its size: all of it moves, and comes together again as it was."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.parallel.pipeline.pieces import zero_pieces
from megascale_jax.parallel.pipeline.shape import TickShape
from megascale_jax.parallel.pipeline.zero_operations import joined, piece_range


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 70), st.integers(1, 5), st.booleans(), st.booleans(), st.sampled_from(["in", "out"]))
def test_pieces_of_any_size_come_together(size, parts, halved, split, matrix):
    shape = TickShape(1, False, 1, frozenset({(0, "in"), (0, "out")}) if halved else frozenset(), split=split)
    whole = np.arange(size, dtype=np.float32)
    for move in (".gather_", ".scatter_"):
        own = [piece for name, piece in zero_pieces(shape).items() if move in name and piece.matrix == matrix]
        moved = []
        for piece in own:
            ranges = [piece_range(piece, jnp.int32(part), parts, size) for part in range(parts)]
            moved.append((piece, jnp.stack([jnp.asarray(whole[int(start) : int(start) + length]) for start, length in ranges])))
        np.testing.assert_array_equal(joined(moved, size), whole)

"""Operations of ZeRO-2 in a tick: slot Z. Pieces of `pieces.zero_pieces` travel over ``data`` beside the GEMMs of other slots."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from megascale_jax.parallel.pipeline.pieces import Piece
from megascale_jax.parallel.pipeline.tick_state import TickState
from megascale_jax.parallel.zero import ZeroSharding


class ZeroOperations(TickState):
    """A matrix of one layer is ``[n, L]`` here, see `ZeroSharding`. Parts are cut to equal lengths and the last one is moved
    back to end with the matrix, so that it travels twice where ``L`` does not divide."""

    def gather_piece(self, name: str, part: jax.Array) -> jax.Array:
        """A piece of the chunk that arrives, ``[n, length]``."""
        piece, group, depth = self._piece(name)
        shard = self.constants.shards[group]
        start, length = piece_range(piece, part, self.chunks.stages, shard.shape[-1])
        origin = (self.column("gather_chunk"), jnp.int32(depth), start)
        return ZeroSharding.gather_flat(jax.lax.dynamic_slice(shard, origin, (1, 1, length), allow_negative_indices=False)[0, 0])

    def put_piece(self, name: str, piece_nl: jax.Array) -> None:
        """Put it in its place."""
        piece, group, depth = self._piece(name.replace("put", "gather"))
        start, _ = piece_range(piece, self.column("gather_part"), self.chunks.stages, self.arriving[group].shape[-1])
        origin = (jnp.int32(depth), jnp.int32(0), start)
        arrived = jax.lax.dynamic_update_slice(self.arriving[group], piece_nl[None], origin, allow_negative_indices=False)
        self.arriving = self.arriving | {group: arrived}

    def scatter_piece(self, name: str, part: jax.Array) -> jax.Array:
        """This rank's sum of a piece of the gradients that leave, ``[length]``."""
        piece, group, depth = self._piece(name)
        total = self.constants.totals[group]
        total = total.reshape(*total.shape[:2], -1, self.constants.shards[group].shape[2])
        start, length = piece_range(piece, part, self.chunks.stages, total.shape[-1])
        origin, sizes = (self.column("scatter_chunk"), jnp.int32(depth), jnp.int32(0), start), (1, 1, total.shape[2], length)
        return ZeroSharding.scatter_flat(jax.lax.dynamic_slice(total, origin, sizes, allow_negative_indices=False)[0, 0])

    def _piece(self, name: str) -> tuple[Piece, str, int]:
        """A piece, its matrix's group and the layer's place in the chunk."""
        piece = self.chunks.pieces[name]
        branch = self.chunks.branches[piece.branch]
        return piece, branch.w_in if piece.matrix == "in" else branch.w_out, piece.branch // self.chunks.branches_per_layer


def joined(pieces: Sequence[tuple[Piece, jax.Array]], size: int) -> jax.Array:
    """One matrix's gradients ``[L]`` from its pieces of a window, each ``[p, length]``."""
    found: list[tuple[int, jax.Array]] = []
    for piece, parts_pl in pieces:
        count, length = parts_pl.shape
        for part in range(count):
            begin = (part * piece.units + piece.first) * _unit(piece, count, size)
            moved_back = max(begin + length - size, 0)
            if moved_back < length:
                found.append((begin, parts_pl[part, moved_back:]))
    return jnp.concatenate([value for _, value in sorted(found, key=lambda pair: pair[0])])


def _unit(piece: Piece, parts: int, size: int) -> int:
    return -(-size // (parts * piece.units))


def piece_range(piece: Piece, part: jax.Array, parts: int, size: int) -> tuple[jax.Array, int]:
    """Start and length of a piece in a matrix's ``L`` elements."""
    unit = _unit(piece, parts, size)
    length = min((piece.last - piece.first) * unit, size)
    return jnp.minimum((part * piece.units + piece.first) * unit, size - length), length

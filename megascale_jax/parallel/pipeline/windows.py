"""What changes where a window of the schedule ends: a chunk's weights are complete, or its gradients of ``p`` micro-batches.

Matrices of the layers only; one rank's, by group. ``rows`` is the padded embed dim, of which each of ``n`` data ranks owns an
equal part; a layer's matrix ``[rows, F]`` in memory is ``[n, L]``, as `ZeroSharding` moves it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megascale_jax.parallel.pipeline.schedule import TickKind
from megascale_jax.parallel.pipeline.tick import Tick
from megascale_jax.parallel.pipeline.tick_state import Chunks, add_at, behind, put
from megascale_jax.parallel.pipeline.zero_operations import joined
from megascale_jax.parallel.zero import Shards, ZeroSharding

Sums = dict[int, dict[str, tuple[jax.Array, ...]]]
"""Gradients of the window's chunk so far: branch number to ``in`` and ``out`` to parts of the matrix's columns, fp32 ``[D, F]``."""


class State(NamedTuple):
    """``weights``: compute type, ``[chunk, layer, rows, F]``; ``totals``: gradients, fp32, the same; ``left``:
    this rank's shards of the summed gradients, fp32 ``[chunk, layer, L]``."""

    weights: Shards
    totals: Shards
    left: Shards


@dataclass(frozen=True)
class Windows:
    """What happens at the ends of windows."""

    zero: ZeroSharding
    chunks: Chunks

    def width(self, group: str) -> int:
        """This rank's columns of a matrix."""
        return sum(self.zero.columns[name] for name in self.zero.matrices[group].members)

    def part_widths(self, number: int, matrix: str) -> tuple[int, ...]:
        """Columns of the parts in which a matrix's gradient is computed."""
        branch = self.chunks.branches[number]
        width = self.width(branch.w_in if matrix == "in" else branch.w_out)
        return (width,) if len(self.chunks.shape.halves(number, matrix)) == 1 else (width // 2, width - width // 2)

    def start(self, shards: Shards) -> State:
        """Chunk 0's weights gathered, all else empty."""
        weights: Shards = {}
        for group, shard in shards.items():
            first = [self.zero.gather_flat(shard[0, depth]).reshape(1, 1, self._rows, -1) for depth in range(shard.shape[1])]
            stack = jnp.zeros((*shard.shape[:2], *first[0].shape[2:]), shard.dtype)
            for depth, value in enumerate(first):
                stack = jax.lax.dynamic_update_slice(stack, value, (0, depth, 0, 0))
            weights[group] = stack
        totals = {group: jnp.zeros(stack.shape, jnp.float32) for group, stack in weights.items()}
        return State(weights, totals, {group: jnp.zeros(shard.shape, jnp.float32) for group, shard in shards.items()})

    def empty_arriving(self, shards: Shards) -> Shards:
        """Room for a chunk, ``[layer, n, L]``."""
        return {group: jnp.zeros((shard.shape[1], self._counts[2], shard.shape[2]), shard.dtype) for group, shard in shards.items()}

    def first_turn(self, state: State) -> dict[str, Any]:
        """What both slots hold at first: chunk 0; nothing where weights are looked up."""
        if not self.chunks.shape.turns:
            return {}
        hidden = self.zero.model.hidden_size
        chunk = {
            number: {group: state.weights[group][0, number // self.chunks.branches_per_layer, :hidden] for group in (b.w_in, b.w_out)}
            for number, b in enumerate(self.chunks.branches)
        }
        return {"forward": chunk, "backward": chunk}

    def empty_sums(self) -> Sums:
        """Zeros; nothing where gradients do not wait for the end of a window."""
        if not self.chunks.shape.turns:
            return {}
        return {
            number: {matrix: self._empty_parts(number, matrix) for matrix in ("in", "out")} for number in range(len(self.chunks.branches))
        }

    def close(self, kind: TickKind, tick: Tick, state: State, moved: dict[str, jax.Array]) -> tuple[dict[str, Any], State]:
        """After the last tick of a window, ``tick`` being one of its ticks with what they held; ``moved``: the pieces that left."""
        columns, held = tick.column, dict(tick.held)
        if kind.gather:
            arrived = {group: value.reshape(value.shape[0], self._rows, -1) for group, value in held["arriving"].items()}
            weights = {group: put(stack, arrived[group], columns("gather_chunk")) for group, stack in state.weights.items()}
            state = state._replace(weights=weights)
            if self.chunks.shape.turns and not self.chunks.shape.in_halves(kind):
                held["now"] = held["now"] | {"forward": self._turned(tick, weights)}
        if kind.scatter:
            left = {group: put(stack, self._joined(group, moved), columns("scatter_chunk")) for group, stack in state.left.items()}
            state = state._replace(left=left)
        if kind.weight_gradients:
            # behind the pieces that left, which were cut out of the totals
            chunk = behind(columns("weight_chunk"), *moved.values())
            state = state._replace(totals=self._added(state.totals, held["sums"], chunk))
            held["sums"] = self.empty_sums()
        return held, state

    def finish(self, state: State) -> Shards:
        """All shards that have left, with chunk 0, which leaves now."""
        left: Shards = {}
        _, layers, ways = self._counts
        for group, shards in state.left.items():
            first = [self.zero.scatter_flat(state.totals[group][0, depth].reshape(ways, -1)) for depth in range(layers)]
            left[group] = put(shards, jnp.stack(first), jnp.int32(0))
        return left

    def _turned(self, tick: Tick, weights: Shards) -> Any:
        """What the forward slot holds after a window whose chunk is the next that it needs."""
        tick.weights = {**tick.weights, "layers": tick.weights["layers"] | weights}
        return tick.turn("forward", tick.column("close_turns"), tick.column("next_chunk"))

    @property
    def _counts(self) -> tuple[int, int, int]:
        """Chunks, layers of a chunk, data ranks."""
        return (*self.zero.layout.stack_shape[1:], self.zero.layout.mesh.data)

    @property
    def _rows(self) -> int:
        return self.zero.layout.padded_embed

    def _empty_parts(self, number: int, matrix: str) -> tuple[jax.Array, ...]:
        rows = self.zero.model.hidden_size
        return tuple(jnp.zeros((rows, width), jnp.float32) for width in self.part_widths(number, matrix))

    def _added(self, totals: Shards, sums: Sums, chunk: jax.Array) -> Shards:
        result = dict(totals)
        for number, branch in enumerate(self.chunks.branches):
            depth = number // self.chunks.branches_per_layer
            for matrix, group in (("in", branch.w_in), ("out", branch.w_out)):
                column = 0
                for half in sums[number][matrix]:
                    result[group] = add_at(result[group], chunk, depth, half, column)
                    column += half.shape[1]
        return result

    def _joined(self, group: str, moved: dict[str, jax.Array]) -> jax.Array:
        """A chunk's shards ``[layer, L]`` from the pieces of a window, by the name of the value that they are."""
        layers: list[jax.Array] = []
        for depth in range(self._counts[1]):
            own = [
                (piece, moved[f"{name}ed"])
                for name, piece in self.chunks.pieces.items()
                if ".scatter_" in name and self._matrix(piece.branch, piece.matrix) == (group, depth)
            ]
            size = self._rows // self._counts[2] * self.width(group)
            layers.append(joined(own, size))
        return jnp.stack(layers)

    def _matrix(self, number: int, matrix: str) -> tuple[str, int]:
        branch = self.chunks.branches[number]
        return branch.w_in if matrix == "in" else branch.w_out, number // self.chunks.branches_per_layer

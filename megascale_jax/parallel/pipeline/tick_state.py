"""What a tick knows and holds while it is traced: its row of the schedule, weights, batch; stash, gradients, loss.

Operations of a tick are methods on top of it, in five files: one branch (`branch_operations.py`), a branch in halves of the
sequence (`half_operations.py`), the vocabulary (`vocabulary_operations.py`), ZeRO-2 (`zero_operations.py`), and what connects
stages and ticks (`tick.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp

from megascale_jax import axes
from megascale_jax.model.branch import Branch
from megascale_jax.model.communication import OneDevice
from megascale_jax.model.transformer import Transformer
from megascale_jax.parallel.pipeline.pieces import Piece, zero_pieces
from megascale_jax.parallel.pipeline.shape import TickShape
from megascale_jax.parallel.pipeline.table import COLUMNS
from megascale_jax.parallel.ring import RingTensorParallel

Batch = Mapping[str, jax.Array]
"""``tokens``, ``targets``, ``segment_ids``, ``positions``: int32 ``[m, B, S]``; within a tick ``[m, 1, B S]``, see `TokenOrder`."""


@dataclass(frozen=True)
class Chunks:
    """The static part of a pipeline: the chunk's branches, the number of stages, the shape of a tick."""

    transformer: Transformer
    branches: tuple[Branch, ...]
    branches_per_layer: int
    stages: int
    shape: TickShape

    @cached_property
    def pieces(self) -> Mapping[str, Piece]:
        """ZeRO-2 pieces that move in a tick, by the name of their operation."""
        return zero_pieces(self.shape)


@dataclass(frozen=True)
class Place:
    """The unit that a slot works on, traced."""

    chunk: jax.Array
    micro_batch: jax.Array
    slot: jax.Array
    direction: Literal["forward", "backward", "none"]
    """Slot whose weights it uses; ``none``: looked up."""


@dataclass(frozen=True)
class Constants:
    """What a tick reads and never writes.

    ``weights`` as of `ZeroSharding.gather`, embed dims padded; ``shards`` and ``totals``: `Windows` about them.
    """

    weights: Mapping[str, Any]
    batch: Batch
    key: jax.Array | None
    scale: jax.Array
    shards: Mapping[str, jax.Array] = field(default_factory=dict)
    totals: Mapping[str, jax.Array] = field(default_factory=dict)


class TickState:
    """``row``: this stage's row of the schedule's table, int32 ``[len(COLUMNS)]``; ``held`` as the property gives it back."""

    def __init__(self, chunks: Chunks, constants: Constants, row: jax.Array, held: Mapping[str, Any]):
        self.chunks, self.constants = chunks, constants
        self.weights, self.batch, self.key, self.scale = constants.weights, constants.batch, constants.key, constants.scale
        # scalars behind a barrier: XLA updates a slice in place only where reader and writer share the very same index
        self.columns = jax.lax.optimization_barrier(tuple(row[index] for index in range(len(COLUMNS))))
        self.model, self.communication = chunks.transformer.model, chunks.transformer.communication
        # without rings, gathers and scatters are operations of their own, and products those of one device
        self.products = self.communication if isinstance(self.communication, RingTensorParallel) else OneDevice()
        self.stage = jax.lax.axis_index(axes.PIPE)
        self.stash, self.kept, self.sums, self.arriving = (held[name] for name in ("stash", "kept", "sums", "arriving"))
        self.loaded: dict[int, tuple[jax.Array, ...]] = {}
        self.looked_up: dict[tuple[int, str], list[jax.Array]] = {}
        self.gradients, self.loss, self.now = held["gradients"], held["loss"], held["now"]

    @property
    def held(self) -> dict[str, Any]:
        """What operations have updated."""
        return {
            "stash": self.stash,
            "kept": self.kept,
            "sums": self.sums,
            "arriving": self.arriving,
            "gradients": self.gradients,
            "loss": self.loss,
            "now": self.now,
        }

    def column(self, column: str) -> jax.Array:
        """This stage's entry of the schedule's table."""
        return self.columns[COLUMNS[column]]

    @cached_property
    def _places(self) -> dict[str, Place]:
        forward, backward = self._place("forward"), self._place("backward")
        late = Place(self.column("late_chunk"), self.column("leaving"), forward.slot, "backward")
        # all that weight gradients read of their unit is its chunk
        weight = Place(self.column("weight_chunk"), backward.micro_batch, backward.slot, "backward")
        halves = replace(forward, direction="none")
        past = replace(halves, chunk=self.column("past_chunk"))
        return {"F": forward, "B": backward, "R": backward, "L": late, "W": weight, "a": halves, "b": halves, "T": past}

    def _place(self, slot: Literal["forward", "backward"]) -> Place:
        return Place(*(self.column(f"{slot}_{part}") for part in ("chunk", "micro_batch", "slot")), direction=slot)

    def _micro_batch_key(self, micro_batch: jax.Array) -> jax.Array | None:
        return None if self.key is None else jax.random.fold_in(self.key, micro_batch)


def zero_gradients(weights: Mapping[str, Any]) -> Any:
    """fp32 zeros like the weights."""
    return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)


def fold_rank(key: jax.Array) -> jax.Array:
    """A key of this rank's own, so that no two ranks drop the same elements."""
    for axis in axes.MESH_AXES:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return key


def take(stacked: jax.Array, index: jax.Array) -> jax.Array:
    """Entry ``index`` of the first dim."""
    return jax.lax.dynamic_index_in_dim(stacked, index, 0, keepdims=False, allow_negative_indices=False)


def put(stacked: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    """The same array with entry ``index`` of the first dim replaced."""
    return jax.lax.dynamic_update_index_in_dim(stacked, value, index, 0, allow_negative_indices=False)


def behind(index: jax.Array, *values: jax.Array) -> jax.Array:
    """The same index, known no earlier than the ``values``: what is written there is written after all that they were made of was read."""
    return sum([(value.ravel()[0] > jnp.inf).astype(jnp.int32) for value in values], index)


def cut(stacked: jax.Array, chunk: jax.Array, depth: int, rows: int) -> jax.Array:
    """One layer out of a stack ``[chunk, layer, ...]``; of a matrix the first ``rows``, what follows are pads."""
    kept = (rows, *stacked.shape[3:]) if stacked.ndim == 4 else stacked.shape[2:]
    return jax.lax.dynamic_slice(stacked, _origin(stacked, chunk, depth), (1, 1, *kept), allow_negative_indices=False)[0, 0]


def cut_columns(stacked: jax.Array, chunk: jax.Array, depth: int, rows: int, widths: Sequence[int]) -> list[jax.Array]:
    """One layer's matrix out of a stack, in parts of so many columns."""
    parts, start = [], 0
    for width in widths:
        parts.append(
            jax.lax.dynamic_slice(stacked, _origin(stacked, chunk, depth, start), (1, 1, rows, width), allow_negative_indices=False)[0, 0]
        )
        start += width
    return parts


def add_at(stacked: jax.Array, chunk: jax.Array, depth: int, value: jax.Array, column: int = 0) -> jax.Array:
    """The stack with ``value`` added to one layer, from a column on."""
    # no reshape between slice and update: XLA then adds in place in one pass over the memory instead of three
    origin, sizes = _origin(stacked, chunk, depth, column), (1, 1, *value.shape)
    total = jax.lax.dynamic_slice(stacked, origin, sizes, allow_negative_indices=False) + value[None, None]
    return jax.lax.dynamic_update_slice(stacked, total, origin, allow_negative_indices=False)


def _origin(stacked: jax.Array, chunk: jax.Array, depth: int, column: int = 0) -> tuple[jax.Array | int, ...]:
    zeros = [jnp.int32(0)] * (stacked.ndim - 3)
    return (chunk, jnp.int32(depth), *zeros, jnp.int32(column))

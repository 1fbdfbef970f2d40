"""What decides the operations of a tick besides its kind: the shape of a run's ticks, from model and mesh. No JAX."""

from dataclasses import dataclass
from typing import Literal

from megascale_jax.config.layout import Layout
from megascale_jax.config.schema import ModelConfig, ParallelConfig
from megascale_jax.model.parameters import fused_groups, parameter_specs
from megascale_jax.parallel.pipeline.schedule import TickKind


@dataclass(frozen=True)
class TickShape:
    """What decides the operations of a tick, besides its kind.

    ``branches`` of a chunk; ``recompute``: the backward slot runs the chunk's forward pass again; ``backward_delay`` as
    in the schedule: the head takes the last tick's output (1) or this tick's (0). ``halved``: weight gradients that are cut in
    two, branch and ``in`` or ``out``: each half still covers a message, so that there are more kernels to hide messages under.
    ``turns``: a slot stays with a chunk for some ticks, so weights are copied where it turns to another, and weight gradients
    wait for a common tick and have a place of their own to add up in; without, weights are looked up and gradients added in
    every tick. ``split``: the forward pass runs in halves of the sequence as long as there are no weight gradients. ``ring``:
    products do their own communication.
    """

    branches: int
    recompute: bool
    backward_delay: Literal[0, 1]
    halved: frozenset[tuple[int, str]] = frozenset()
    turns: bool = True
    split: bool = False
    ring: bool = False

    def in_halves(self, kind: TickKind) -> bool:
        """Whether a tick's forward pass runs in halves of the sequence."""
        return self.split and kind.forward and not kind.weight_gradients

    def halves(self, branch: int, matrix: str) -> tuple[str, ...]:
        """Suffixes of the GEMMs of a weight gradient."""
        return ("1", "2") if (branch, matrix) in self.halved else ("",)


INPUT_CUT = (3, 5)
"""Eighths of the columns of both parts of a half's input GEMM: for 1,024 tokens and 10,752 columns one wave of tiles and two, as
many as uncut."""
TILE = 256
"""Columns of a GEMM's tile, to which the cut is rounded."""

COVERING_FLOPS = 5e10
"""FLOPs of a GEMM that covers a message of a large model, some 0.1 ms on an H100."""


def tick_shape(model: ModelConfig, parallel: ParallelConfig, layout: Layout) -> TickShape:
    """The shape of a run's ticks."""
    elements = parallel.micro_batch_size * model.sequence_length * model.hidden_size
    turns = parallel.pipe > 1
    branches = layout.layers_per_chunk * model.branches_per_layer
    widths = _own_widths(model, layout)
    long = {place for place, width in enumerate(widths) if elements * width >= COVERING_FLOPS}
    halved = {(k, matrix) for k in range(branches) for end, matrix in enumerate(("in", "out")) if (2 * k + end) % len(widths) in long}
    return TickShape(
        branches,
        parallel.remat == "full",
        parallel.backward_delay,
        halved=frozenset(halved) if turns else frozenset(),
        turns=turns,
        # a half's own dropout would be another than that of the whole, which the backward pass draws again
        split=parallel.tensor > 1 and parallel.backward_delay == 1 and model.dropout == 0 and parallel.tensor_overlap == "plain",
        ring=parallel.tensor_overlap == "ring",
    )


HEAD_GEMMS = ("H.project", "H.dx", "H.dw")
LIGHT = 0.25
"""A GEMM of less than this share of a branch's input GEMM does not cover a message."""


def light_operations(model: ModelConfig, layout: Layout) -> tuple[str, ...]:
    """The head's GEMMs, where a rank's part of the vocabulary is small beside its part of a branch's input projection."""
    own_vocab = layout.padded_vocab // (layout.mesh.pipe * layout.mesh.tensor)
    return HEAD_GEMMS if own_vocab < LIGHT * _own_widths(model, layout)[0] else ()


def _own_widths(model: ModelConfig, layout: Layout) -> list[int]:
    """One rank's columns of a layer's matrices, input and output of each branch in turn."""
    specs = parameter_specs(model)
    matrices = [group for group in fused_groups(model) if group.has_embed and group.name != "vectors"]
    return [sum(specs[name].columns() for name in group.members) // layout.mesh.tensor for group in matrices]

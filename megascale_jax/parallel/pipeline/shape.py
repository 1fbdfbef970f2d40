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
    in the schedule: the head takes the last tick's output (1) or this tick's (0). ``halved``: weight gradients are
    cut in two, each half still long enough to cover a message, so that there are more kernels to hide messages under.
    ``turns``: weights are copied where a slot turns to another chunk, not looked up in every tick. ``split``: the forward pass
    runs in halves of the sequence as long as there are no weight gradients.
    """

    branches: int
    recompute: bool
    backward_delay: Literal[0, 1]
    halved: bool = False
    turns: bool = True
    split: bool = False

    def in_halves(self, kind: TickKind) -> bool:
        """Whether a tick's forward pass runs in halves of the sequence."""
        return self.split and kind.forward and not kind.weight_gradients

    @property
    def halves(self) -> tuple[str, ...]:
        """Suffixes of the GEMMs of one weight gradient."""
        return ("1", "2") if self.halved else ("",)


INPUT_CUT = (3, 5)
"""Eighths of the columns of both parts of a half's input GEMM: for 1,024 tokens and 10,752 columns one wave of tiles and two, as
many as uncut."""


COVERING_FLOPS = 5e10
"""FLOPs of a GEMM that covers a message of a large model, some 0.1 ms on an H100."""


def tick_shape(model: ModelConfig, parallel: ParallelConfig, layout: Layout) -> TickShape:
    """The shape of a run's ticks."""
    tokens = parallel.micro_batch_size * model.sequence_length
    half = tokens * model.hidden_size * _own_width(model, layout)
    return TickShape(
        layout.layers_per_chunk * model.branches_per_layer,
        parallel.remat == "full",
        parallel.backward_delay,
        halved=half >= COVERING_FLOPS,
        # a half's own dropout would be another than that of the whole, which the backward pass draws again
        split=parallel.tensor > 1 and parallel.backward_delay == 1 and model.dropout == 0,
    )


HEAD_GEMMS = ("H.project", "H.dx", "H.dw")
LIGHT = 0.25
"""A GEMM of less than this share of a branch's input GEMM does not cover a message."""


def light_operations(model: ModelConfig, layout: Layout) -> tuple[str, ...]:
    """The head's GEMMs, where a rank's part of the vocabulary is small beside its part of a branch's input projection."""
    own_vocab = layout.padded_vocab // (layout.mesh.pipe * layout.mesh.tensor)
    return HEAD_GEMMS if own_vocab < LIGHT * _own_width(model, layout) else ()


def _own_width(model: ModelConfig, layout: Layout) -> int:
    """One rank's columns of the first branch's input projection."""
    specs = parameter_specs(model)
    group = next(group for group in fused_groups(model) if group.name in ("w_in", "w_qkv"))
    return sum(specs[name].columns() for name in group.members) // layout.mesh.tensor

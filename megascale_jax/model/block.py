"""The two transformer blocks, side by side, as Flax NNX modules.

``ParallelBlock`` (paper section 3.1): ``y = x + attention(n(x)) + mlp(n(x))``, one norm, so q, k, v and the MLP's input
are one GEMM and the two outputs another: one gather and one reduce-scatter of the sequence per block. ``SerialBlock``
has two of each. Parameters are the fused operands of `fused_groups`; shapes are those of one tensor-parallel rank.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from megascale_jax.config.schema import ModelConfig
from megascale_jax.kernels.dispatch import Operators
from megascale_jax.model.branch import Rows, branches_of
from megascale_jax.model.communication import Communication
from megascale_jax.model.parameters import fused_groups


class Block(nnx.Module):
    """Parameters and branches of one layer; ``columns`` holds this rank's width of every layer parameter."""

    def __init__(
        self,
        model: ModelConfig,
        columns: Mapping[str, int],
        window: int | None,
        operators: Operators,
        communication: Communication,
    ):
        self.communication = communication
        self.branches = nnx.static(branches_of(model, columns, operators, window))
        self.names = tuple(group.name for group in fused_groups(model))
        for group in fused_groups(model):
            width = sum(columns[member] for member in group.members)
            shape = (model.hidden_size, width) if group.has_embed else (width,)
            setattr(self, group.name, nnx.Param(jnp.zeros(shape)))

    def __call__(self, x_BsD: jax.Array, rows: Rows) -> jax.Array:
        """One layer on this rank's part of the sequence, without dropout."""
        weights = {name: getattr(self, name)[...] for name in self.names}
        for branch in self.branches:
            x_BsD = branch.apply(weights, x_BsD, rows, self.communication)
        return x_BsD


class ParallelBlock(Block):
    """``y = x + attention(n(x)) + mlp(n(x))``: one branch."""


class SerialBlock(Block):
    """``h = x + attention(n1(x)); y = h + mlp(n2(h))``: two branches."""


BLOCKS = {"parallel": ParallelBlock, "serial": SerialBlock}

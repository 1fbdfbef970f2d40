"""The two transformer blocks, side by side, as Flax NNX modules.

``ParallelBlock`` (paper section 3.1): ``y = x + attention(n(x)) + mlp(n(x))``, one norm, so q, k, v and the MLP's input
are one GEMM and the two outputs another: one gather and one reduce-scatter of the sequence per block. ``SerialBlock``
has two of each. Parameters are the fused operands of `fused_groups`; shapes are those of one tensor-parallel rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from megascale_jax.config.schema import ModelConfig
from megascale_jax.kernels.dispatch import Operators
from megascale_jax.model.attention import attend
from megascale_jax.model.communication import Communication
from megascale_jax.model.parameters import FusedGroup, fused_groups


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """What a block needs to know of the rows in flight, besides their activations."""

    positions_BS: jax.Array
    segment_ids_BS: jax.Array


class Block(nnx.Module):
    """Parameters and parts common to both blocks; ``columns`` holds this rank's width of every layer parameter."""

    vectors: nnx.Param

    def __init__(
        self,
        model: ModelConfig,
        columns: Mapping[str, int],
        window: int | None,
        operators: Operators,
        communication: Communication,
    ):
        self.model, self.window, self.operators, self.communication = model, window, operators, communication
        self.columns = dict(columns)
        self.groups = {group.name: group for group in fused_groups(model)}
        for group in self.groups.values():
            width = sum(self.columns[member] for member in group.members)
            shape = (model.hidden_size, width) if group.has_embed else (width,)
            setattr(self, group.name, nnx.Param(jnp.zeros(shape)))

    def _split(self, x: jax.Array, group: FusedGroup) -> dict[str, jax.Array]:
        # not slices: their gradients are padded and added up, those of a split are laid side by side
        parts = jax.lax.split(x, [self.columns[member] for member in group.members], axis=x.ndim - 1)
        return dict(zip(group.members, parts, strict=True))

    def _vector(self, name: str) -> jax.Array | None:
        members = self.groups["vectors"].members
        return self.vectors[...][:, members.index(name)] if name in members else None

    def _norm(self, x_BsD: jax.Array, prefix: str = "") -> jax.Array:
        scale, bias = self._vector(f"{prefix}norm_scale"), self._vector(f"{prefix}norm_bias")
        return self.operators.norm(x_BsD, scale, bias, epsilon=self.model.norm_epsilon)

    def _project_in(self, x_BsD: jax.Array, weight: str, bias: str) -> dict[str, jax.Array]:
        y_BSF = self.communication.all_gather_matmul(x_BsD, getattr(self, weight)[...])
        parts = self._split(y_BSF, self.groups[weight])
        if bias in self.groups:
            for member, value in self._split(getattr(self, bias)[...], self.groups[bias]).items():
                projection = member.removesuffix("_bias")
                parts[projection] = parts[projection] + value.astype(y_BSF.dtype)
        return parts

    def _project_out(self, y_BSF: jax.Array, weight: str, biases: tuple[str, ...]) -> jax.Array:
        out_BsD = self.communication.matmul_reduce_scatter(y_BSF, getattr(self, weight)[...])
        for name in biases:
            if (bias := self._vector(name)) is not None:
                out_BsD = out_BsD + bias.astype(out_BsD.dtype)
        return out_BsD

    def _attend(self, parts: dict[str, jax.Array], rows: Rows) -> jax.Array:
        return attend(
            (parts["q"], parts["k"], parts["v"]),
            rows.positions_BS,
            rows.segment_ids_BS,
            attention=self.operators.attention,
            head_dim=self.model.head_dim,
            window=self.window,
            rotary_base=self.model.rotary_base if self.model.position == "rotary" else None,
        )

    def _activate(self, parts: dict[str, jax.Array]) -> jax.Array:
        return self.operators.activation(parts["up"], parts.get("gate"))


class ParallelBlock(Block):
    """``y = x + attention(n(x)) + mlp(n(x))``."""

    def __call__(self, x_BsD: jax.Array, rows: Rows, key: jax.Array | None) -> jax.Array:
        """One layer on this rank's part of the sequence; ``key`` draws the dropout, ``None``: no dropout."""
        parts = self._project_in(self._norm(x_BsD), "w_in", "b_in")
        both_BSF = jnp.concatenate([self._attend(parts, rows), self._activate(parts)], -1)
        return x_BsD + dropout(self._project_out(both_BSF, "w_out", ("o_bias", "down_bias")), self.model.dropout, key)


class SerialBlock(Block):
    """``h = x + attention(n1(x)); y = h + mlp(n2(h))``."""

    def __call__(self, x_BsD: jax.Array, rows: Rows, key: jax.Array | None) -> jax.Array:
        """One layer on this rank's part of the sequence; ``key`` draws the dropout, ``None``: no dropout."""
        keys = (None, None) if key is None else jax.random.split(key)
        parts = self._project_in(self._norm(x_BsD), "w_qkv", "b_qkv")
        h_BsD = x_BsD + dropout(self._project_out(self._attend(parts, rows), "w_o", ("o_bias",)), self.model.dropout, keys[0])
        parts = self._project_in(self._norm(h_BsD, "mlp_"), "w_mlp", "b_mlp")
        return h_BsD + dropout(self._project_out(self._activate(parts), "w_down", ("down_bias",)), self.model.dropout, keys[1])


BLOCKS = {"parallel": ParallelBlock, "serial": SerialBlock}


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero a share ``rate`` of the elements and scale the rest by ``1 / (1 - rate)``; the input when ``key`` is ``None``."""
    if key is None or rate == 0.0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1.0 - rate, x.shape), x / (1.0 - rate), 0).astype(x.dtype)

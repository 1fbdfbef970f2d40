"""One residual branch, ``x + f(norm(x))``, cut into the segments that a pipeline tick schedules.

A parallel block is one branch, a serial block two; all have the same form, so both blocks and every executor are built
from it. Segments are pure functions of this rank's fused weights (`fused_groups`) and know no mesh:

    n = norm(x)                      [B, s, D]     this rank's part of the sequence
    y = gathered(n) @ w_in + b_in    [B, S, F]     a GEMM after a gather
    z = middle(y)                    [B, S, G]     attention and nonlinearity
    o = z @ w_out.T                  [B, S, D]     a GEMM before a reduce-scatter
    x + dropout(o + biases)          [B, s, D]     `finish`

`apply` runs them in order; the methods that end in ``_backward`` are its derivative cut at the same places, and need only
``x``, ``y`` and what attention saved.

Tokens lie in the order of the text, or in a `TokenOrder`; what attention saves is in the order of the text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp

from megascale_jax.config.schema import ModelConfig
from megascale_jax.kernels.dispatch import Operators
from megascale_jax.model.attention import Rotary, merge_heads, split_heads
from megascale_jax.model.communication import Communication
from megascale_jax.model.order import TokenOrder
from megascale_jax.model.parameters import FusedGroup, fused_groups

Weights = Mapping[str, jax.Array]
"""One layer's fused operands by group name."""
Saved = tuple[jax.Array, ...]
"""What attention keeps for its backward pass: its output and the log-sum-exp; nothing in a branch without attention."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """What a branch needs to know of the rows in flight, besides their activations."""

    positions_BS: jax.Array
    segment_ids_BS: jax.Array


@dataclass(frozen=True)
class Branch:
    """``columns``: this rank's width of every layer parameter; ``order``: that of the tokens, ``None`` for that of the text."""

    model: ModelConfig
    columns: Mapping[str, int] = field(hash=False)
    operators: Operators
    window: int | None
    norm_prefix: str
    w_in: str
    w_out: str
    out_biases: tuple[str, ...]
    order: TokenOrder | None = None

    @cached_property
    def groups(self) -> dict[str, FusedGroup]:
        """The model's fused groups by name."""
        return {group.name: group for group in fused_groups(self.model)}

    @property
    def b_in(self) -> str | None:
        """Group of the input projection's biases, if any."""
        name = self.w_in.replace("w_", "b_")
        return name if name in self.groups else None

    @property
    def attends(self) -> bool:
        """Whether attention is in this branch."""
        return "q" in self.groups[self.w_in].members

    @property
    def activates(self) -> bool:
        """Whether the feed-forward layer is in this branch."""
        return "up" in self.groups[self.w_in].members

    @property
    def halved_order(self) -> TokenOrder:
        """The order of tokens that lie in halves."""
        assert self.order is not None and self.order.halves == 2, "only tokens that lie in halves can be run in halves"
        return self.order

    def apply(self, weights: Weights, x_BsD: jax.Array, rows: Rows, communication: Communication) -> jax.Array:
        """The whole branch, without dropout."""
        y_BSF = self.add_bias_in(weights, communication.all_gather_matmul(self.norm(weights, x_BsD), weights[self.w_in]))
        o_BsD = communication.matmul_reduce_scatter(self.middle_forward(y_BSF, rows)[0], weights[self.w_out])
        return self.finish(weights, x_BsD, o_BsD, None)

    def norm(self, weights: Weights, x_BsD: jax.Array) -> jax.Array:
        """The branch's own norm."""
        return self.fork(weights, x_BsD)[1]

    def fork(self, weights: Weights, x_BsD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What goes past the branch, and its norm, which goes into it; so that one kernel joins their gradients."""
        scale, bias = (self._vector(weights, f"{self.norm_prefix}norm_{part}") for part in ("scale", "bias"))
        return self.operators.add_norm(x_BsD, None, scale, bias)

    def add_bias_in(self, weights: Weights, y_BSF: jax.Array) -> jax.Array:
        """``y`` with the input biases, which are laid in the order of the projections they belong to."""
        if self.b_in is None:
            return y_BSF
        parts = dict(zip(self.groups[self.b_in].members, self._cut(weights[self.b_in], self.groups[self.b_in]), strict=True))
        members = self.groups[self.w_in].members
        whole = [parts.get(f"{name}_bias", jnp.zeros(self.columns[name], y_BSF.dtype)) for name in members]
        return y_BSF + jnp.concatenate(whole).astype(y_BSF.dtype)

    def middle_forward(self, y_BSF: jax.Array, rows: Rows) -> tuple[jax.Array, Saved]:
        """Attention and nonlinearity, side by side: the input of the output GEMM; and what the backward pass needs besides ``y``."""
        parts = self._split(y_BSF)
        results, saved = [], ()
        if self.attends:
            q, k, v = self._heads(parts["q"], parts["k"], parts["v"], rows)
            out, lse = self.operators.attention_forward(q, k, v, self._to_text(rows.segment_ids_BS), window=self.window)
            saved = (merge_heads(out), lse)
            results.append(self._from_text(saved[0]))
        if self.activates:
            results.append(self.operators.activate(parts["up"], parts.get("gate")))
        return jnp.concatenate(results, -1), saved

    def first_half_forward(self, y_BSF: jax.Array, rows: Rows) -> jax.Array:
        """`middle_forward` of the first half of the sequence, which sees no token of the second; ``rows`` of both."""
        order = self.halved_order
        first = Rows(order.first_half(rows.positions_BS), order.first_half(rows.segment_ids_BS))
        return replace(self, order=order.of_half).middle_forward(y_BSF, first)[0]

    def second_half_forward(self, y_first_BSF: jax.Array, y_BSF: jax.Array, rows: Rows) -> tuple[jax.Array, Saved]:
        """`middle_forward` of the second half of the sequence, given ``y`` and ``rows`` of both.

        What attention saves is that of the whole sequence: its queries are few beside its keys, and nothing else is run twice.
        """
        parts = self._split(y_BSF)
        results, saved = [], ()
        if self.attends:
            first, order = self._split(y_first_BSF), self.halved_order.of_half
            q, k, v = split_heads(
                tuple(jnp.concatenate([order.to_text(first[name]), order.to_text(parts[name])], 1) for name in "qkv"),  # type: ignore[arg-type]
                self._to_text(rows.positions_BS),
                head_dim=self.model.head_dim,
                rotary=self._rotary,
            )
            out, lse = self.operators.attention_forward(q, k, v, self._to_text(rows.segment_ids_BS), window=self.window)
            saved = (merge_heads(out), lse)
            results.append(order.from_text(saved[0][:, saved[0].shape[1] // 2 :]))
        if self.activates:
            results.append(self.operators.activate(parts["up"], parts.get("gate")))
        return jnp.concatenate(results, -1), saved

    def middle_backward(self, y_BSF: jax.Array, saved: Saved, dz_BSG: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """``(dy, z)``: the gradient of ``y``, and ``z`` once more for the weight gradient of the output GEMM."""
        parts = self._split(y_BSF)
        gradients: dict[str, jax.Array] = {}
        results = []
        d_attention, d_activation = self._cut_middle(dz_BSG)
        if self.attends:
            (q, k, v), pull = jax.vjp(lambda q, k, v: self._heads(q, k, v, rows), parts["q"], parts["k"], parts["v"])
            out, lse = saved
            shape = (*out.shape[:2], -1, self.model.head_dim)
            segment_ids_BS, d_out = self._to_text(rows.segment_ids_BS), self._to_text(d_attention)
            d_qkv = self.operators.attention_backward(
                q, k, v, segment_ids_BS, out.reshape(shape), lse, d_out.reshape(shape), window=self.window
            )
            gradients |= dict(zip("qkv", pull(d_qkv), strict=True))
            results.append(self._from_text(out))
        if self.activates:
            d_up, d_gate, activated = self.operators.activate_backward(parts["up"], parts.get("gate"), d_activation)
            gradients |= {"up": d_up} if d_gate is None else {"up": d_up, "gate": d_gate}
            results.append(activated)
        dy_BSF = jnp.concatenate([gradients[name] for name in self.groups[self.w_in].members], -1)
        return dy_BSF, jnp.concatenate(results, -1)

    def finish(self, weights: Weights, x_BsD: jax.Array, o_BsD: jax.Array, key: jax.Array | None) -> jax.Array:
        """``x + dropout(o + biases)``."""
        for name in self.out_biases:
            if (bias := self._vector(weights, name)) is not None:
                o_BsD = o_BsD + bias.astype(o_BsD.dtype)
        return x_BsD + dropout(o_BsD, self.model.dropout, key)

    def bias_in_gradient(self, dy_BSF: jax.Array) -> jax.Array | None:
        """Gradient of the input biases, fp32, in their own order; ``None`` without biases."""
        if self.b_in is None:
            return None
        sums = dict(zip(self.groups[self.w_in].members, self._split_vector(dy_BSF.astype(jnp.float32).sum((0, 1))), strict=True))
        return jnp.concatenate([sums[name.removesuffix("_bias")] for name in self.groups[self.b_in].members])

    @property
    def _rotary(self) -> Rotary | None:
        model = self.model
        turns = model.position == "rotary" and (model.rotary_layers == "all" or self.window is not None)
        return Rotary(model.rotary_base, model.rotary_dim) if turns else None

    def _heads(self, q: jax.Array, k: jax.Array, v: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
        heads = split_heads((q, k, v), rows.positions_BS, head_dim=self.model.head_dim, rotary=self._rotary)
        q, k, v = (self._to_text(x) for x in heads)
        return q, k, v

    def _to_text(self, x: jax.Array) -> jax.Array:
        return self.order.to_text(x) if self.order else x

    def _from_text(self, x: jax.Array) -> jax.Array:
        return self.order.from_text(x) if self.order else x

    def _split(self, y_BSF: jax.Array) -> dict[str, jax.Array]:
        return dict(zip(self.groups[self.w_in].members, self._cut(y_BSF, self.groups[self.w_in]), strict=True))

    def _split_vector(self, sums_F: jax.Array) -> list[jax.Array]:
        return self._cut(sums_F, self.groups[self.w_in])

    def _cut(self, value: jax.Array, group: FusedGroup) -> list[jax.Array]:
        # not slices: their gradients are padded and added up, those of a split are laid side by side
        return list(jax.lax.split(value, [self.columns[member] for member in group.members], axis=value.ndim - 1))

    def _cut_middle(self, dz_BSG: jax.Array) -> tuple[jax.Array, jax.Array]:
        width = self.columns["q"] if self.attends else 0
        return dz_BSG[..., :width], dz_BSG[..., width:]

    def _vector(self, weights: Weights, name: str) -> jax.Array | None:
        members = self.groups["vectors"].members
        return weights["vectors"][:, members.index(name)] if name in members else None


_BRANCHES = {
    "parallel": (("", "w_in", "w_out", ("o_bias", "down_bias")),),
    "serial": (("", "w_qkv", "w_o", ("o_bias",)), ("mlp_", "w_mlp", "w_down", ("down_bias",))),
}
"""Per kind of block, its branches in order: prefix of the norm, input and output group, output biases."""


def branches_of(
    model: ModelConfig, columns: Mapping[str, int], operators: Operators, window: int | None, order: TokenOrder | None = None
) -> tuple[Branch, ...]:
    """The branches of one layer of the model's kind of block."""
    return tuple(Branch(model, columns, operators, window, *parts, order=order) for parts in _BRANCHES[model.block])


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero a share ``rate`` of the elements and scale the rest by ``1 / (1 - rate)``; the input when ``key`` is ``None``."""
    if key is None or rate == 0.0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1.0 - rate, x.shape), x / (1.0 - rate), 0).astype(x.dtype)

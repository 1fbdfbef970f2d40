"""The table of logical parameters: one abstract description from which everything else is derived.

Initial values, shardings, the LAMB trust ratios, the decay mask, checkpoints, export and the parameter count all read
this table, so they cannot disagree. A *logical* parameter is what a paper would name: q, k, v, o, up, gate, down, a
norm's scale, a bias, the embedding, the head. How several of them are laid side by side for one large GEMM is a
second, smaller table (`fused_groups`), and nobody but the step's gather and scatter knows of it. No JAX.

Every matrix is stored with its ``embed`` dim first (o and down transposed), or last for the vocabulary tables, so that
ZeRO shards all of them over the same dim and one gather of stacked shards yields the fused GEMM operand.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod, sqrt
from typing import Literal

from megascale_jax import axes
from megascale_jax.config.schema import ModelConfig


@dataclass(frozen=True)
class ParameterSpec:
    """One logical parameter of a layer, or of the whole model."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    per_layer: bool
    init: Literal["normal", "zeros", "ones"]
    std: float = 0.0

    @property
    def size(self) -> int:
        """Elements of one layer's copy."""
        return prod(self.shape)

    def columns(self, shape: tuple[int, ...] | None = None) -> int:
        """Width of the parameter in a fused group: every dim but ``embed``; ``shape`` is a rank's own, default the whole."""
        sizes = zip(self.dims, shape or self.shape, strict=True)
        return prod(size for dim, size in sizes if dim != axes.EMBED)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices and tables, not to norms and biases."""
        return self.init == "normal"


def parameter_specs(model: ModelConfig) -> dict[str, ParameterSpec]:
    """Every logical parameter of the model by name, shapes without padding, in a fixed order.

    Output projections (o, down) start at ``initializer_std / sqrt(2 * num_layers)``, all others at ``initializer_std``.
    """
    width, hidden, kv = model.head_dim, model.hidden_size, model.kv_heads
    std, out_std = model.initializer_std, model.initializer_std / sqrt(2 * model.num_layers)
    q_dims, kv_dims = (axes.EMBED, axes.HEADS, axes.HEAD_DIM), (axes.EMBED, axes.KV_HEADS, axes.HEAD_DIM)
    specs: list[ParameterSpec] = []

    def matrix(name: str, dims: tuple[str, ...], shape: tuple[int, ...], deviation: float = std, per_layer: bool = True) -> None:
        specs.append(ParameterSpec(name, dims, shape, per_layer, "normal", deviation))

    def vector(
        name: str, dims: tuple[str, ...], shape: tuple[int, ...], init: Literal["zeros", "ones"] = "zeros", per_layer: bool = True
    ) -> None:
        specs.append(ParameterSpec(name, dims, shape, per_layer, init))

    def norm(prefix: str, per_layer: bool = True) -> None:
        vector(f"{prefix}norm_scale", (axes.EMBED,), (hidden,), "ones", per_layer)
        if model.norm == "layernorm" and model.norm_bias:
            vector(f"{prefix}norm_bias", (axes.EMBED,), (hidden,), "zeros", per_layer)

    matrix("embedding", (axes.VOCAB, axes.EMBED), (model.vocab_size, hidden), per_layer=False)
    if model.position == "learned":
        matrix("position", (axes.POSITION, axes.EMBED), (model.sequence_length, hidden), per_layer=False)
    norm("")
    matrix("q", q_dims, (hidden, model.num_heads, width))
    matrix("k", kv_dims, (hidden, kv, width))
    matrix("v", kv_dims, (hidden, kv, width))
    matrix("o", q_dims, (hidden, model.num_heads, width), out_std)
    if model.attention_bias:
        vector("q_bias", q_dims[1:], (model.num_heads, width))
        vector("k_bias", kv_dims[1:], (kv, width))
        vector("v_bias", kv_dims[1:], (kv, width))
        vector("o_bias", (axes.EMBED,), (hidden,))
    if model.block == "serial":
        norm("mlp_")
    gated = model.activation == "swiglu"
    for name in ("gate", "up") if gated else ("up",):
        matrix(name, (axes.EMBED, axes.MLP), (hidden, model.mlp_size))
    matrix("down", (axes.EMBED, axes.MLP), (hidden, model.mlp_size), out_std)
    if model.mlp_bias:
        for name in ("gate", "up") if gated else ("up",):
            vector(f"{name}_bias", (axes.MLP,), (model.mlp_size,))
        vector("down_bias", (axes.EMBED,), (hidden,))
    norm("final_", per_layer=False)
    if not model.tied_head:
        matrix("head", (axes.VOCAB, axes.EMBED), (model.vocab_size, hidden), per_layer=False)
    if model.head_bias:
        vector("head_bias", (axes.VOCAB,), (model.vocab_size,), per_layer=False)
    return {spec.name: spec for spec in specs}


_FUSED_WEIGHTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "parallel": {"w_in": ("q", "k", "v", "gate", "up"), "w_out": ("o", "down")},
    "serial": {"w_qkv": ("q", "k", "v"), "w_o": ("o",), "w_mlp": ("gate", "up"), "w_down": ("down",)},
}
_FUSED_BIASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "parallel": {"b_in": ("q_bias", "k_bias", "v_bias", "gate_bias", "up_bias")},
    "serial": {"b_qkv": ("q_bias", "k_bias", "v_bias"), "b_mlp": ("gate_bias", "up_bias")},
}
_STREAM_VECTORS = ("norm_scale", "norm_bias", "mlp_norm_scale", "mlp_norm_bias", "o_bias", "down_bias")


@dataclass(frozen=True)
class FusedGroup:
    """Logical parameters of one layer, or of the model's ends, that the step keeps side by side.

    ``members`` are laid along the last dim, each flattened to columns; with ``has_embed`` the first dim is ``embed``.
    """

    name: str
    members: tuple[str, ...]
    has_embed: bool


def fused_groups(model: ModelConfig) -> tuple[FusedGroup, ...]:
    """How one layer's logical parameters lie in the step: each layer parameter in exactly one group.

    The parallel block has one input and one output GEMM, the serial block two of each. ``vectors`` holds what acts on
    the residual stream (norms and output biases), one column each.
    """
    specs = parameter_specs(model)
    tables = (
        (_FUSED_WEIGHTS[model.block], True),
        (_FUSED_BIASES[model.block], False),
        ({"vectors": _STREAM_VECTORS}, True),
    )
    groups = (
        FusedGroup(name, tuple(m for m in members if m in specs), has_embed)
        for table, has_embed in tables
        for name, members in table.items()
    )
    return tuple(group for group in groups if group.members)


def end_groups(model: ModelConfig) -> tuple[FusedGroup, ...]:
    """The same for what belongs to no layer: the tables and the head's bias alone, the final norm's vectors together."""
    specs = parameter_specs(model)
    final = tuple(name for name in ("final_norm_scale", "final_norm_bias") if name in specs)
    tables = tuple(FusedGroup(name, (name,), True) for name in ("embedding", "position", "head") if name in specs)
    biases = (FusedGroup("head_bias", ("head_bias",), False),) if model.head_bias else ()
    return (*tables, FusedGroup("final_vectors", final, True), *biases)

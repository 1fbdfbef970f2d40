"""The Hugging Face architectures that our model can be, each a table: its settings, its tensors, and what it cannot express.

    cohere2   parallel block, one norm without a shift, SwiGLU; windowed layers with rotary positions, full ones without
    gptj      parallel block, GeLU, rotary positions on a part of each head, no biases in attention
    phi       parallel block, GeLU, rotary positions on a part of each head, biases everywhere
    llama     serial block, RMSNorm, SwiGLU, rotary positions
    gpt2      serial block, LayerNorm, GeLU, learned positions

A conversion is exact: biases that an architecture always has and our model lacks are written as zeros, and what cannot be
neutralised is refused. `settings.py` reads and writes ``config.json`` by these tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from megascale_jax.checkpoint.huggingface.tensors import Tensor

_NEW_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "mlp_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "sequence_length": "max_position_embeddings",
    "norm_epsilon": "layer_norm_eps",
    "initializer_std": "initializer_range",
    "tied_head": "tie_word_embeddings",
}
_OLD_NAMES = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_heads": "n_head",
    "mlp_size": "n_inner",
    "vocab_size": "vocab_size",
    "sequence_length": "n_positions",
    "norm_epsilon": "layer_norm_epsilon",
    "initializer_std": "initializer_range",
    "tied_head": "tie_word_embeddings",
}
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    ``names``: our field by field under their name; ``fixed``: fields of ours that have one value; ``expected``: settings of theirs
    that have one meaning with us, by name the values that have it, the first of them written; ``defaults``: what their
    settings are where a file leaves them out. ``rotary``: whether rotary positions turn none of a head, all, or a part.
    ``base``: prefix of the tensors' names, which files of the base model leave out.
    """

    name: str
    class_name: str
    names: Mapping[str, str]
    fixed: Mapping[str, Any]
    expected: Mapping[str, tuple[Any, ...]]
    defaults: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    rotary: Literal["none", "part", "whole"]
    base: str
    turns_halves: bool = False
    has_windows: bool = False
    has_head_size: bool = False
    written: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Further settings that a file gets: what their defaults would make another model."""


def _linear(name: str, *members: str, bias: Literal["own", "always", "never"] = "never", is_conv: bool = False) -> tuple[Tensor, ...]:
    weight = Tensor(f"{name}.weight", members, is_conv=is_conv)
    if bias == "never":
        return (weight,)
    return weight, Tensor(f"{name}.bias", tuple(f"{member}_bias" for member in members), is_filled=bias == "always")


def _norm(name: str, prefix: str, has_bias: bool) -> tuple[Tensor, ...]:
    scale = Tensor(f"{name}.weight", (f"{prefix}norm_scale",))
    return (scale, Tensor(f"{name}.bias", (f"{prefix}norm_bias",), is_filled=True)) if has_bias else (scale,)


def _head(has_bias: bool) -> tuple[Tensor, ...]:
    weight = Tensor("lm_head.weight", ("head",))
    return (weight, Tensor("lm_head.bias", ("head_bias",), is_filled=True)) if has_bias else (weight,)


_LAYER = "model.layers.{layer}."
_OLD_LAYER = "transformer.h.{layer}."
_SWIGLU = {"activation": "swiglu", "position": "rotary"}
_GELU = {"norm": "layernorm", "activation": "gelu"}

COHERE2 = Architecture(
    name="cohere2",
    class_name="Cohere2ForCausalLM",
    names=_NEW_NAMES | {"attention_bias": "attention_bias"},
    fixed={"block": "parallel", "norm": "layernorm", "norm_bias": False, "mlp_bias": False, "head_bias": False} | _SWIGLU,
    expected={"hidden_act": ("silu",)},
    defaults={
        "tie_word_embeddings": True,
        "attention_bias": False,
        "num_key_value_heads": None,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    tensors=(
        Tensor("model.embed_tokens.weight", ("embedding",)),
        *_norm(f"{_LAYER}input_layernorm", "", has_bias=False),
        *(tensor for name in "qkvo" for tensor in _linear(f"{_LAYER}self_attn.{name}_proj", name, bias="own")),
        *(tensor for name in ("gate", "up", "down") for tensor in _linear(f"{_LAYER}mlp.{name}_proj", name)),
        *_norm("model.norm", "final_", has_bias=False),
        *_head(has_bias=False),
    ),
    rotary="whole",
    base="model.",
    has_windows=True,
    written={"logit_scale": 1.0},
)
GPTJ = Architecture(
    name="gptj",
    class_name="GPTJForCausalLM",
    names=_OLD_NAMES,
    fixed={"block": "parallel", "position": "rotary", "rotary_base": 10000.0, "attention_bias": False} | _GELU,
    expected={"activation_function": _TANH_GELU},
    defaults={
        "tie_word_embeddings": False,
        "n_inner": None,
        "n_positions": 2048,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "activation_function": "gelu_new",
        "rotary_dim": 64,
    },
    tensors=(
        Tensor("transformer.wte.weight", ("embedding",)),
        *_norm(f"{_OLD_LAYER}ln_1", "", has_bias=True),
        *(tensor for name in "qkv" for tensor in _linear(f"{_OLD_LAYER}attn.{name}_proj", name)),
        *_linear(f"{_OLD_LAYER}attn.out_proj", "o"),
        *_linear(f"{_OLD_LAYER}mlp.fc_in", "up", bias="always"),
        *_linear(f"{_OLD_LAYER}mlp.fc_out", "down", bias="always"),
        *_norm("transformer.ln_f", "final_", has_bias=True),
        *_head(has_bias=True),
    ),
    rotary="part",
    base="transformer.",
)
PHI = Architecture(
    name="phi",
    class_name="PhiForCausalLM",
    names=_NEW_NAMES,
    fixed={"block": "parallel", "position": "rotary"} | _GELU,
    expected={"hidden_act": _TANH_GELU, "qk_layernorm": (False,)},
    defaults={
        "tie_word_embeddings": False,
        "num_key_value_heads": None,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu_new",
        "qk_layernorm": False,
        "partial_rotary_factor": 0.5,
    },
    tensors=(
        Tensor("model.embed_tokens.weight", ("embedding",)),
        *_norm(f"{_LAYER}input_layernorm", "", has_bias=True),
        *(tensor for name in "qkv" for tensor in _linear(f"{_LAYER}self_attn.{name}_proj", name, bias="always")),
        *_linear(f"{_LAYER}self_attn.dense", "o", bias="always"),
        *_linear(f"{_LAYER}mlp.fc1", "up", bias="always"),
        *_linear(f"{_LAYER}mlp.fc2", "down", bias="always"),
        *_norm("model.final_layernorm", "final_", has_bias=True),
        *_head(has_bias=True),
    ),
    rotary="part",
    base="model.",
    turns_halves=True,
)
LLAMA = Architecture(
    name="llama",
    class_name="LlamaForCausalLM",
    names=_NEW_NAMES | {"norm_epsilon": "rms_norm_eps", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    fixed={"block": "serial", "norm": "rmsnorm", "norm_bias": False, "head_bias": False} | _SWIGLU,
    expected={"hidden_act": ("silu",)},
    defaults={
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "head_dim": None,
    },
    tensors=(
        Tensor("model.embed_tokens.weight", ("embedding",)),
        *_norm(f"{_LAYER}input_layernorm", "", has_bias=False),
        *(tensor for name in "qkvo" for tensor in _linear(f"{_LAYER}self_attn.{name}_proj", name, bias="own")),
        *_norm(f"{_LAYER}post_attention_layernorm", "mlp_", has_bias=False),
        *(tensor for name in ("gate", "up", "down") for tensor in _linear(f"{_LAYER}mlp.{name}_proj", name, bias="own")),
        *_norm("model.norm", "final_", has_bias=False),
        *_head(has_bias=False),
    ),
    rotary="whole",
    base="model.",
    turns_halves=True,
    has_head_size=True,
)
GPT2 = Architecture(
    name="gpt2",
    class_name="GPT2LMHeadModel",
    names=_OLD_NAMES,
    fixed={"block": "serial", "position": "learned", "head_bias": False} | _GELU,
    expected={
        "activation_function": _TANH_GELU,
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    defaults={
        "tie_word_embeddings": True,
        "n_inner": None,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    tensors=(
        Tensor("transformer.wte.weight", ("embedding",)),
        Tensor("transformer.wpe.weight", ("position",)),
        *_norm(f"{_OLD_LAYER}ln_1", "", has_bias=True),
        *_linear(f"{_OLD_LAYER}attn.c_attn", "q", "k", "v", bias="always", is_conv=True),
        *_linear(f"{_OLD_LAYER}attn.c_proj", "o", bias="always", is_conv=True),
        *_norm(f"{_OLD_LAYER}ln_2", "mlp_", has_bias=True),
        *_linear(f"{_OLD_LAYER}mlp.c_fc", "up", bias="always", is_conv=True),
        *_linear(f"{_OLD_LAYER}mlp.c_proj", "down", bias="always", is_conv=True),
        *_norm("transformer.ln_f", "final_", has_bias=True),
        *_head(has_bias=False),
    ),
    rotary="none",
    base="transformer.",
    written={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
)
ARCHITECTURES: Mapping[str, Architecture] = {one.name: one for one in (COHERE2, GPTJ, PHI, LLAMA, GPT2)}
"""By ``model_type``, in the order in which one that fits is looked for."""

from collections import Counter
from itertools import product
from math import sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_jax import axes
from megascale_jax.config.schema import ModelConfig
from megascale_jax.model.parameters import fused_groups, parameter_specs

models = st.builds(
    ModelConfig,
    num_layers=st.integers(1, 6),
    hidden_size=st.just(24),
    num_heads=st.just(6),
    num_kv_heads=st.sampled_from([None, 1, 2, 3]),
    head_size=st.sampled_from([None, 8]),
    mlp_size=st.integers(1, 50),
    vocab_size=st.integers(1, 300),
    sequence_length=st.just(16),
    block=st.sampled_from(["parallel", "serial"]),
    norm=st.sampled_from(["layernorm", "rmsnorm"]),
    norm_bias=st.booleans(),
    activation=st.sampled_from(["gelu", "swiglu"]),
    position=st.sampled_from(["rotary", "learned"]),
    attention_bias=st.booleans(),
    mlp_bias=st.booleans(),
    tied_head=st.booleans(),
)


@given(models)
def test_every_layer_parameter_lies_in_exactly_one_fused_group(model):
    specs = parameter_specs(model)
    members = Counter(member for group in fused_groups(model) for member in group.members)
    assert members == Counter(name for name, spec in specs.items() if spec.per_layer)


@given(models)
def test_members_of_a_group_agree_on_the_embed_dim(model):
    specs = parameter_specs(model)
    for group in fused_groups(model):
        assert {specs[member].dims[0] == axes.EMBED for member in group.members} == {group.has_embed}


@given(models)
def test_sizes_follow_the_dims(model):
    extent = {
        axes.EMBED: model.hidden_size,
        axes.HEADS: model.num_heads,
        axes.KV_HEADS: model.kv_heads,
        axes.HEAD_DIM: model.head_dim,
        axes.MLP: model.mlp_size,
        axes.VOCAB: model.vocab_size,
        axes.POSITION: model.sequence_length,
    }
    for name, spec in parameter_specs(model).items():
        assert spec.name == name
        assert spec.shape == tuple(extent[dim] for dim in spec.dims)


@given(models)
def test_decay_is_for_matrices_and_tables_only(model):
    for name, spec in parameter_specs(model).items():
        assert spec.decays == (not name.endswith(("_bias", "norm_scale")))


@pytest.mark.parametrize(("block", "activation", "tied"), list(product(("parallel", "serial"), ("gelu", "swiglu"), (True, False))))
def test_the_table_holds_what_the_configuration_asks_for(block, activation, tied):
    shape: dict[str, Any] = {"num_layers": 8, "hidden_size": 24, "num_heads": 6, "mlp_size": 40, "vocab_size": 61, "sequence_length": 16}
    specs = parameter_specs(ModelConfig(**shape, block=block, activation=activation, tied_head=tied))
    assert ("mlp_norm_scale" in specs) == (block == "serial")
    assert ("gate" in specs) == (activation == "swiglu")
    assert ("head" in specs) == (not tied)
    assert {name: spec.std for name, spec in specs.items() if spec.decays and spec.std != 0.02} == {
        "o": 0.02 / sqrt(16),
        "down": 0.02 / sqrt(16),
    }

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_jax.config.load import load_experiment
from megascale_jax.config.schema import ModelConfig
from megascale_jax.model.flops import attention_pairs, count_parameters, flops_per_row, flops_per_token, mfu, parameter_breakdown

A100_TFLOPS = 312
# MegaScale paper, Table 2, the rows of Megatron-LM: batch, GPUs, seconds per step, printed MFU in per cent.
MEGATRON_ROWS = [
    (768, 256, 40.0, 53.0),
    (768, 512, 21.2, 49.9),
    (768, 768, 15.2, 46.7),
    (768, 1024, 11.9, 44.7),
    (6144, 3072, 29.02, 48.7),
    (6144, 6144, 14.78, 47.8),
    (6144, 8192, 12.24, 43.3),
    (6144, 12288, 8.57, 41.2),
]


def gpt(**values: Any) -> ModelConfig:
    """The paper's 175B with full attention and a serial block, as Megatron-LM ran it, with fields changed."""
    base = {"num_layers": 96, "hidden_size": 12288, "num_heads": 128, "mlp_size": 49152, "vocab_size": 64000, "sequence_length": 2048}
    return ModelConfig(**({**base, "block": "serial"} | values))


@pytest.mark.parametrize(("batch", "gpus", "step_s", "printed"), MEGATRON_ROWS)
def test_paper_convention_reproduces_table_2_within_0_3_points(batch, gpus, step_s, printed):
    assert 100 * mfu(gpt(), batch * 2048 / step_s, gpus, A100_TFLOPS) == pytest.approx(printed, abs=0.3)


@given(
    layers=st.integers(1, 200),
    heads=st.integers(1, 64),
    width=st.integers(1, 64),
    vocab=st.integers(1, 10**6),
    length=st.integers(1, 10**5),
)
def test_gpt_shapes_give_the_closed_formula_exactly(layers, heads, width, vocab, length):
    hidden = heads * width
    shape = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "mlp_size": 4 * hidden, "vocab_size": vocab}
    model = gpt(**shape, sequence_length=length)
    # 72 l h^2 (1 + s / 6h + V / 12lh), multiplied out
    assert flops_per_row(model) == length * (72 * layers * hidden**2 + 12 * layers * hidden * length + 6 * hidden * vocab)


@given(st.integers(1, 40), st.lists(st.integers(1, 50) | st.just("full"), min_size=1, max_size=4), st.integers(1, 5))
def test_pairs_equal_a_count_of_every_row(length, pattern, layers):
    model = gpt(num_layers=layers, sequence_length=length, window=tuple(pattern))
    chosen = [pattern[layer % len(pattern)] for layer in range(layers)]
    widths = [length if window == "full" else window for window in chosen]
    assert attention_pairs(model, "causal") == sum(
        sum(1 for key in range(row + 1) if row - key < w) for w in widths for row in range(length)
    )
    assert attention_pairs(model, "full") == sum(length * min(w, length) for w in widths)


def test_paper_windowed_model_has_the_flops_its_mfu_implies():
    # MFU x peak / tokens/s of the eight MegaScale rows of Table 2 is 1.066e12 within half a per cent
    assert flops_per_token(load_experiment("gpt-175b").model) == pytest.approx(1.066e12, rel=0.005)


def test_head_counts_the_same_when_it_is_tied():
    assert flops_per_row(gpt(tied_head=True)) == flops_per_row(gpt())
    assert count_parameters(gpt()) - count_parameters(gpt(tied_head=True)) == 64000 * 12288


def test_lookups_norms_and_biases_cost_nothing():
    plain = gpt(norm="rmsnorm", norm_bias=False)
    assert flops_per_row(gpt(position="learned", attention_bias=True, mlp_bias=True)) == flops_per_row(plain)


def test_gate_and_grouped_heads_are_counted():
    length, hidden = 2048, 12288
    assert flops_per_row(gpt(activation="swiglu")) - flops_per_row(gpt()) == 6 * length * 96 * hidden * 49152
    assert flops_per_row(gpt()) - flops_per_row(gpt(num_kv_heads=8)) == 6 * length * 96 * hidden * 2 * (128 - 8) * 96


def test_counts_equal_hand_numbers():
    # 12 l h^2 + 2 V h matrices, 4 h a layer and 2 h at the end for layernorms
    assert count_parameters(gpt()) == 12 * 96 * 12288**2 + 2 * 64000 * 12288 + (4 * 96 + 2) * 12288
    quickstart = parameter_breakdown(load_experiment("quickstart").model)
    assert quickstart == {
        "embedding": 32896,
        "norm_scale": 512,
        "norm_bias": 512,
        "q": 65536,
        "k": 65536,
        "v": 65536,
        "o": 65536,
        "up": 262144,
        "down": 262144,
        "final_norm_scale": 128,
        "final_norm_bias": 128,
        "head": 32896,
    }


def test_names_tell_the_sizes():
    sizes = {name: count_parameters(load_experiment(name).model) / 1e9 for name in ("gpt-1b", "gpt-13b", "gpt-175b", "gpt-530b")}
    assert {name: round(size, 1) for name, size in sizes.items()} == {"gpt-1b": 1.5, "gpt-13b": 13.2, "gpt-175b": 175.5, "gpt-530b": 531.1}

"""Models that transformers saved (`fixtures/huggingface`, made once) as checkpoints of ours, and back: logits, bits, refusals."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megascale_jax.checkpoint.huggingface.files import INDEX, TensorFolder, read_config
from megascale_jax.checkpoint.huggingface.settings import choose, from_settings, to_settings
from megascale_jax.checkpoint.huggingface.transfer import check_tensors
from megascale_jax.checkpoint.inspect import verify, whole_arrays
from megascale_jax.comm.storage import Storage
from megascale_jax.errors import CheckpointError, UsageError
from tests.build import experiment
from tests.checkpoint.huggingface_models import (
    compiled_logits,
    difference,
    exported,
    imported,
    reference_logits,
    tensors_of,
    tolerance,
)
from tests.checkpoint.states import plan, published

FIXTURES = Path(__file__).with_name("fixtures") / "huggingface"
NAMES = ("cohere2", "gptj", "phi", "llama", "gpt2")
SAME_SETTING = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("n_embd", "n_layer", "n_head", "n_positions", "max_position_embeddings", "rotary_dim", "hidden_act", "activation_function"),
    *("layer_norm_eps", "rms_norm_eps", "layer_norm_epsilon", "rope_parameters", "layer_types", "sliding_window", "tie_word_embeddings"),
    *("attention_bias", "mlp_bias", "qk_layernorm", "model_type", "architectures", "initializer_range", "partial_rotary_factor"),
    *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention", "dtype"),
}
PARALLEL = {"hidden_size": 32, "head_size": None, "window": "full"}
OURS = {
    "cohere2": {"norm_bias": False, "activation": "swiglu", "window": (3, "full"), "rotary_layers": "windowed", "attention_bias": True},
    "gptj": {"rotary_size": 2, "head_bias": True},
    "phi": {"rotary_size": 2, "norm_bias": False, "attention_bias": True, "num_kv_heads": 2},
    "llama": {"block": "serial", "norm": "rmsnorm", "norm_bias": False, "activation": "swiglu", "num_kv_heads": 2, "mlp_bias": True},
    "gpt2": {"block": "serial", "position": "learned", "tied_head": True},
}


def changed(name, folder, tensors=None, **settings):
    """A copy of a fixture with other settings and tensors; ``None`` removes one."""
    shutil.copytree(FIXTURES / name, folder)
    config = {k: v for k, v in (json.loads((folder / "config.json").read_text()) | settings).items() if v != "removed"}
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        content = {k: v for k, v in (load_file(folder / "model.safetensors") | tensors).items() if v is not None}
        save_file(content, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_an_imported_model_are_those_of_transformers(name, tmp_path):
    config = imported(FIXTURES / name, tmp_path / "checkpoints")
    expected = load_file(FIXTURES / name / "expected.safetensors")
    tokens, logits = expected["input_ids"][0], expected["logits"][0].astype(np.float64)
    assert difference(reference_logits(config, tmp_path / "checkpoints", tokens), logits) < tolerance(config.model)
    assert difference(compiled_logits(config, tmp_path / "checkpoints", tokens), logits) < tolerance(config.model)
    assert not verify(Storage(tmp_path / "checkpoints"), 0).problems


def test_the_cohere2_fixture_has_what_is_hard():
    model = from_settings(read_config(FIXTURES / "cohere2")).model
    assert model.window == (5, 5, 5, "full") and model.rotary_layers == "windowed" and model.sequence_length > 3 * 5


@pytest.mark.parametrize("name", NAMES)
def test_export_after_import_gives_the_same_bits_and_an_equivalent_config(name, tmp_path):
    imported(FIXTURES / name, tmp_path / "checkpoints")
    exported(tmp_path / "checkpoints", tmp_path / "out")
    before, after = tensors_of(FIXTURES / name), tensors_of(tmp_path / "out")
    if name == "cohere2":  # its logit scale is a power of two, and in the norm's scale now
        before["model.norm.weight"] *= 0.25
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        np.testing.assert_array_equal(after[tensor].view(np.uint32), value.view(np.uint32), err_msg=tensor)
    old, new = read_config(FIXTURES / name), read_config(tmp_path / "out")
    kept = SAME_SETTING & old.keys() - ({"head_dim"} if name == "cohere2" else set())  # there always hidden_size / num_attention_heads
    assert {key: old[key] for key in kept} == {key: new[key] for key in kept}
    again = from_settings(new)
    assert again.model == from_settings(old).model and again.logit_scale == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_our_models_go_out_from_any_mesh_and_come_back(name, tmp_path):
    """Biases that our model lacks are zeros there, and one block or many make no difference."""
    for folder, mesh in (("one", {"virtual_stages": 1}), ("many", {"pipe": 2, "data": 2, "tensor": 2})):
        published(tmp_path / folder, plan(**mesh, **(PARALLEL | OURS[name])))
        exported(tmp_path / folder, tmp_path / f"{folder}-out", step=7, limit_bytes=1 << 30 if folder == "one" else 9000)
    one, many = tensors_of(tmp_path / "one-out"), tensors_of(tmp_path / "many-out")
    assert one.keys() == many.keys() and all(np.array_equal(one[tensor], many[tensor]) for tensor in one)
    assert (tmp_path / "many-out" / INDEX).is_file() and not (tmp_path / "one-out" / INDEX).exists()
    assert read_config(tmp_path / "one-out")["model_type"] == name
    config = imported(tmp_path / "many-out", tmp_path / "back")
    own = plan(**(PARALLEL | OURS[name])).experiment
    mine, theirs = (dict(whole_arrays(Storage(tmp_path / f), s, "params.")) for f, s in (("one", 7), ("back", 0)))
    assert all(np.array_equal(theirs[parameter], value) for parameter, value in mine.items())
    assert all(parameter.endswith("_bias") and not theirs[parameter].any() for parameter in theirs.keys() - mine.keys())
    tokens = np.random.default_rng(0).integers(0, own.model.vocab_size, own.model.sequence_length)
    got, expected = reference_logits(config, tmp_path / "back", tokens), reference_logits(own, tmp_path / "one", tokens, step=7)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_bfloat16_is_rounded_once_and_fp32_is_not(tmp_path):
    imported(FIXTURES / "phi", tmp_path / "checkpoints")
    files = exported(tmp_path / "checkpoints", tmp_path / "out", dtype="bfloat16", limit_bytes=4000)
    assert len(files) > 2 and read_config(tmp_path / "out")["dtype"] == "bfloat16"
    before, after = tensors_of(FIXTURES / "phi"), tensors_of(tmp_path / "out")
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=2**-8)
        assert not (after[name].view(np.uint32) & 0xFFFF).any()
    imported(tmp_path / "out", tmp_path / "again")
    exported(tmp_path / "again", tmp_path / "same", dtype="bfloat16")
    same = tensors_of(tmp_path / "same")
    assert all(np.array_equal(same[name], value) for name, value in after.items())


def test_files_of_older_releases_are_read(tmp_path):
    rope = {"rope_parameters": "removed", "rope_theta": 500.0}
    assert from_settings(read_config(changed("llama", tmp_path / "llama", **rope))).model.rotary_base == 500.0
    scaling = {"rope_parameters": "removed", "rope_scaling": None, "partial_rotary_factor": 0.25}
    assert from_settings(read_config(changed("phi", tmp_path / "phi", **scaling))).model.rotary_size == 2
    pattern = {"layer_types": "removed", "sliding_window_pattern": 2}
    assert from_settings(read_config(changed("cohere2", tmp_path / "cohere2", **pattern))).model.window == (5, "full")
    bare = changed("gpt2", tmp_path / "gpt2")
    content = {name.removeprefix("transformer."): value for name, value in load_file(bare / "model.safetensors").items()}
    save_file(content | {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)}, bare / "model.safetensors")
    imported(bare, tmp_path / "bare")
    imported(FIXTURES / "gpt2", tmp_path / "full")
    bare_arrays, full_arrays = (dict(whole_arrays(Storage(tmp_path / f), 0, "params.")) for f in ("bare", "full"))
    assert all(np.array_equal(bare_arrays[name], value) for name, value in full_arrays.items())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("cohere2", {"model_type": "cohere"}, "model_type is 'cohere'; expected one of cohere2, gptj, phi, llama, gpt2"),
        ("cohere2", {"sliding_window": None}, "sliding_window is null"),
        ("cohere2", {"layer_types": ["full_attention"] * 4}, "no layer knows positions"),
        ("cohere2", {"layer_types": ["chunked_attention"] * 4}, "layer_types is"),
        ("cohere2", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ("gptj", {"activation_function": "gelu"}, "activation_function is 'gelu', expected 'gelu_new' or 'gelu_pytorch_tanh'"),
        ("gptj", {"rotary_dim": None}, "rotary_dim is None"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm is True, expected False"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "expected those of rope_type 'default'"),
        (
            "llama",
            {"rope_parameters": "removed", "rope_scaling": {"type": "linear", "factor": 2.0}},
            "expected those of rope_type 'default'",
        ),
        ("llama", {"hidden_size": "removed"}, "lacks hidden_size"),
        ("llama", {"hidden_size": 0}, "hidden_size: Input should be greater than or equal to 1, got 0"),
        ("llama", {"num_attention_heads": 0}, "config.json of llama is no model"),
        ("llama", {"hidden_size": "wide"}, "config.json of llama is no model"),
        ("cohere2", {"logit_scale": None}, "config.json of cohere2 is no model"),
        ("llama", {"rms_norm_eps": "small"}, "norm_epsilon"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True, expected False"),
    ],
)
def test_settings_that_our_model_cannot_express_are_refused(name, settings, message, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        from_settings(read_config(changed(name, tmp_path / "model", **settings)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensors", "settings", "message"),
    [
        ("llama", {"lm_head.bias": np.ones(260, np.float32)}, {}, "lm_head.bias: unknown"),
        ("phi", {"lm_head.bias": None}, {}, "lm_head.bias: missing, expected [40]"),
        ("phi", {"model.layers.1.mlp.fc1.weight": np.ones((16, 24), np.float32)}, {}, "fc1.weight: [16, 24], expected [24, 16]"),
        ("phi", {"model.final_layernorm.bias": np.zeros(16, np.float64)}, {}, "final_layernorm.bias: F64, expected F32 or BF16 or F16"),
        ("llama", {"model.layers.0.self_attn.q_norm.weight": np.ones(12, np.float32)}, {}, "q_norm.weight: unknown"),
        ("llama", {}, {"attention_bias": False}, "q_proj.bias: there, but config.json knows no such tensor"),
        ("llama", {}, {"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight: unknown"),
    ],
)
def test_files_that_are_another_model_are_refused(name, tensors, settings, message, tmp_path):
    folder = changed(name, tmp_path / "model", tensors, **settings)
    with TensorFolder(folder) as files, pytest.raises(CheckpointError) as caught:
        check_tensors(from_settings(read_config(folder)), files)
    assert message in str(caught.value)


def test_damaged_and_missing_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_config(tmp_path)
    folder = changed("phi", tmp_path / "model")
    (folder / "model.safetensors").write_bytes((FIXTURES / "phi/model.safetensors").read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="is damaged"):
        TensorFolder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        TensorFolder(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match="has no model-00001-of-00002"):
        TensorFolder(folder)


def test_models_that_fit_no_architecture_are_refused_with_every_reason():
    model = experiment(**PARALLEL, activation="swiglu", num_kv_heads=2).model
    with pytest.raises(UsageError) as caught:
        choose(model, "gptj")
    assert all(text in str(caught.value) for text in ("model.activation is swiglu, expected gelu", "model.num_kv_heads is 2"))
    with pytest.raises(UsageError) as caught:
        choose(model, None)
    assert all(f"- {name}: " in str(caught.value) for name in NAMES)
    with pytest.raises(UsageError, match="expected one of cohere2, gptj, phi, llama, gpt2"):
        choose(model, "bert")
    refused = {
        "cohere2": ({"rotary_layers": "all"}, "model.rotary_layers is all, expected windowed"),
        "gptj": ({"rotary_base": 500.0}, "model.rotary_base is 500.0, expected 10000.0"),
        "phi": ({"window": (3, "full")}, "model.window is 3, expected full"),
        "llama": ({"rotary_size": 2, "head_bias": True}, "model.head_bias is true, expected false; model.rotary_size is 2, expected null"),
        "gpt2": ({"head_size": 8}, "the head width is 8, expected model.hidden_size / model.num_heads = 32 / 8"),
    }
    for name, (change, message) in refused.items():
        with pytest.raises(UsageError) as caught:
            choose(experiment(**(PARALLEL | OURS[name] | change)).model, name)
        assert message in str(caught.value)
    with pytest.raises(UsageError, match="has the sizes 3, 5, expected one"):
        choose(experiment(**(PARALLEL | OURS["cohere2"] | {"window": (3, 5)})).model, "cohere2")


@pytest.mark.parametrize("width", [64, 80, 96, 100, 128])
def test_part_of_a_head_survives_the_share_that_phi_writes(width):
    for size in range(2, width + 1, 2):
        model = experiment(hidden_size=8 * width, head_size=None, window="full", rotary_size=None if size == width else size).model
        settings = to_settings(choose(model, "phi"), model, "float32", None)
        assert int(width * settings["rope_parameters"]["partial_rotary_factor"]) == size
        assert from_settings(settings).model.rotary_size == model.rotary_size

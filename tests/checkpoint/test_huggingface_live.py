"""The same with transformers itself: random models both ways, logits in float32 on the CPU. Skips where torch is not installed.

docs/dependencies.md says how to install it; ``expected.safetensors`` of the fixtures stands in for it elsewhere.
"""

import json

import numpy as np
import pytest

from megascale_jax.data.foreign_tokenizer import write_tokenizer
from megascale_jax.data.tokenizer import train_bpe
from tests.checkpoint.huggingface_models import compiled_logits, difference, exported, imported, reference_logits, tolerance
from tests.checkpoint.states import plan, published
from tests.checkpoint.test_huggingface import NAMES, OURS, PARALLEL

torch = pytest.importorskip("torch", reason="torch and transformers are installed by hand: docs/dependencies.md", exc_type=ImportError)
transformers = pytest.importorskip("transformers", reason="torch and transformers are installed by hand: docs/dependencies.md")
from tests.checkpoint.make_huggingface_fixtures import LENGTH, logits_of, random_model  # noqa: E402

CHANGES = {
    "cohere2": ({"sliding_window": 3, "logit_scale": 1.0, "attention_bias": True}, {"tie_word_embeddings": False, "num_hidden_layers": 8}),
    "gptj": ({"rotary_dim": 8}, {"tie_word_embeddings": True, "n_inner": 40}),
    "phi": ({"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 1.0}}, {"num_key_value_heads": 2}),
    "llama": ({"attention_bias": False, "mlp_bias": True}, {"head_dim": None, "tie_word_embeddings": True, "num_key_value_heads": 2}),
    "gpt2": ({"n_inner": 40}, {"tie_word_embeddings": False}),
}


def tokens_of(vocab_size, length, seed=0):
    return np.random.default_rng(seed).integers(0, vocab_size, length)


def their_logits(folder, tokens):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return logits_of(model, torch.as_tensor(tokens)[None])[0].double().numpy()


@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_imported_models_have_the_logits_of_transformers(name, variant, tmp_path):
    model = random_model(name, seed=variant, **CHANGES[name][variant])
    model.save_pretrained(tmp_path / "model")
    config = imported(tmp_path / "model", tmp_path / "checkpoints")
    tokens = tokens_of(config.model.vocab_size, LENGTH, variant)
    expected = logits_of(model, torch.as_tensor(tokens)[None])[0].double().numpy()
    assert difference(reference_logits(config, tmp_path / "checkpoints", tokens), expected) < tolerance(config.model)
    assert difference(compiled_logits(config, tmp_path / "checkpoints", tokens), expected) < tolerance(config.model)


@pytest.mark.parametrize("name", NAMES)
def test_exported_models_have_our_logits_in_transformers(name, tmp_path):
    mesh = plan(data=2, tensor=2, **(PARALLEL | OURS[name]))
    model = mesh.experiment.model
    published(tmp_path / "run", mesh)
    exported(tmp_path / "run", tmp_path / "model", step=7, limit_bytes=9000)
    tokens = tokens_of(model.vocab_size, model.sequence_length)
    theirs = their_logits(tmp_path / "model", tokens)
    assert difference(reference_logits(mesh.experiment, tmp_path / "run", tokens, 7), theirs) < tolerance(model)
    assert difference(compiled_logits(mesh.experiment, tmp_path / "run", tokens, 7), theirs) < tolerance(model)


def test_exported_config_keeps_its_meaning_in_transformers(tmp_path):
    for name in NAMES:
        published(tmp_path / name, plan(**(PARALLEL | OURS[name])))
        exported(tmp_path / name, tmp_path / f"{name}-out", step=7)
        written = json.loads((tmp_path / f"{name}-out/config.json").read_text())
        read = transformers.AutoConfig.from_pretrained(tmp_path / f"{name}-out").to_dict()
        old = {"rope_theta", "partial_rotary_factor"}  # later releases read both in rope_parameters
        assert {key: read[key] for key in written.keys() - old} == {key: value for key, value in written.items() if key not in old}


def test_exported_tokenizer_is_read_by_transformers(tmp_path):
    ours = train_bpe(["def return x = for in"] * 3, 265)
    write_tokenizer(ours, tmp_path, 16)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("return x = def")["input_ids"] == ours.encode("return x = def").tolist()
    assert theirs.eos_token_id == ours.end_of_document and len(theirs) == ours.vocab_size

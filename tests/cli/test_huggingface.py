"""`megascale checkpoint import` and `export`: from a Hugging Face model to text and training, and back."""

import json
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from megascale_jax.checkpoint.inspect import whole_arrays
from megascale_jax.checkpoint.manifest import published_steps
from megascale_jax.cli.main import app
from megascale_jax.comm.storage import Storage
from megascale_jax.config.load import load_experiment
from megascale_jax.data.foreign_tokenizer import END
from megascale_jax.data.tokenizer import load_tokenizer, train_bpe
from megascale_jax.errors import CheckpointError, ConfigError, DataError, RunFolderError, UsageError
from megascale_jax.train.folder import RunFolder
from megascale_jax.train.sample import sample
from tests.checkpoint.states import plan, published

LLAMA = Path(__file__).parents[1] / "checkpoint/fixtures/huggingface/llama"
ONE_DEVICE = ("parallel.pipe=1", "parallel.data=1", "parallel.tensor=1")


def megascale(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def checkpoint(*arguments):
    return megascale("checkpoint", *arguments)


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(0)
    for index in range(20):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        (tmp_path / f"corpus/{index:02}.txt").write_text("".join(rng.choice(["def ", "return ", "x", " = ", "\n"], 60)))
    return tmp_path / "corpus"


def test_an_imported_model_is_sampled_trained_and_exported(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGASCALE_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    training = ("train.steps=2", "train.schedule.warmup_steps=0", "train.global_batch_size=4", "train.logging.tensorboard=false")
    result = checkpoint("import", LLAMA, *ONE_DEVICE, *training, f"train.data.source={corpus}", "-o", run)
    assert result.exit_code == 0 and "LlamaForCausalLM" in result.output, result.output
    folder = RunFolder(run)
    assert folder.latest() == 0 and folder.experiment().name == "run" and folder.experiment().model.rotary_base == 500.0
    arrays = dict(whole_arrays(Storage(run / "checkpoints"), 0, ""))
    assert not any(arrays[name].any() for name in arrays if name.startswith(("first_moment", "second_moment", "step", "updates")))
    assert sample(folder, "def ", num_tokens=3, temperature=0).startswith("def ")
    trained = megascale("train", run / "config.yaml", "--run-folder", run)
    assert trained.exit_code == 0 and "resumed from step 0" in trained.output, trained.output
    assert published_steps(run / "checkpoints")[-1] == 2
    assert checkpoint("export", run, "--step", 0, "-o", tmp_path / "same").exit_code == 0
    result = checkpoint("export", run, "-o", tmp_path / "out", "--architecture", "llama")
    assert result.exit_code == 0 and "token ids are bytes" in result.output, result.output
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 256
    before, same, after = (load_file(place / "model.safetensors") for place in (LLAMA, tmp_path / "same", tmp_path / "out"))
    assert all(np.array_equal(same[name], value) for name, value in before.items())
    assert all(not np.array_equal(after[name], value) for name, value in before.items() if value.ndim > 1)
    files = [tmp_path / "out/model.safetensors", tmp_path / "out/config.json"]
    assert len({stat.S_IMODE(file.stat().st_mode) for file in files}) == 1


def test_tokenizer_goes_out_with_an_end_and_comes_back_without(tmp_path):
    tokenizer = train_bpe(["def return x = for in"] * 3, 265)
    config = {"hidden_size": 32, "head_size": None, "vocab_size": tokenizer.vocab_size, "activation": "swiglu", "norm": "rmsnorm"}
    small = plan(**config, norm_bias=False, block="serial")
    published(tmp_path / "run/checkpoints", small)
    manifest = tmp_path / "run/checkpoints/7/manifest.json"
    outer = json.loads(manifest.read_text())
    assert "no tokenizer was written" in checkpoint("export", tmp_path / "run", "-o", tmp_path / "none").output
    _describe(manifest, outer, tokenizer=tokenizer.save(tmp_path / "run"))
    result = checkpoint("export", tmp_path / "run", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "out/tokenizer.json").read_text())
    assert document["added_tokens"][-1]["content"] == END and document["added_tokens"][-1]["id"] == tokenizer.end_of_document
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == tokenizer.end_of_document
    theirs = load_tokenizer("tokenizer.json", tmp_path / "out")
    np.testing.assert_array_equal(theirs.encode("return x"), tokenizer.encode("return x"))
    result = checkpoint("import", tmp_path / "out", *ONE_DEVICE, "-o", tmp_path / "back")
    assert result.exit_code == 0 and "not trained" not in result.output, result.output
    assert load_tokenizer("tokenizer.json", tmp_path / "back").digest == tokenizer.digest
    assert RunFolder(tmp_path / "back").experiment().train.data.tokenizer == str(tmp_path / "back/tokenizer.json")


def _describe(manifest, outer, **changes):
    import zlib

    document = json.loads(outer["manifest"])
    document["description"] |= changes
    text = json.dumps(document)
    manifest.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "manifest": text}))


def test_a_full_vocabulary_can_be_sampled_only_and_says_so(tmp_path):
    tokenizer = train_bpe(["def return x = for in"] * 3, 261)
    shutil.copytree(LLAMA, tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    result = checkpoint("import", tmp_path / "model", *ONE_DEVICE, "-o", tmp_path / "run")
    assert result.exit_code == 0 and "261 ids, the model knows 260: it can be sampled, not trained" in result.output


def test_impossible_requests_are_refused_and_write_nothing(tmp_path):
    published(tmp_path / "run/checkpoints", plan())
    published(tmp_path / "llama", plan(hidden_size=32, activation="swiglu", norm="rmsnorm", norm_bias=False, block="serial"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    small = shutil.copytree(LLAMA.parent / "phi", tmp_path / "phi")
    broken = shutil.copytree(LLAMA, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    refused = [
        (UsageError, "none of the architectures", ("export", tmp_path / "run", "-o", out)),
        (UsageError, "cannot be exported as phi", ("export", tmp_path / "run", "-o", out, "--architecture", "phi")),
        (UsageError, "--dtype 'int8'", ("export", tmp_path / "run", "-o", out, "--dtype", "int8")),
        (UsageError, "--shard-gib 0", ("export", tmp_path / "run", "-o", out, "--shard-gib", "0")),
        (UsageError, "is no folder", ("export", tmp_path / "nothing", "-o", out)),
        (UsageError, "cannot be written", ("export", tmp_path / "llama", "-o", tmp_path / "full/file/out")),
        (CheckpointError, "is not complete", ("export", tmp_path / "run", "-o", out, "--step", 5)),
        (UsageError, "not an empty folder", ("import", LLAMA, *ONE_DEVICE, "-o", tmp_path / "full")),
        (CheckpointError, "has no config.json", ("import", tmp_path / "full", "-o", out)),
        (UsageError, "too few for bytes", ("import", small, *ONE_DEVICE, "-o", out)),
        (DataError, "no Hugging Face tokenizers JSON", ("import", broken, *ONE_DEVICE, "-o", out)),
        (UsageError, "the model is what is imported", ("import", LLAMA, "model.num_layers=3", "-o", out)),
        (ConfigError, "not divisible", ("import", LLAMA, "parallel.tensor=4", "-o", out)),
    ]
    before = sorted(path.name for path in tmp_path.iterdir())
    for kind, text, arguments in refused:
        error = checkpoint(*arguments).exception
        assert isinstance(error, kind) and text in str(error), (arguments, error)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    with pytest.raises(RunFolderError):
        RunFolder(out).experiment()


def test_what_decides_no_function_may_change_on_import(tmp_path):
    result = checkpoint("import", LLAMA, *ONE_DEVICE, "model.sequence_length=16", "model.dropout=0.1", "-o", tmp_path / "run")
    assert result.exit_code == 0, result.output
    experiment = load_experiment(str(tmp_path / "run/config.yaml"))
    assert (experiment.model.sequence_length, experiment.model.dropout) == (16, 0.1)
    error = checkpoint("import", LLAMA.parent / "gpt2", *ONE_DEVICE, "model.sequence_length=16", "-o", tmp_path / "other").exception
    assert isinstance(error, UsageError) and "only model.dropout=, model.initializer_std may change" in str(error)

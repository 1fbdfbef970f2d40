"""The command as a user runs it: what bad input gets, and a whole small run with its end."""

import json
import sys

import jax
import pytest

from megascale_jax.cli.main import main
from tests.build import TINY

SMALL = [
    *TINY,
    "train.schedule.warmup_steps=2",
    "train.evaluation.every=null",
    "train.checkpoint.every=null",
    "train.sample_prompt=null",
]


@pytest.fixture
def command(monkeypatch, tmp_path, capfd):
    """Runs ``megascale ARGUMENTS`` in an empty folder: exit code, output, and what the folder holds afterwards."""
    jax.devices()  # the command would start JAX with its own number of devices, for all later tests of this process
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MEGASCALE_CACHE", str(tmp_path / "cache"))

    def run(*arguments):
        options = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
        before = {name: getattr(jax.config, name) for name in options}
        monkeypatch.setattr(sys, "argv", ["megascale", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
            raise SystemExit(0)
        for name, value in before.items():
            jax.config.update(name, value)
        captured = capfd.readouterr()
        return end.value.code, captured.out + captured.err, sorted(entry.name for entry in folder.iterdir())

    return run


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["quikstart"], "quickstart"),
        (["quickstart", "train.stepz=3"], "train.steps"),
        (["quickstart", "parallel.tensor=3"], "not divisible"),
        (["quickstart", "model.sequence_length=127"], "sequence_length"),
        (["quickstart", "train.global_batch_size=33"], "32, 40"),
        (["quickstart", "model.window=0"], "model.window"),
        (["quickstart", "train.optimizer.beta2=1.0"], "train.optimizer.beta2"),
        (["gpt-175b"], "no NVIDIA devices here"),
        (["gpt-1b", "system=cpu", "train.data.prepared=nowhere"], "nowhere"),
        (["gpt-1b", "train.data.source=stdlib"], "train.data.prepared=null"),
        (["quickstart", "--run-folder", "short.txt/run"], "short.txt is no writable folder"),
        (["quickstart", "--run-folder", "binary", "--fresh"], "holds 'a.bin'"),
        (["quickstart", "train.data.source=empty"], "empty"),
        (["quickstart", "train.data.source=binary"], "binary"),
        (["quickstart", "train.data.source=short.txt"], "tokens"),
        (["quickstart", "--json", "no/such/folder.json"], "no/such"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_request_ends_with_code_2_and_writes_nothing(command, tmp_path, arguments, text):
    folder = tmp_path / "cwd"
    (folder / "empty").mkdir()
    (folder / "binary").mkdir()
    (folder / "binary" / "a.bin").write_bytes(b"\0\1\2" * 1000)
    (folder / "short.txt").write_text("too short")
    code, output, left = command("train", *arguments)
    assert code == 2, output
    assert "error: " in output and text in output and "Traceback" not in output
    assert left == ["binary", "empty", "short.txt"]


def test_sample_of_a_folder_that_is_no_run_is_refused(command):
    code, output, left = command("sample", "nowhere", "--prompt", "x")
    assert (code, left) == (2, [])
    assert "nowhere is not a run folder" in output


def test_help_names_every_verb(command):
    code, output, _ = command("--help")
    assert code == 0
    assert all(verb in output for verb in ("train", "sample", "compare", "data", "config", "megascale train quickstart"))


def test_run_ends_with_baselines_plot_and_next_commands_then_extends(command, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for index in range(30):
        (corpus / f"{index:02}.txt").write_text(f"line {index} of a small corpus\n" * 30)
    arguments = ["train", "quickstart", *SMALL, f"train.data.source={corpus}"]
    code, output, left = command(*arguments, "train.steps=4", "--json", "out.json", "train.sample_prompt=li")
    assert code == 0, output
    assert left == ["out.json", "runs"]
    summary = json.loads((tmp_path / "cwd/out.json").read_text())
    assert summary == json.loads((tmp_path / "cwd/runs/quickstart/summary.json").read_text())
    assert summary["steps"] == 4 and summary["resumed_from"] is None
    assert 0 < summary["bigram_nats"] < summary["unigram_nats"] < summary["validation_loss"]
    for needle in ("unigram", "bigram", "this model", "loss.png", "continues 'li'", "megascale sample"):
        assert needle in output

    code, output, _ = command(*arguments, "train.steps=4", "train.sample_prompt=li")
    assert code == 0
    assert "has all its 4 steps" in output and "train.steps=8" in output and "--fresh" in output

    code, output, _ = command("sample", "runs/quickstart", "--prompt", "line", "--tokens", "5", "--temperature", "0")
    assert code == 0 and output.startswith("line")

    code, output, _ = command(*arguments, "train.steps=4", "train.seed=1")
    assert code == 2 and "train.seed: 0 -> 1" in output

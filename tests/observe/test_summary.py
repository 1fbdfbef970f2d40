"""`summary.json`: its promised keys, and refusal of what is none."""

import json
from pathlib import Path

import pytest

from megascale_jax.errors import RunFolderError
from megascale_jax.observe.summary import RunSummary, read_summary, write_summary

PROMISED = {"validation_loss", "unigram_nats", "bigram_nats", "tokens_per_s", "mfu", "steps", "wall_s", "resumed_from"}


def a_summary(**changes: object) -> RunSummary:
    values: dict[str, object] = {
        "validation_loss": 1.5, "unigram_nats": 3.3, "bigram_nats": 2.5, "tokens_per_s": 2e4, "mfu": 0.31, "steps": 300, "wall_s": 90.5,
        "resumed_from": None, "parameters": 1000, "peak_flops": 1e11,
    }  # fmt: skip
    return RunSummary.model_validate(values | changes)


def test_promised_keys_come_first_when_written(tmp_path: Path) -> None:
    path = write_summary(tmp_path, a_summary())
    read = json.loads(path.read_text())
    assert set(list(read)[:8]) == PROMISED
    assert {"parameters", "peak_flops", "checkpoint_errors", "skipped_steps"} <= read.keys()
    assert read["resumed_from"] is None and read["steps"] == 300


def test_same_summary_is_read_when_written(tmp_path: Path) -> None:
    summary = a_summary(resumed_from=120, versions={"jax": "1"}, commit="abc", data_digest="d")
    write_summary(tmp_path, summary)
    assert read_summary(tmp_path) == summary


def test_loss_is_null_when_it_is_not_finite(tmp_path: Path) -> None:
    write_summary(tmp_path, a_summary(validation_loss=float("nan")))
    summary = read_summary(tmp_path)
    assert summary is not None and summary.validation_loss is None


def test_none_is_read_when_the_run_has_no_summary(tmp_path: Path) -> None:
    assert read_summary(tmp_path) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"validation_loss": 1.0}', '{"steps": "many"}'])
def test_reason_is_given_when_the_file_is_no_summary(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(RunFolderError, match="no run summary"):
        read_summary(tmp_path)


def test_unknown_key_is_passed_over_when_a_newer_version_wrote_it(tmp_path: Path) -> None:
    path = write_summary(tmp_path, a_summary())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"goodput": 0.9}))
    assert read_summary(tmp_path) == a_summary()

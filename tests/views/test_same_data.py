"""Which runs were measured on the same held-out rows."""

from pathlib import Path
from typing import Any

import pytest

from megascale_jax.errors import RunFolderError
from megascale_jax.views.curve import RunRecord, read_run
from megascale_jax.views.same_data import ConfigDifference, config_differences, held_out_difference
from tests.views.fake_run import make_run


def pair(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> tuple[RunRecord, RunRecord]:
    made = [read_run(make_run(tmp_path / name, steps=5, **options)) for name, options in (("a", a), ("b", b))]
    return made[0], made[1]


def test_differences_are_named_by_field_when_nested() -> None:
    a = {"x": {"y": 1, "z": [1, 2]}, "only_a": 0}
    b = {"x": {"y": 2, "z": [1, 2]}, "w": {"v": "t"}}
    assert config_differences(a, b) == (
        ConfigDifference("only_a", 0, None),
        ConfigDifference("w.v", None, "t"),
        ConfigDifference("x.y", 1, 2),
    )


def test_digest_decides_when_both_runs_have_one(tmp_path: Path) -> None:
    moved = {"config": {"train.data.prepared": "/elsewhere"}}
    assert held_out_difference(*pair(tmp_path / "same", {}, moved)) == (None, None)
    reason, _ = held_out_difference(*pair(tmp_path / "other", {}, {"summary": {"data_digest": "d2"}}))
    assert reason == "the data differs: digest d1 in A, d2 in B"


def test_cross_entropies_decide_when_a_digest_is_missing(tmp_path: Path) -> None:
    none: dict[str, Any] = {"summary": {"data_digest": None}}
    other: dict[str, Any] = {"summary": {"data_digest": None, "bigram_nats": 2.51}}
    assert held_out_difference(*pair(tmp_path / "same", none, {})) == (None, None)
    reason, _ = held_out_difference(*pair(tmp_path / "other", other, {}))
    assert reason is not None and "3.3000 / 2.5100 and 3.3000 / 2.5000" in reason


def test_config_decides_with_a_note_when_a_run_is_not_finished(tmp_path: Path) -> None:
    unfinished: dict[str, Any] = {"finished": False}
    reason, note = held_out_difference(*pair(tmp_path / "same", unfinished, {}))
    assert reason is None and note is not None and "train.data alone" in note
    reason, _ = held_out_difference(*pair(tmp_path / "other", unfinished, {"config": {"train.data.source": "corpus"}}))
    assert reason == "the data differs: train.data.source is 'stdlib' in A, 'corpus' in B"


def test_row_length_is_a_reason_when_it_differs(tmp_path: Path) -> None:
    reason, _ = held_out_difference(*pair(tmp_path, {}, {"config": {"model.sequence_length": 64}}))
    assert reason == "rows have 128 tokens in A and 64 in B, so a prediction sees other contexts"


def test_part_of_the_split_is_a_reason_only_when_the_rows_differ(tmp_path: Path) -> None:
    few = {"batch": 8, "config": {"train.evaluation.batches": 8}}
    many = {"batch": 32, "config": {"train.evaluation.batches": 8}}
    equal = {"batch": 32, "config": {"train.evaluation.batches": 2}}
    assert held_out_difference(*pair(tmp_path / "equal", few, equal)) == (None, None)
    reason, _ = held_out_difference(*pair(tmp_path / "other", few, many))
    assert reason is not None and "A was evaluated on 64 held-out rows, B on 256 held-out rows" in reason
    reason, _ = held_out_difference(*pair(tmp_path / "whole", few, {}))
    assert reason is not None and "B on the whole held-out split" in reason


def test_config_is_refused_when_the_batch_is_missing(tmp_path: Path) -> None:
    a, b = pair(tmp_path, {}, {"config": {"model.sequence_length": "long"}})
    with pytest.raises(RunFolderError, match=r"model\.sequence_length is 'long'"):
        held_out_difference(a, b)


def test_rows_of_the_last_evaluation_are_a_reason_of_their_own(tmp_path: Path) -> None:
    """The judged loss is the one at the end, over ``final_batches``."""
    one = {"batch": 8, "config": {"train.evaluation.batches": 4, "train.evaluation.final_batches": 1}}
    two = {"batch": 8, "config": {"train.evaluation.batches": 4, "train.evaluation.final_batches": 2}}
    reason, _ = held_out_difference(*pair(tmp_path, one, two))
    assert reason is not None and "8 held-out rows, B on 16" in reason and "train.evaluation.final_batches" in reason

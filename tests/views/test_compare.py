"""The verdict, at and around its limits."""

from pathlib import Path
from typing import Any

import pytest

from megascale_jax.views.compare import Against, Comparison, compare_runs
from megascale_jax.views.curve import read_run
from tests.views.fake_run import falling_loss, make_run


def verdict_of(
    tmp_path: Path, a: dict[str, Any] | None = None, b: dict[str, Any] | None = None, tolerance: float = 0.01, against: Against = "tokens"
) -> Comparison:
    run_a, run_b = (read_run(make_run(tmp_path / name, **(options or {}))) for name, options in (("a", a), ("b", b)))
    return compare_runs(run_a, run_b, tolerance=tolerance, against=against)


def test_run_equals_itself_when_nothing_may_differ(tmp_path: Path) -> None:
    comparison = verdict_of(tmp_path, tolerance=0.0)
    assert comparison.verdict == "equivalent"
    assert comparison.validation.difference == 0.0 and comparison.train.difference == 0.0


@pytest.mark.parametrize(("scale", "verdict"), [(1.009, "equivalent"), (1.011, "worse"), (0.991, "equivalent"), (0.989, "better")])
def test_verdict_changes_when_the_loss_passes_the_tolerance(tmp_path: Path, scale: float, verdict: str) -> None:
    comparison = verdict_of(tmp_path, b={"scale": scale})
    assert comparison.verdict == verdict
    assert comparison.train.difference == pytest.approx(scale - 1, rel=1e-6)
    assert comparison.validation.difference == pytest.approx(scale - 1, rel=1e-6)
    assert "0.01 relative" in comparison.rule and "last quarter" in comparison.rule


def test_b_is_worse_when_only_its_held_out_loss_is_above(tmp_path: Path) -> None:
    comparison = verdict_of(tmp_path, b={"scale": 0.9, "summary": {"validation_loss": 2.0}})
    assert comparison.verdict == "worse" and comparison.reasons[0].startswith("held-out loss is +24.")


def test_b_is_worse_when_only_its_training_loss_is_above(tmp_path: Path) -> None:
    final = falling_loss(1.0)
    comparison = verdict_of(tmp_path, b={"scale": 1.02, "summary": {"validation_loss": final}})
    assert comparison.verdict == "worse" and comparison.reasons == ("training loss is +2.00%",)


def test_only_the_last_quarter_counts_when_the_start_differs(tmp_path: Path) -> None:
    comparison = verdict_of(tmp_path, b={"loss": lambda t: falling_loss(t) + (1.0 if t < 0.7 else 0.0)}, tolerance=1e-6)
    assert comparison.verdict == "equivalent"


def test_runs_are_equivalent_by_tokens_when_one_takes_four_times_the_batch(tmp_path: Path) -> None:
    # The same function of consumed tokens, sampled four times as rarely.
    comparison = verdict_of(tmp_path / "tokens", b={"batch": 32, "steps": 50, "evaluate_every": 10}, tolerance=0.001)
    assert comparison.verdict == "equivalent", comparison.reasons
    assert comparison.common_range is not None
    assert comparison.common_range.smoothing_window == 4 * 32 * 128
    assert comparison.common_range.end == 49 * 32 * 128
    by_steps = verdict_of(tmp_path / "steps", b={"batch": 32, "steps": 50, "evaluate_every": 10}, against="steps")
    assert by_steps.verdict == "better"


def test_longer_run_is_judged_where_the_shorter_ends(tmp_path: Path) -> None:
    comparison = verdict_of(tmp_path, b={"steps": 400, "length": 2.0})
    assert comparison.verdict == "equivalent", comparison.reasons
    assert comparison.validation.b == pytest.approx(falling_loss(1.0))
    assert "A ends at 204,800 tokens, B at 409,600" in comparison.notes[0]


def test_runs_are_incomparable_when_the_longer_was_not_evaluated_there(tmp_path: Path) -> None:
    comparison = verdict_of(tmp_path, b={"steps": 400, "length": 2.0, "evaluate_every": None})
    assert comparison.verdict == "incomparable" and comparison.reasons[0].startswith("B has no held-out loss near the end")


def test_runs_are_incomparable_when_the_last_evaluation_is_long_ago(tmp_path: Path) -> None:
    comparison = verdict_of(tmp_path, b={"finished": False, "evaluate_every": 120})
    assert comparison.verdict == "incomparable" and comparison.reasons[0].startswith("B has no held-out loss near the end")


def test_last_evaluation_counts_when_a_run_is_not_finished(tmp_path: Path) -> None:
    comparison = verdict_of(tmp_path, b={"finished": False})
    assert comparison.verdict == "equivalent" and comparison.validation.b == pytest.approx(falling_loss(1.0))


def test_runs_are_incomparable_when_the_data_differs(tmp_path: Path) -> None:
    comparison = verdict_of(tmp_path, b={"summary": {"data_digest": "d2"}})
    assert comparison.verdict == "incomparable" and comparison.reasons == ("the data differs: digest d1 in A, d2 in B",)
    assert comparison.train.difference == 0.0


def test_runs_are_incomparable_when_too_little_is_in_common(tmp_path: Path) -> None:
    comparison = verdict_of(tmp_path, b={"steps": 1})
    assert comparison.verdict == "incomparable" and comparison.common_range is None
    assert "A and B logged 0 to 203,776 and 0 to 0" in comparison.reasons[0]


@pytest.mark.parametrize("breaks_at", [0.0, 0.5, 0.85])
def test_b_is_worse_when_it_diverged(tmp_path: Path, breaks_at: float) -> None:
    comparison = verdict_of(tmp_path, b={"loss": lambda t: falling_loss(t) if t < breaks_at else float("nan")})
    assert comparison.verdict == "worse" and "B diverged" in comparison.reasons[0]


def test_runs_are_incomparable_when_the_control_diverged(tmp_path: Path) -> None:
    comparison = verdict_of(tmp_path, a={"loss": lambda t: falling_loss(t) if t < 0.5 else float("nan")})
    assert comparison.verdict == "incomparable" and "the control A diverged" in comparison.reasons[0]


def test_skipped_step_changes_nothing_when_it_has_no_loss(tmp_path: Path) -> None:
    skipped = {"step": 190, "kind": "train", "wall_s": 19.0, "loss": None, "skipped": 1}
    comparison = verdict_of(tmp_path, b={"extra_lines": (skipped,)}, tolerance=0.001)
    assert comparison.verdict == "equivalent"

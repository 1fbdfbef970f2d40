"""Reading a run back, and the moving average."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_jax.errors import RunFolderError
from megascale_jax.views.curve import read_run, smooth
from tests.views.fake_run import make_run


def test_run_is_read_when_whole(tmp_path: Path) -> None:
    lines = (
        {"step": 5, "kind": "event", "wall_s": 1.0, "event": "resume"},
        {"step": 7, "kind": "event", "wall_s": 1.0, "event": "skip"},
        {"step": 7, "kind": "event", "wall_s": 1.0, "event": "checkpoint_error"},
        {"step": 11, "kind": "train", "wall_s": 1.0, "loss": None, "skipped": 1, "non_finite": ["loss"]},
    )
    run = read_run(make_run(tmp_path / "some-run", steps=10, evaluate_every=5, extra_lines=lines))
    assert run.name == "some-run" and run.config["model"]["block"] == "parallel"
    np.testing.assert_array_equal(run.train.steps, np.arange(1, 12))
    assert np.isnan(run.train.losses[-1]) and run.train.losses[0] == 5.5
    np.testing.assert_array_equal(run.train.finite.steps, np.arange(1, 11))
    np.testing.assert_array_equal(run.evaluation.steps, [5, 10])
    assert run.resume_steps == (5,) and run.skip_steps == (7, 11)
    assert run.summary is not None and run.summary.bigram_nats == 2.5


def test_later_line_counts_when_a_step_occurs_twice(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", steps=3, extra_lines=({"step": 2, "kind": "train", "wall_s": 9.0, "loss": 7.0},)))
    np.testing.assert_array_equal(run.train.steps, [1, 2, 3])
    assert run.train.losses[1] == 7.0


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.jsonl", None, "no metrics.jsonl"),
        ("metrics.jsonl", "", "no training step"),
        ("config.yaml", None, "no config.yaml"),
        ("config.yaml", "a: [", "not valid YAML"),
        ("config.yaml", "- a", "holds a list"),
        ("summary.json", "{}", "no run summary"),
    ],
)
def test_reason_is_given_when_the_folder_is_no_run(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(RunFolderError, match=message):
        read_run(folder)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=40), st.floats(0.5, 60.0))
def test_mean_equals_the_direct_one_when_smoothed(losses: list[float], window: float) -> None:
    x, y = np.arange(1.0, len(losses) + 1), np.array(losses)
    got = smooth(x, y, x, window)
    for position, value in zip(x, got, strict=True):
        half = min(window / 2, position - 1.0)
        inside = y[(x >= position - half) & (x <= position + half)]
        assert value == pytest.approx(inside.mean(), rel=1e-9)


def test_line_stays_a_line_when_smoothed_away_from_its_end() -> None:
    x = np.arange(0.0, 100.0)
    np.testing.assert_allclose(smooth(x, 3.0 - 0.01 * x, x, 20.0)[:90], (3.0 - 0.01 * x)[:90], rtol=1e-12)


def test_value_is_interpolated_when_no_point_is_inside_the_window() -> None:
    np.testing.assert_allclose(smooth(np.array([0.0, 10.0]), np.array([2.0, 4.0]), np.array([5.0]), 1.0), [3.0])

"""The picture of two runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from megascale_jax.views.compare import compare_runs
from megascale_jax.views.curve import read_run
from megascale_jax.views.overlay import plot_comparison
from tests.views.fake_run import make_run


@pytest.mark.parametrize(
    "b", [{"batch": 32, "steps": 50}, {"steps": 1}, {"loss": lambda _: float("nan")}, {"evaluate_every": None, "finished": False}]
)
def test_both_runs_are_drawn_whatever_the_verdict_when_compared(
    tmp_path: Path, b: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    run_a, run_b = read_run(make_run(tmp_path / "a")), read_run(make_run(tmp_path / "b", **b))
    plot_comparison(compare_runs(run_a, run_b, tolerance=0.01, against="tokens"), run_a, run_b, tmp_path / "c.png")
    pixels = imread(tmp_path / "c.png")
    assert pixels.shape[:2] == (700, 1200) and not recwarn.list
    wanted = ["2a6f97"] if run_b.train.finite.steps.size == 0 else ["2a6f97", "d1495b"]
    for colour in wanted:
        rgb = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)]) / 255
        assert np.count_nonzero(np.abs(pixels[..., :3] - rgb).max(axis=-1) < 0.02) > 50, colour

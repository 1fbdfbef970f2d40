"""The loss picture: what is handed to the axes, and that the file is a picture."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from megascale_jax.errors import RunFolderError
from megascale_jax.views.curve import read_run
from megascale_jax.views.loss import draw_loss, plot_loss, result_line
from megascale_jax.views.style import new_figure
from tests.views.fake_run import falling_loss, make_run

RESUMED = {"step": 50, "kind": "event", "wall_s": 1.0, "event": "resume"}
SKIPPED = {"step": 201, "kind": "train", "wall_s": 1.0, "loss": None, "skipped": 1}


def lines_by_label(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    _, (axes,) = new_figure()
    draw_loss(axes, read_run(folder))
    return {str(line.get_label()): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in axes.lines}


def test_file_is_a_picture_of_1200_by_700_when_drawn(tmp_path: Path) -> None:
    path = plot_loss(make_run(tmp_path / "run", extra_lines=(RESUMED, SKIPPED)))
    pixels = imread(path)
    assert path == tmp_path / "run" / "loss.png" and pixels.shape[:2] == (700, 1200)
    # The curve's and the held-out points' colours are there, and most of the picture is white paper.
    for colour in ("2a6f97", "d1495b", "5a8f5a", "c77d0a"):
        wanted = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)]) / 255
        assert np.count_nonzero(np.abs(pixels[..., :3] - wanted).max(axis=-1) < 0.02) > 50, colour
    assert np.mean(pixels[..., :3] > 0.99) > 0.8


def test_axes_get_the_logged_losses_when_drawn(tmp_path: Path) -> None:
    lines = lines_by_label(make_run(tmp_path / "run", extra_lines=(RESUMED, SKIPPED)))
    steps, losses = lines["training, each logged step"]
    np.testing.assert_array_equal(steps, np.arange(1, 201))
    np.testing.assert_allclose(losses, [falling_loss((step - 1) / 200) for step in range(1, 201)])
    steps, losses = lines["held-out"]
    np.testing.assert_array_equal(steps, np.arange(20, 201, 20))
    np.testing.assert_allclose(losses[-1], falling_loss(1.0))
    smooth_losses = next(y for label, (_, y) in lines.items() if label.startswith("training, mean over"))
    assert smooth_losses[100] == pytest.approx(falling_loss(0.5), rel=0.01)
    assert lines["resumed"][0][0] == 50 and lines["update skipped"][0][0] == 201
    assert {3.3, 2.5} <= {float(y[0]) for _, y in lines.values() if len(y) == 2}


def test_baselines_are_labelled_when_known(tmp_path: Path) -> None:
    _, (axes,) = new_figure()
    draw_loss(axes, read_run(make_run(tmp_path / "run")))
    assert {text.get_text() for text in axes.texts} == {"unigram 3.300", "bigram 2.500"}
    low, high = axes.get_ylim()
    assert low < 1.6 and high > 5.5


def test_curve_fills_the_axis_when_one_step_spikes(tmp_path: Path) -> None:
    _, (axes,) = new_figure()
    spike = {"step": 100, "kind": "train", "wall_s": 1.0, "loss": 1e4}
    draw_loss(axes, read_run(make_run(tmp_path / "run", extra_lines=(spike,))))
    assert axes.get_ylim()[1] < 7.0


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_picture_is_drawn_without_a_warning_when_the_run_is_tiny(tmp_path: Path, steps: int, recwarn: pytest.WarningsRecorder) -> None:
    assert imread(plot_loss(make_run(tmp_path / "run", steps=steps, evaluate_every=None, finished=False))).std() > 0.01
    assert not recwarn.list


def test_picture_says_so_when_no_loss_is_finite(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    folder = make_run(tmp_path / "run", steps=4, loss=lambda _: float("nan"))
    _, (axes,) = new_figure()
    draw_loss(axes, read_run(folder))
    assert "no logged training loss is finite" in [text.get_text() for text in axes.texts]
    assert plot_loss(folder).is_file() and not recwarn.list


def test_title_holds_the_final_numbers_when_finished(tmp_path: Path) -> None:
    line = result_line(read_run(make_run(tmp_path / "run")))
    for part in ("held-out loss 1.601", "200 steps in 0:20", "20.0k tokens/s", "MFU 30.0%", "1.00k parameters"):
        assert part in line
    line = result_line(read_run(make_run(tmp_path / "open", finished=False)))
    assert line.startswith("not finished: step 200, last training loss 1.6")


def test_folder_is_refused_when_it_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError):
        plot_loss(tmp_path)
    assert not (tmp_path / "loss.png").exists()

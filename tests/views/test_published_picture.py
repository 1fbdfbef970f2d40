"""Pictures of published numbers beside simulated ones: what is drawn is what was given, and both sides have equal axes."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from megascale_jax.sim.validation.ladder import Rung
from megascale_jax.sim.validation.runs import paper_run
from megascale_jax.sim.validation.score import Row, Score
from megascale_jax.views import convergence_picture, failure_picture, published_picture

PNG = b"\x89PNG\r\n\x1a\n"
ROWS = (
    Row("Megatron-LM, 2,240 GPUs", "MFU %", 49.2, 50.2, "calibration", {"micro-batch 1": 52.0}),
    Row("MegaScale, 2,240 GPUs", "MFU %", 54.3, 56.8, "held-out", {"micro-batch 1": 60.0}),
)
SCORE = Score("made", "Made", ROWS, "none", ())


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a picture; its axes, and the texts on each."""
    kept = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path: (kept.append(self), save(self, path)))

    def draw(plot, *values):
        path = tmp_path / "picture.png"
        plot(*values, path)
        assert path.read_bytes().startswith(PNG)
        figure = kept.pop()
        return figure.axes, [{text.get_text() for text in axes.findobj(lambda one: hasattr(one, "get_text"))} for axes in figure.axes]

    return draw


def test_scaling_has_a_curve_for_each_batch_and_one_height(drawn):
    published = {"MegaScale": [[(256, 0.65), (512, 0.63)], [(3072, 0.59)]], "Megatron-LM": [[(256, 0.53)]]}
    (left, right), texts = drawn(published_picture.plot_scaling, published, {"MegaScale": [[(256, 0.70)]]}, "a note")
    assert [line.get_ydata().tolist() for line in left.lines] == [[0.65, 0.63], [0.59], [0.53]]
    assert left.get_ylim() == right.get_ylim() and left.get_ylim()[0] <= 0.53 and right.get_ylim()[1] >= 0.70
    assert "published" in texts[0] and "simulated; a note" in texts[1]


def test_weak_scaling_has_each_system_on_both_sides(drawn):
    (left, right), texts = drawn(published_picture.plot_weak_scaling, SCORE, "a note")
    assert sorted(bar.get_height() for bar in left.patches) == [49.2, 54.3]
    assert sorted(bar.get_height() for bar in right.patches) == [50.2, 56.8]
    assert "published" in texts[0] and "simulated; a note" in texts[1] and {"49.2", "54.3"} <= texts[0]


def test_steps_of_an_ablation_stand_on_each_other_and_one_down_has_another_colour(drawn):
    steps = Score("made", "Made", (Row("one: more", "points", 4.0, 5.0), Row("two", "points", 1.0, -0.5)), "none", ())
    (left, right), texts = drawn(published_picture.plot_ablation, (47.7, 49.7), steps)
    assert np.allclose([(bar.get_x(), bar.get_width()) for bar in left.patches], [(0, 47.7), (47.7, 4.0), (51.7, 1.0)])
    assert np.allclose([(bar.get_x(), bar.get_width()) for bar in right.patches], [(0, 49.7), (49.7, 5.0), (54.7, -0.5)])
    assert right.patches[1].get_facecolor() != right.patches[2].get_facecolor()
    assert {"+4.0", "one"} <= texts[0] and "-0.5" in texts[1]


def test_errors_are_points_for_mfu_and_per_cent_for_seconds(drawn):
    (axes,), (texts,) = drawn(published_picture.plot_errors, SCORE, ["micro-batch 1"])
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([1.0, 2.5])
    assert axes.lines[0].get_xdata() == pytest.approx([2.8, 5.7])
    assert {"simulated - published, points", "micro-batch 2, calibration rows", "micro-batch 1"} <= texts
    seconds = Score("made", "Made", (Row("one", "s", 40.0, 44.0),), "none", ())
    (axes,), _ = drawn(published_picture.plot_errors, seconds, [])
    assert axes.patches[0].get_width() == pytest.approx(10.0)


def test_a_ladder_has_means_and_largest_errors_in_per_cent(drawn):
    (axes,), _ = drawn(published_picture.plot_ladder, {"micro-batch 2": [Rung("one", "E", 0.08, 0.19), Rung("two", "e, g", 0.02, 0.05)]})
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([8.0, 2.0])
    assert axes.lines[0].get_ydata() == pytest.approx([19.0, 5.0])


def test_shares_of_an_iteration_are_all_of_it(drawn):
    times = paper_run("megascale", "175B", 256, 768, 2).times
    (axes,), _ = drawn(published_picture.plot_shares, [("one", times)])
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(1.0)


def test_batches_show_what_is_published_where_it_is(drawn):
    (left, right), texts = drawn(
        convergence_picture.plot_batches, (1, 3, 4), (0.036, 0.012, 0.009), (0.62, 0.65, 0.66), {1: 0.623, 3: 0.653}
    )
    assert [bar.get_height() for bar in left.patches] == [0.036, 0.012, 0.009]
    assert right.lines[0].get_xdata().tolist() == [0, 1] and right.lines[0].get_ydata().tolist() == [0.623, 0.653]
    assert "x 3\n768 rows" in texts[0]


def test_convergence_has_a_curve_a_variant_and_a_dot_a_seed(drawn):
    variants = [
        {"name": name, "held_out": [2.0, 2.1], "above_baseline": above, "curve_tokens": [1e5, 2e5], "curve": [3.0, 2.2]}
        for name, above in (("AdamW", [0.0, 0.0]), ("LAMB", [0.1, -0.2]))
    ]
    made = {"kind": "measured", "baseline": "AdamW", "parameters": 130_000, "bigram_nats": 2.5, "variants": variants}
    (curves, dots), texts = drawn(convergence_picture.plot_convergence, made)
    assert [line.get_ydata().tolist() for line in curves.lines[:2]] == [[3.0, 2.2]] * 2
    assert dots.lines[0].get_xdata().tolist() == [0.1, -0.2]
    assert any(text.startswith("measured; mean of 2 seeds") for text in texts[0]) and "LAMB" in texts[1] and "AdamW" not in texts[1]


def test_failures_of_fleets(drawn):
    (axes,), (texts,) = drawn(failure_picture.plot_mtbf, {"made": 10.0}, [800, 8000], 8)
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([24.0, 2.4]), "10 failures a day on 1,000 nodes"
    assert "made: 10 a 1,000 node-days" in texts
    (one, other), _ = drawn(failure_picture.plot_kinds, {"a": {"rare": 0.1, "often": 2.0}, "b": {"any": 1.0}})
    assert [bar.get_width() for bar in one.patches] == [2.0, 0.1] and len(other.patches) == 1
    (axes,), (texts,) = drawn(failure_picture.plot_intervals, {"w": lambda seconds: 1 / (1 + seconds)}, {60: 0.7}, {"w": 120.0})
    assert axes.lines[0].get_ydata() == pytest.approx(1 / (1 + 60 * np.asarray(axes.lines[0].get_xdata())))
    assert axes.lines[1].get_xdata() == [2.0, 2.0] and {"Meta (published)", "w (derived)"} <= texts

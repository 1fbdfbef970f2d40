"""MegaScale, Table 2: its own arithmetic, the calibration, the held-out rows, the ladder."""

import pytest

from megascale_jax.sim.validation.calibration import constants_of, fit, kept
from megascale_jax.sim.validation.ladder import ladder
from megascale_jax.sim.validation.tables import megatron_mfu, table2

SCORE = table2()


def test_mfu_of_the_eight_baseline_rows_follows_from_their_seconds():
    for published, ours in megatron_mfu():
        assert ours == pytest.approx(published, abs=0.3)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_kept_constants_are_what_the_fit_finds(micro_batch):
    constants, left = fit(micro_batch)
    assert constants == pytest.approx(constants_of(micro_batch), rel=1e-5)
    assert left < 0.01


def test_only_four_rows_are_calibrated_on_and_the_file_names_them():
    rows = [row.name.replace(", ", " on ").replace("3,072", "3072") for row in SCORE.rows if row.role == "calibration"]
    assert sorted(rows) == sorted(kept().rows) and len(rows) == 4


def test_twelve_held_out_rows_meet_the_target():
    held = [row for row in SCORE.rows if row.role == "held-out"]
    assert len(held) == 12 and SCORE.is_met, SCORE.misses
    mean, worst = SCORE.means["simulated"]
    assert mean <= 0.025 and worst <= 0.07


def test_with_nothing_calibrated_micro_batch_1_is_within_its_known_error():
    """A regression guard: 2.8 and 5.6 per cent when it was written."""
    mean, worst = SCORE.means["nothing calibrated, micro-batch 1"]
    assert mean <= 0.03 and worst <= 0.06


def test_iterations_are_faster_with_more_gpus_of_both_systems():
    for system in ("Megatron-LM", "MegaScale"):
        predicted = [row.predicted for row in SCORE.rows if row.name.startswith(system)]
        assert predicted[:4] == sorted(predicted[:4], reverse=True) and predicted[4:] == sorted(predicted[4:], reverse=True)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_every_layer_of_detail_helps_until_the_stragglers(micro_batch):
    rungs = ladder(micro_batch)
    means = [rung.mean for rung in rungs]
    assert means[:4] == sorted(means[:4], reverse=True)
    assert means[0] > 0.08 and means[3] < 0.035
    assert means[-1] <= means[3] + 0.002

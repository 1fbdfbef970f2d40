"""A decay of a run's MFU is found, noise is none, and what takes longer is named."""

import numpy as np
import pytest
from typer.testing import CliRunner

from megascale_jax.cli.main import app
from megascale_jax.views.goodput import read_goodput
from megascale_jax.views.grown import LATE, MESSAGES
from megascale_jax.views.mfu_trend import FEWEST_WINDOWS, LEAST_STEPS, MOST_WINDOWS, mfu_seconds, trend_of

STEPS = 1000
NOISE = 0.05


def trend(seconds):
    steps = np.arange(1, seconds.size + 1)
    return trend_of(steps, seconds, np.full(seconds.size, 0.4))


def noisy(seed, steps=STEPS):
    return 1 + NOISE * np.random.default_rng(seed).standard_normal(steps)


@pytest.mark.parametrize("steps", [FEWEST_WINDOWS * LEAST_STEPS, STEPS, 20_000])
def test_noise_is_no_decay(steps):
    assert sum(trend(noisy(seed, steps)).is_alarm for seed in range(200)) <= 1


def test_noise_of_which_neighbours_have_much_in_common_is_no_decay():
    alarms = 0
    for seed in range(200):
        left = np.random.default_rng(seed).standard_normal(STEPS)
        for step in range(1, STEPS):
            left[step] += 0.95 * left[step - 1]
        alarms += trend(1 + NOISE * left / left.std()).is_alarm
    assert alarms <= 2


def test_a_decay_by_5_percent_over_the_run_is_found():
    found = [trend(noisy(seed) * np.linspace(1, 1 / 0.95, STEPS)) for seed in range(100)]
    assert sum(one.is_alarm for one in found) >= 99
    assert np.median([one.decay for one in found]) == pytest.approx(0.05 * 0.75, abs=0.005), "from the middle of a quarter to another's"
    assert np.median([one.per_1000_steps for one in found]) == pytest.approx(-0.05, abs=0.01)


def test_a_sudden_drop_is_found_and_one_disturbed_moment_is_none():
    dropped, disturbed = noisy(0), noisy(0)
    dropped[700:] *= 1.1
    disturbed[850:950] *= 3
    assert trend(dropped).is_alarm and not trend(disturbed).is_alarm
    assert not trend(dropped[::-1].copy()).is_alarm, "it became faster"
    slow_at_first = dropped.copy()
    slow_at_first[:250] *= 2
    assert trend(slow_at_first).is_alarm, "against the best, not the first"


def test_levels_are_mfu_of_windows():
    found = trend(np.full(4 * MOST_WINDOWS * LEAST_STEPS, 2.0))
    assert found.levels.size == MOST_WINDOWS and np.allclose(found.levels, 0.2) and found.level == pytest.approx(0.2)
    assert (found.best, found.last) == (
        (1, MOST_WINDOWS * LEAST_STEPS),
        (3 * MOST_WINDOWS * LEAST_STEPS + 1, 4 * MOST_WINDOWS * LEAST_STEPS),
    )
    few = trend(np.full(FEWEST_WINDOWS * LEAST_STEPS - 1, 2.0))
    assert not few.is_alarm and few.best is None and few.level == pytest.approx(0.2) and "too few" in few.notes[0]
    assert trend(np.empty(0)).level is None
    still = trend(np.zeros(1000))
    assert not still.is_alarm and not still.levels.size


def test_mfu_is_that_of_the_newest_line_before():
    lines = [
        {"step": 10, "mfu": 0.4, "tokens_per_s": 100.0, "tokens": 500},
        {"step": 20, "mfu": 0.4, "tokens_per_s": 200.0, "tokens": 1000},
        {"step": 25, "mfu": None, "tokens_per_s": 200.0, "tokens": 1250},
        {"step": 0, "mfu": 0.1, "tokens_per_s": 1.0, "tokens": 0},
    ]
    assert mfu_seconds(np.array([1, 10, 19, 20, 30]), lines) == pytest.approx([0.2, 0.2, 0.2, 0.1, 0.1])
    assert mfu_seconds(np.array([1, 30]), lines, is_peak_measured=True) == pytest.approx([0.1, 0.1])
    assert np.isnan(mfu_seconds(np.array([1, 2]), [])).all()


RUN = 400
"""Steps of a run of which the second half is other than the first."""
LAST = "scatter last chunk"


NOTHING_ADDED = dict.fromkeys(("forward", "gap", "rows", "transfer", "late"), 0)


def write_run(job, changed):
    """Four ranks of one device each, 1 x 4 x 1; ``changed(device, step)``: what is added to `NOTHING_ADDED`, ms."""
    added = [[NOTHING_ADDED | changed(device, step) for device in range(4)] for step in range(RUN + 1)]
    begin, begins = 10.0, []
    for step in range(RUN + 1):
        begins.append(begin)
        begin += (100 + max(sum(one.values()) for one in added[step])) / 1e3
    begins.append(begin)
    for rank in range(4):
        with job(rank=rank) as told:
            told.out.describe(mesh=(1, 4, 1), devices=[rank])
            told.span("restore", 0.0, 10.0)
            for step in range(1, RUN + 1):
                own, end = added[step][rank], begins[step + 1]
                rows = begins[step] + (1 + own["rows"]) / 1e3
                told.span("data", begins[step], rows, step)
                told.span("compile" if step == 1 else "step", rows, end, step)
                at = rows + (1 + own["gap"]) / 1e3
                place = {"device": rank, "microbatch": 0, "chunk": 0}
                columns = {"lane": "compute", "device": rank}
                told.span("step", at, end, step, **columns)
                forward = at + (30 + own["forward"]) / 1e3
                told.span("forward", at, forward, step, lane="compute", **place)
                told.span("backward", forward, forward + 0.03, step, lane="compute", **place)
                arrives = forward + 0.03 + own["late"] / 1e3
                told.span(LAST, arrives, end - 0.005, step, lane="data", device=rank)
                told.span("optimizer", end - 0.005, end, step, **columns)
                told.instant("step end", end - 0.005, step, **columns)
    return read_goodput(job.run).trend


def cases():
    def late(device, step):
        skew = 10 * (step - RUN // 2) / RUN if step > RUN // 2 else 0  # in turns one comes late, by more and more
        return {"late": skew * 2} if step % 4 == device and skew else {}

    yield "late launch", late, f"{LATE}, {LAST}"
    yield "slow forward", lambda device, step: {"forward": 10} if device == 2 and step > RUN // 2 else {}, "forward"
    yield "slower network", lambda device, step: {"transfer": 10} if step > RUN // 2 else {}, f"{MESSAGES}, {LAST}"
    yield "rows", lambda device, step: {"rows": 10} if step > RUN // 2 else {}, "data wait"
    yield "host", lambda device, step: {"gap": 10} if device == 1 and step > RUN // 2 else {}, "host"


@pytest.mark.parametrize(("changed", "segment"), [case[1:] for case in cases()], ids=[case[0] for case in cases()])
def test_the_segment_that_grew_is_named(job, changed, segment):
    found = write_run(job, changed)
    assert found.is_alarm and found.grown[0].segment == segment
    assert found.grown[0].share == pytest.approx(0.8 if segment.startswith(LATE) else 1.0, abs=0.15)
    assert {"forward", "backward", "optimizer", "host", "data wait", f"{LATE}, {LAST}"} <= {one.segment for one in found.grown}
    flat = {one.segment: one.growth_s for one in found.grown if one.segment in ("backward", "optimizer")}
    assert max(map(abs, flat.values())) < 1e-6
    if segment == "forward":
        assert found.grown[0].device == 2 and found.grown[0].growth_s == pytest.approx(0.010)


def test_an_alarm_is_printed_and_is_exit_code_1(job, tmp_path):
    write_run(job, lambda device, step: {"forward": 10} if device == 2 and step > RUN // 2 else {})
    done = CliRunner().invoke(app, ["goodput", str(job.run), "--picture", str(tmp_path / "a.png")])
    assert done.exit_code == 1 and "ALARM: it decays" in done.output
    assert "100% of what a step takes longer: forward, 30.000 ms to 40.000 ms a step, most on device 2" in done.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_without_stamps_the_alarm_says_so(job):
    with job() as told:
        at = told.steps(told.begin(0.0), 1, 200)
        told.steps(at, 201, RUN, compiled=False, step=1.0)
    found = read_goodput(job.run).trend
    assert found.is_alarm and not found.is_mfu and found.grown == () and "not known" in found.notes[0]
    assert found.level == pytest.approx(1 / 1.25)

"""Times of a run's devices out of its events: exact, of the last run of a step, and never guessed."""

import numpy as np
import pytest

from megascale_jax.config.layout import MeshShape
from megascale_jax.errors import UsageError
from megascale_jax.observe.events import Events
from megascale_jax.views.step_times import COMPUTED, read_step_times
from tests.views.made_run import made_run, made_stamps, play

MESH = (2, 2, 2)


def read(run, steps=(None, None)):
    return read_step_times(run, steps)


def test_all_time_of_a_step_is_computed_idle_or_waited(tmp_path):
    times = read(made_run(tmp_path, steps=range(7, 10), scale=lambda of, p, d, t, s: 1 + 0.1 * p + 0.01 * d + 0.001 * t))
    assert times.steps.tolist() == [7, 8, 9] and times.whole.shape == (3, *MESH) and times.notes == ()
    assert tuple(times.computed) == tuple(name for name in COMPUTED if name != "embed"), "a lookup is no computation of its own"
    total = np.sum([*times.computed.values()], axis=0) + times.idle + times.waited
    np.testing.assert_allclose(total, times.whole, atol=1e-6)


def test_every_pass_and_wait_is_the_sum_of_its_spans(tmp_path):
    """Also in steps 8 and 16, whose phases are there as well."""
    times, stamps = read(made_run(tmp_path, scale=lambda of, p, d, t, s: 1 + 0.1 * p + 0.01 * d + 0.001 * s)), made_stamps()
    for step, row in ((5, 4), (8, 7)):
        ns = play(stamps, MESH, lambda of, p, d, t, s: 1 + 0.1 * p + 0.01 * d + 0.001 * s, step)
        lasted = ns[:, stamps.end] - ns[:, stamps.begin]
        for device in (0, 7):
            place = np.unravel_index(device, MESH)
            units = stamps.units(int(place[0]))[0]
            backward = stamps.of == stamps.passes.index("backward")
            computes = stamps.lane == stamps.lanes.index("compute")
            pipe = stamps.lane == stamps.lanes.index("pipe")
            expected = lasted[device, backward & computes & (units >= 0)].sum()
            assert times.computed["backward"][row][place] == pytest.approx(expected, abs=1e-6)
            assert times.waits["backward wait", "pipe"][row][place] == pytest.approx(lasted[device, backward & pipe].sum(), abs=1e-6)
            assert times.computed["optimizer"][row][place] == pytest.approx(lasted[device, -1], abs=1e-6)


def test_what_is_missing_is_unknown_and_said(tmp_path):
    times = read(made_run(tmp_path, lost={(3, 1), *((step, 6) for step in range(17))}))
    unknown = np.isnan(times.whole).reshape(16, 8)
    assert unknown[:, 6].all() and unknown[2, 1] and unknown.sum() == 17
    assert np.array_equal(np.isnan(times.computed["forward"]), np.isnan(times.whole))
    assert times.notes == (
        "1 of 8 devices have no whole step: 6",
        "1 of 112 steps of the other devices are missing or incomplete",
    )


def test_of_a_step_run_twice_the_last_run_counts(tmp_path):
    made_run(tmp_path, steps=range(1, 6))
    made_run(tmp_path, steps=range(4, 9), attempt=1, scale=lambda *_: 2.0)
    times = read(tmp_path)
    forward = times.computed["forward"][:, 0, 0, 0]
    assert times.steps.tolist() == [*range(1, 9)]
    np.testing.assert_allclose(forward[3:], 2 * forward[0], rtol=1e-4)
    np.testing.assert_allclose(forward[:3], forward[0], rtol=1e-4)


def test_a_step_that_one_process_wrote_twice_is_unknown(tmp_path):
    times = read(made_run(tmp_path, steps=[1, 2, 2, 3]))
    assert np.isnan(times.whole).all(axis=(1, 2, 3)).tolist() == [False, True, False]


def test_incomplete_rows_of_a_step_are_not_taken_for_it(tmp_path):
    made_run(tmp_path, steps=range(1, 4))
    out = Events(tmp_path / "events", attempt=1)
    out.record("forward", 2 * 10**12, 5, lane="compute", device=3, step=2, microbatch=0, chunk=0)
    out.record("step", 2 * 10**12, 9, lane="compute", device=3, step=2)
    out.close()
    times = read(tmp_path)
    assert np.isnan(times.whole[1, 0, 1, 1]) and np.isnan(times.whole).sum() == 1


def test_a_window(tmp_path):
    made_run(tmp_path)
    assert read(tmp_path, (5, 9)).steps.tolist() == [5, 6, 7, 8]
    with pytest.raises(UsageError, match="no stamps of steps 90:"):
        read(tmp_path, (90, None))


def test_a_run_that_changed_its_mesh_is_read_on_the_one_of_its_window(tmp_path):
    made_run(tmp_path, steps=range(1, 9))
    made_run(tmp_path, mesh=(2, 1, 2), steps=range(7, 13), attempt=1)
    for window, mesh, steps in (((None, 7), MESH, range(1, 7)), ((9, None), (2, 1, 2), range(9, 13))):
        times = read(tmp_path, window)
        assert (times.mesh, times.steps.tolist(), times.notes) == (MeshShape(*mesh), [*steps], ()) and not np.isnan(times.whole).any()
    times = read(tmp_path)
    assert times.mesh == MeshShape(2, 1, 2) and times.steps.tolist() == [*range(7, 13)] and not np.isnan(times.whole).any()
    assert times.notes == ("the mesh changed within these steps: those on 2x2x2 are left out, 2x1x2 is the newest",)


def test_runs_without_stamps_are_refused(tmp_path):
    out = Events(tmp_path / "events")
    out.record("step", 5, 5, step=1)
    out.close()
    with pytest.raises(UsageError, match="state 0 meshes"):
        read(tmp_path)

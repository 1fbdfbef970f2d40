"""Replays of our own phases: they repeat what was played, and say what it costs that a device is slow."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.observe.event_store import read_events
from megascale_jax.parallel.pipeline.operations import fill_operations, settle_operations, tick_operations
from megascale_jax.parallel.pipeline.schedule import TickKind
from megascale_jax.parallel.pipeline.shape import TickShape
from megascale_jax.parallel.pipeline.stamps import axes_of
from megascale_jax.views import phases_replay
from megascale_jax.views.phases_replay import read_replays
from megascale_jax.views.run_what_if import find_costs
from megascale_jax.views.slow_devices import find_slow
from megascale_jax.views.step_times import COMPUTED, read_step_times
from tests.views.made_run import made_run, made_stamps, play

MESH = (2, 2, 2)


def slow_backward(of, p, d, t, step):
    return 1.15 if (of, p, d, t) == ("backward", 1, 0, 1) else 1.0


def opened(run):
    times = read_step_times(run)
    with read_events(run) as store:
        return times, read_replays(store, times)[0]


def costs_of(run):
    times, replays = opened(run)
    slow = find_slow(times)
    return slow, find_costs(replays, times.mesh, slow.devices)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=7, max_size=7), st.booleans(), st.booleans(), st.booleans())
def test_names_tell_the_axes_of_collectives(flags, recompute, turns, split):
    shape = TickShape(2, recompute, int(split), turns=turns, split=split)
    kind = TickKind(*flags[:3], weight_gradients=flags[3])
    for operation in (*tick_operations(kind, shape), *fill_operations(shape), *settle_operations()):
        if operation.kind == "collective":
            assert axes_of(operation.name) == operation.axes, operation.name


@pytest.mark.parametrize("mesh", [(2, 2, 2), (4, 1, 2), (1, 4, 1)])
def test_a_step_is_repeated(mesh, tmp_path):
    _, replays = opened(made_run(tmp_path, mesh=mesh, steps=range(1, 9), scale=lambda of, p, d, t, s: 1 + 0.2 * ((p + d + t) % 2)))
    (replay,) = replays
    real = replay.times(np.zeros((1, 6, *mesh), bool))[0]
    assert replay.step == 8 and real == pytest.approx(replay.recorded_s, rel=0.01)


def test_the_slowdown_is_that_of_the_run_without_the_slow_device(tmp_path):
    slow, costs = costs_of(made_run(tmp_path, scale=slow_backward))
    stamps = made_stamps()
    exact = play(stamps, MESH, slow_backward, 8).max() / play(stamps, MESH, lambda *_: 1.0, 8).max()
    assert exact > 1.03
    assert costs.slowdown == pytest.approx(exact, rel=0.005) and costs.gaps == pytest.approx(1, rel=0.01)
    (cause,) = costs.causes
    assert (cause.kind, cause.optype, cause.devices) == ("worker", "backward", (5,)) and cause.share == pytest.approx(1, abs=0.01)
    assert cause.excess["backward"] == pytest.approx(0.15, abs=0.001)
    assert costs.workers[0].rank == 5 and costs.workers[0].explained == pytest.approx(1, abs=0.01)
    assert max(costs.optypes, key=lambda name: costs.optypes[name].slowdown) == "backward"
    assert costs.stages[1].slowdown > costs.stages[0].slowdown == pytest.approx(1)
    assert [one.device for one in slow.devices] == [5]


def test_two_devices_that_are_slow_alike_share_what_both_cost(tmp_path):
    scale = lambda of, p, d, t, s: 1.3 if (of, p, d) == ("backward", 1, 0) else 1.0  # noqa: E731
    slow, costs = costs_of(made_run(tmp_path, mesh=(2, 4, 2), scale=scale))
    assert sorted(one.device for one in slow.devices) == [8, 9]
    assert sorted(cause.devices for cause in costs.causes) == [(8,), (9,)]
    assert [cause.share for cause in costs.causes] == pytest.approx([0.5, 0.5], abs=0.01)
    assert costs.unexplained == pytest.approx(0, abs=0.01)


def test_without_a_slow_device_nothing_is_found(tmp_path):
    slow, costs = costs_of(made_run(tmp_path))
    assert slow.devices == () and costs.causes == () and costs.slowdown == pytest.approx(1)


def test_a_stage_with_more_work_is_no_devices_fault(tmp_path):
    slow, costs = costs_of(made_run(tmp_path, scale=lambda of, p, *_: 1.4 if p == 1 and of in ("forward", "backward", "weight") else 1.0))
    assert slow.devices == () and costs.slowdown == pytest.approx(1)
    assert [(cause.kind, cause.pipe) for cause in costs.causes] == [("stage", 1)]
    assert all(worker.slowdown == pytest.approx(1) for worker in costs.workers)


def test_a_pass_that_varies_is_a_cause_of_its_own(tmp_path):
    """One device after the other pauses in the weight gradients."""
    scale = lambda of, p, d, t, s: 2.0 if of == "weight" and s % 4 == 2 * d + t else 1.0  # noqa: E731
    slow, costs = costs_of(made_run(tmp_path, steps=range(1, 21), scale=scale, detail_every=1))
    assert slow.devices == ()
    assert [(cause.kind, cause.optype) for cause in costs.causes] == [("optype", "weight")]


def test_steps_with_a_device_missing_are_not_replayed(tmp_path):
    _, replays = opened(made_run(tmp_path, lost={(8, 3)}))
    assert [replay.step for replay in replays] == [16]


def test_of_a_detailed_step_that_was_run_again_only_the_last_run_is_replayed(tmp_path):
    made_run(tmp_path, steps=range(1, 9))
    made_run(tmp_path, steps=range(5, 13), attempt=1, scale=lambda *_: 2.0)
    _, (replay,) = opened(tmp_path)
    nothing = np.zeros((1, len(COMPUTED), *MESH), bool)
    assert replay.step == 8 and replay.times(nothing)[0] == pytest.approx(replay.recorded_s, rel=0.01)
    (tmp_path / "alone").mkdir()
    _, (alone,) = opened(made_run(tmp_path / "alone", steps=range(1, 9), scale=lambda *_: 2.0))
    assert replay.phases == alone.phases


def test_more_rows_than_can_be_held_are_fewer_steps(tmp_path, monkeypatch):
    times = read_step_times(made_run(tmp_path))
    with read_events(tmp_path) as store:
        rows = store.sql("select 1 from events where step = 16 and tick >= 0 and lane <> ''").num_rows
        for most, expected in ((rows, [16]), (rows // 2, [])):
            monkeypatch.setattr(phases_replay, "MOST_ROWS", most)
            replays, (note,) = read_replays(store, times)
            assert [replay.step for replay in replays] == expected and f"{len(expected)} of these steps are replayed" in note


def test_without_detailed_steps_slow_devices_are_causes_of_unknown_share(tmp_path):
    _, costs = costs_of(made_run(tmp_path, scale=slow_backward, detail_every=100))
    assert costs.slowdown is None and [cause.devices for cause in costs.causes] == [(5,)] and np.isnan(costs.causes[0].share)

"""The rule for slow devices: exact where there is no noise, few false alarms where there is."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.config.layout import MeshShape
from megascale_jax.views.peers import beside_peers
from megascale_jax.views.slow_devices import find_slow
from megascale_jax.views.step_times import PASSES, StepTimes

MESH = MeshShape(2, 2, 2)


def made(seed=0, *, steps=24, noise=0.0, mesh=MESH, scale=None):
    """Times of passes of 10 to 50 ms, all devices ending together; ``scale`` [step, pipe, data, tensor] of the backward pass."""
    random = np.random.default_rng(seed)
    shape = (steps, mesh.pipe, mesh.data, mesh.tensor)
    computed = {
        name: 0.01 * (1 + number) * np.exp(noise * random.standard_normal(shape)) * np.linspace(1, 2, mesh.pipe)[:, None, None]
        for number, name in enumerate(PASSES)
    }
    if scale is not None:
        computed["backward"] = computed["backward"] * scale
    total = np.sum([*computed.values()], axis=0)
    whole = np.broadcast_to(total.max(axis=(1, 2, 3), keepdims=True) + 0.01, shape).copy()
    hosts = tuple(f"host{rank // 4}" for rank in range(mesh.size))
    return StepTimes(mesh, np.arange(steps), hosts, computed, np.zeros(shape), {("forward wait", "pipe"): whole - total}, whole, ())


def slow_at(*, factor=1.15, steps=24, rows=slice(None), place=(1, 0, 1)):
    scale = np.ones((steps, 2, 2, 2))
    scale[(rows, *place)] = factor
    return scale


def test_a_device_slow_in_one_pass_is_named_with_its_evidence():
    found = find_slow(made(scale=slow_at()))
    (one,) = found.devices
    assert (one.device, one.host, one.pipe, one.data, one.tensor, one.optype) == (5, "host1", 1, 0, 1, "backward")
    assert one.excess == pytest.approx(0.15) and one.excess_s == pytest.approx(0.15 * 0.04)
    assert one.parts == 4 and one.waits_less == pytest.approx(1)
    assert found.excess["backward"][1, 0, 1] == pytest.approx(0.15) and found.excess["forward"][1, 0, 1] == pytest.approx(0)


def test_a_device_is_told_with_its_process():
    times = made(scale=slow_at())
    labels = [find_slow(one).devices[0].label for one in (replace(times, ranks=(0,) * 4 + (3,) * 4), replace(times, hosts=()))]
    assert labels == ["device 5 (rank 3, host1)", "device 5"]


def test_with_noise_it_is_found_as_well():
    found = [find_slow(made(seed, noise=0.05, steps=40, scale=slow_at(steps=40, factor=1.2))).devices for seed in range(40)]
    assert sum([one.device for one in devices] == [5] for devices in found) >= 39


def test_stages_are_not_compared_and_9_percent_is_not_slow():
    assert find_slow(made()).devices == ()
    assert find_slow(made(scale=slow_at(factor=1.09))).devices == ()
    assert len(find_slow(made(scale=slow_at(factor=1.11))).devices) == 1


@pytest.mark.parametrize("rows", [slice(7, 8), slice(0, 12), slice(12, 24)])
def test_a_disturbed_moment_is_none(rows):
    assert find_slow(made(scale=slow_at(rows=rows, factor=3.0))).devices == ()


def test_three_quarters_of_the_window_are_enough():
    (one,) = find_slow(made(scale=slow_at(rows=slice(6, None)))).devices
    assert one.parts == 3


def test_one_peer_is_enough():
    scale = np.broadcast_to(np.array([[1.0], [1.3]]), (24, 2, 2, 1))
    pair = find_slow(made(mesh=MeshShape(2, 2, 1), scale=scale))
    assert [one.device for one in pair.devices] == [3, 1], "the other is the only peer"


def test_false_alarms_are_fewer_than_one_window_in_a_hundred():
    for steps in (8, 12, 40):
        alarms = [bool(find_slow(made(seed, noise=0.05, steps=steps)).devices) for seed in range(200)]
        assert sum(alarms) < 2, f"{steps} steps"


def test_noise_of_20_percent_makes_no_alarms_either():
    assert sum(bool(find_slow(made(seed, noise=0.2, steps=16)).devices) for seed in range(200)) < 4


def test_many_devices_make_no_more_alarms():
    assert all(find_slow(made(seed, noise=0.05, steps=16, mesh=MeshShape(4, 16, 8))).devices == () for seed in range(4))


def test_missing_devices_and_steps_are_nobodys_peers():
    times = made(scale=slow_at())
    for array in (*times.computed.values(), *times.waits.values(), times.whole):
        array[:, 1, 1, 1] = np.nan
        array[::3, 1, 1, 0] = np.nan
    found = find_slow(times)
    assert [one.device for one in found.devices] == [5] and np.isnan(found.excess["backward"][1, 1, 1])


def test_too_few_steps_or_peers_are_said_and_nobody_is_blamed():
    few = find_slow(made(steps=7, scale=slow_at(steps=7)))
    assert few.devices == () and few.notes == ("7 steps are too few to call a device slow; that takes 8",)
    alone = find_slow(made(mesh=MeshShape(2, 1, 1)))
    assert alone.devices == () and alone.notes == ("a stage is one device, so none has a peer to be compared with",)


def test_a_device_that_does_not_wait_less_is_not_slow():
    """Its compute hides a wait: the device computes 15 % longer by its stamps, and waits as long as its peers."""
    times = made(scale=slow_at())
    waits = next(iter(times.waits.values()))
    waits[:] = waits[:, 1:, :1, :1]
    assert find_slow(times).devices == ()


def test_slow_devices_beside_each_other_are_all_named():
    times = made(mesh=MeshShape(2, 4, 2), scale=np.broadcast_to(np.array([1, 1.15, 1.3, 1, 1, 1, 1, 1]).reshape(4, 2), (24, 2, 4, 2)))
    assert sorted(one.device for one in find_slow(times).devices) == [1, 2, 9, 10]


def test_what_costs_next_to_nothing_is_not_slow():
    times = made(scale=slow_at())
    assert find_slow(replace(times, whole=times.whole * 100)).devices == ()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.just(float("nan")), st.floats(0.0, 100.0)), min_size=1, max_size=9))
def test_peers_leave_a_device_itself_out(values):
    found = beside_peers(np.array([values]))[0]
    for at, value in enumerate(values):
        others = [other for place, other in enumerate(values) if place != at and not np.isnan(other)]
        expected = value - np.median(others) if others else np.nan
        np.testing.assert_allclose(found[at], expected, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_of_few_steps_nobody_is_slow(steps):
    found = find_slow(made(steps=steps, scale=slow_at(steps=steps, factor=3.0)))
    assert found.devices == () and found.notes

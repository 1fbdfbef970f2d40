"""A real run of eight devices, one of which sleeps in its backward pass, is analyzed by its own stamps: that device is named."""

import time
from dataclasses import replace

import jax

from megascale_jax.observe.event_store import read_events
from megascale_jax.observe.events import Events
from megascale_jax.parallel.pipeline import tick as ticks
from megascale_jax.parallel.pipeline.tick import Tick
from megascale_jax.train.stamps import StampEvents
from megascale_jax.train.state import initial_state
from megascale_jax.train.step import make_steps, place_batch, place_vote
from megascale_jax.views.phases_replay import read_replays
from megascale_jax.views.slow_devices import find_slow
from megascale_jax.views.slow_nodes import window_of
from megascale_jax.views.step_times import read_step_times
from tests.build import experiment, plan_of, random_batch

SLOW = (1, 0, 1)
STEPS, SLEEP_S = 12, 0.02


def test_a_device_that_sleeps_in_its_backward_pass_is_named(tmp_path, monkeypatch):
    def slow(*indices_and_value):
        *place, value = indices_and_value
        if tuple(map(int, place)) == SLOW:
            time.sleep(SLEEP_S)
        return value

    def late(self, place, number, g_BSD):
        indices = [jax.lax.axis_index(axis) for axis in ("pipe", "data", "tensor")]
        g_BSD = jax.pure_callback(slow, jax.ShapeDtypeStruct(g_BSD.shape, g_BSD.dtype), *indices, g_BSD)
        return Tick.input_gradient_out(self, place, number, g_BSD)

    monkeypatch.setitem(ticks._METHODS, "B.dout", late)
    parallel = {"pipe": 2, "virtual_stages": 1, "micro_batch_size": 4}
    config = experiment(2, 2, parallel=parallel, train={"global_batch_size": 16, "events": {"detail_every": 3}})
    plan = plan_of(config)
    steps = make_steps(config, plan)
    batch = place_batch(plan, random_batch(config, valid=(-1, -1)))
    events = Events(tmp_path / "events")
    events.describe(run="slow", mesh=plan.mesh.devices.shape, devices=range(8))
    writer, state = StampEvents(plan, events, 3), initial_state(plan, steps.optimizer, 0)
    for step in range(STEPS + 1):
        state, metrics = steps.train(state, batch, place_vote(plan, False))
        if step:  # the first one compiles
            writer.write(step, jax.block_until_ready(metrics["stamps"]))
    events.close()
    times = read_step_times(tmp_path)
    with read_events(tmp_path) as store:
        replays, _ = read_replays(store, times)
    assert times.steps.size == STEPS and times.notes == () and len(replays) == 4
    (worst,) = find_slow(times).devices
    assert (worst.pipe, worst.data, worst.tensor, worst.optype) == (*SLOW, "backward")
    assert worst.waits_less > 0.3
    window = window_of(replace(times, ranks=tuple(range(8))), attempt=1)  # as the driver hears of it, were each device a node's
    slowest = max(window.ranks, key=lambda one: one.passes["backward"].cost_s)
    assert slowest.rank == worst.device and slowest.passes["backward"].waits_less > 0.3

"""Clocks of devices that count from elsewhere: their stamps are told on the host's clock from the first step on."""

import time
from types import SimpleNamespace

import jax
import numpy as np

from megascale_jax.kernels.clock.api import STAMP
from megascale_jax.observe.event_store import read_events
from megascale_jax.observe.events import EVENTS_FOLDER, STEP_END, Events
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.train.stamps import StampEvents
from tests.views.fake_steps import fake_plan, stamps_of

AHEAD_NS = 10**17
TABLE = stamps_of(Schedule(2, 1, 2, 1))


class DeviceClock:
    """Of a device that was started three years before its host; counts how often its program is traced."""

    is_of_host = False

    def __init__(self):
        self.traced = 0

    def stamp(self, after, previous):
        self.traced += 1

        def now(*_):
            return np.array([time.monotonic_ns() + AHEAD_NS]).view(np.int32)

        return jax.pure_callback(now, STAMP, after, previous)

    def taken(self, device):
        return None


def test_stamps_of_another_epoch_are_told_on_the_hosts_clock_from_the_first_step_on(tmp_path):
    device, clock = jax.devices()[0], DeviceClock()
    events = Events(tmp_path / EVENTS_FOLDER)
    plan = fake_plan(TABLE, (2, 1, 1), [0], clock)
    plan.mesh.devices = np.array([[[device]], [[jax.devices()[1]]]])
    plan.executor.clock = clock
    out = StampEvents(plan, events, 1)
    out.begin(0)
    began_ns = time.monotonic_ns()
    ns = (began_ns + AHEAD_NS + 1000 * np.arange(TABLE.count)).astype("<i8").view(np.int32).reshape(1, -1, 2)
    out.write(1, SimpleNamespace(addressable_shards=[SimpleNamespace(device=device, data=ns)]))
    out.calibrate()
    events.close()
    with read_events(tmp_path) as store:
        (end_ns,) = store.sql(f"select begin_ns from events where name = '{STEP_END}'")["begin_ns"].to_pylist()
    assert abs(end_ns - began_ns) < 10**9, "not in the device's own epoch"
    assert clock.traced == 1, "read by one program, whenever it is asked"

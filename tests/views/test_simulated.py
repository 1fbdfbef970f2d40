"""A simulated step in the trace of real ones: every unit where the schedule has it, nothing overlapping, messages as arrows."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from megascale_jax.config.load import load_document, load_experiment
from megascale_jax.config.software import SoftwareConfig
from megascale_jax.sim.analytic import iteration_times
from megascale_jax.sim.device import Device
from megascale_jax.sim.replay import schedule_of
from megascale_jax.sim.work import Work
from megascale_jax.views.simulated import simulated_timeline
from megascale_jax.views.trace import arrows, trace_bytes

EXPERIMENT = load_experiment("gpt-175b")
DEVICE = replace(Device.of(EXPERIMENT.system), slow_node_share=0.0)
WORK = replace(Work.of(EXPERIMENT), micro_batches=16)


@pytest.fixture(scope="module", params=["megascale", "megatron-lm"])
def made(request):
    software = load_document("software", request.param, SoftwareConfig)
    return software, simulated_timeline(WORK, DEVICE, software)


def test_the_timeline_goes_by_the_schedule(made):
    _, timeline = made
    schedule = schedule_of(WORK)
    assert timeline.schedule == schedule
    for device in timeline.devices:
        units = [(row.tick, row.micro_batch, row.chunk) for row in device.units["forward"]]
        expected = [
            (tick, unit.micro_batch, unit.chunk) for tick in range(schedule.ticks) if (unit := schedule.forward(tick, device.stage))
        ]
        assert units == expected


def test_rows_of_a_device_follow_each_other_and_end_with_the_iteration(made):
    software, timeline = made
    times = iteration_times(WORK, DEVICE, software)
    for device in timeline.devices:
        ends = [(row.begin_ns, row.end_ns) for row in device.phases]
        assert all(later[0] >= earlier[1] - 2 for earlier, later in pairwise(ends))
        assert ends[-1][1] / 1e9 == pytest.approx(times.iteration_s, rel=1e-4)
    computed = sum(row.duration_ns for row in timeline.devices[0].phases if row.lane == "compute" and row.micro_batch >= 0)
    assert computed / 1e9 == pytest.approx(times.gemm_s + times.attention_s + times.memory_s, rel=1e-4)


def test_every_message_is_an_arrow(made):
    _, timeline = made
    schedule = schedule_of(WORK)
    sent = 2 * (schedule.units * schedule.pipe - schedule.micro_batches)
    assert len(list(arrows(timeline, schedule))) == sent


def test_the_trace_says_that_it_is_simulated(made):
    _, timeline = made
    trace = json.loads(trace_bytes(timeline))
    assert trace["otherData"]["notes"][0].startswith("simulated, not measured")
    assert {event["name"] for event in trace["traceEvents"]} >= {"process_name", "F.layers", "B.layers", "H.loss", "optimizer"}

"""Events of steps as the trainer writes them, from stamps with random durations; no program is run."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from megascale_jax.observe.events import EVENTS_FOLDER, Events
from megascale_jax.observe.pulse import PASSED
from megascale_jax.parallel.pipeline.operations import fill_operations, settle_operations
from megascale_jax.parallel.pipeline.phases import plan_phases, plan_tick
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.parallel.pipeline.shape import HEAD_GEMMS, TickShape
from megascale_jax.parallel.pipeline.stamps import StepStamps, step_stamps
from megascale_jax.train.stamps import StampEvents


def stamps_of(schedule: Schedule, split: bool = True, recompute: bool = False, tensor: int = 2) -> StepStamps:
    """The stamps of a step of two branches a chunk."""
    delay, turns = schedule.backward_delay, schedule.pipe > 1
    shape = TickShape(2, recompute, delay, turns=turns, split=split and delay == 1)
    sizes = {"pipe": schedule.pipe, "data": 2, "tensor": tensor}
    ends = (plan_phases(operations, sizes) for operations in (fill_operations(shape), settle_operations()))
    return step_stamps(schedule, shape, lambda kind: plan_tick(kind, shape, sizes, HEAD_GEMMS), *ends)


class FakeDevice(NamedTuple):
    number: int
    process_index: int


def fake_plan(stamps, mesh, own, clock=None):
    """What `StampEvents` asks of a plan; this process has the devices ``own``."""
    count = int(np.prod(mesh))
    devices = np.empty(count, object)
    for number in range(count):
        devices[number] = FakeDevice(number, int(number not in own))
    return SimpleNamespace(
        executor=SimpleNamespace(clock=clock or object(), stamps=lambda _: stamps),
        mesh=SimpleNamespace(devices=devices.reshape(mesh)),
        experiment=SimpleNamespace(num_micro_batches=stamps.schedule.micro_batches),
    )


def write_steps(run, stamps, mesh, steps, *, detail_every=1, ranks=1, attempt=0, seed=0, hosts=()):
    """A run's events of all devices of ``mesh``, evenly owned by ``ranks`` processes; the stamps of every step and device, ns.

    ``hosts``: by rank its host's name, and how much its clock is ahead, ns.
    """
    run.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    count = int(np.prod(mesh))
    lasted = rng.integers(1, 1000, (max(steps) + 1, count, stamps.count)) * 1000
    times = lasted.reshape(max(steps) + 1, count, -1).cumsum(-1) + 10**9 * np.arange(max(steps) + 1)[:, None, None]
    own = count // ranks
    for rank in range(ranks):
        numbers = range(rank * own, (rank + 1) * own)
        plan = fake_plan(stamps, mesh, numbers)
        events = Events(run / EVENTS_FOLDER, rank=rank, attempt=attempt)
        events.describe(mesh=mesh, devices=list(numbers))
        name, ahead_ns = hosts[rank] if hosts else ("", 0)
        if hosts:  # another kernel, with another monotonic clock that began as much later as its wall clock is ahead
            events.describe(host=name, boot_id=name)
        out = StampEvents(plan, events, detail_every)
        for step in steps:
            events.instant(PASSED, begin_ns=10**9 * step, lane="compute", device=numbers[0], step=step, tick=3)
            shards = [
                SimpleNamespace(device=device, data=(times[step, device.number] + ahead_ns).astype("<i8").view(np.int32).reshape(1, -1, 2))
                for device in plan.mesh.devices.flat
                if device.number in numbers
            ]
            out.write(step, SimpleNamespace(addressable_shards=shards))
            events.record("data", 10**9 * step, 500, step=step)
            events.record("step", 10**9 * step + 500, 10**8, step=step)
        events.close()
    return times

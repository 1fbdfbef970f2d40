"""Runs that never were: the stamps of our own schedule with made durations, written as a trainer writes them."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from megascale_jax.observe.events import Events
from megascale_jax.observe.step_sums import STEP_NAMES
from megascale_jax.parallel.pipeline.operations import fill_operations, settle_operations
from megascale_jax.parallel.pipeline.phases import plan_phases, plan_tick
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.parallel.pipeline.shape import HEAD_GEMMS, TickShape
from megascale_jax.parallel.pipeline.stamps import StepStamps, pass_of, step_stamps
from megascale_jax.train.stamps import StampEvents

BASE_S = {"forward": 1e-3, "backward": 2e-3, "weight": 1e-3, "head": 1e-3, "embed": 0.5e-3, "optimizer": 1e-3}
COMM_S = 0.1e-3

Scale = Callable[[str, int, int, int, int], float]
"""What a compute takes over the base: of its pass, pipe, data, tensor and step."""


def made_stamps(mesh=(2, 2, 2), micro_batches=4, chunks=2) -> StepStamps:
    sizes = dict(zip(("pipe", "data", "tensor"), mesh, strict=True))
    shape = TickShape(2, False, 1 if mesh[0] > 1 else 0, turns=mesh[0] > 1)
    schedule = Schedule(mesh[0], chunks, micro_batches, shape.backward_delay)
    ends = (plan_phases(operations, sizes) for operations in (fill_operations(shape), settle_operations()))
    return step_stamps(schedule, shape, lambda kind: plan_tick(kind, shape, sizes, HEAD_GEMMS), *ends)


def members(name, lane, mesh, device):
    """Devices that a wait of this name waits for, one by one from what each collective does."""
    p, d, t = np.unravel_index(device, mesh)
    if name == STEP_NAMES[2]:
        return set(range(int(np.prod(mesh))))
    found = set()
    for one in name.split(" + "):
        if one.startswith("P.send"):
            places = [((p + by) % mesh[0], d, t) for by in (-1, 0, 1)]
        elif one == "H.join":
            places = [(a, d, b) for a in range(mesh[0]) for b in range(mesh[2])]
        elif one in STEP_NAMES or one[0] == "Z":
            places = [(p, b, t) for b in range(mesh[1])]
        elif one in ("E.sum", "H.sum", "H.spread", "D.spread"):
            places = [(a, d, t) for a in range(mesh[0])]
        else:
            places = [(p, d, b) for b in range(mesh[2])]
        found |= {int(np.ravel_multi_index(place, mesh)) for place in places}
    return found


def play(stamps: StepStamps, mesh, scale, step, noise=None):
    """Seconds of every stamp since the step's begin, float64[device, count]: each device's own pace, and waiting for each other."""
    size = int(np.prod(mesh))
    places = [np.unravel_index(device, mesh) for device in range(size)]
    times = np.full((size, stamps.count), np.nan)
    times[:, 0] = 0
    start = now = np.zeros(size)
    computes = False
    for name, lane, end in zip(stamps.name, stamps.lane, stamps.end, strict=True):
        name, lane = stamps.names[name], stamps.lanes[lane]
        if lane == "compute":
            start = now
            of = name if name in BASE_S else pass_of(name)
            factors = np.array([scale(of, *map(int, place), step) for place in places])
            now = now + BASE_S[of] * factors * (1 if noise is None else 1 + noise * RANDOM.standard_normal(size))
        else:
            start = start if computes else now
            groups = [list(members(name, lane, mesh, device)) for device in range(size)]
            now = np.maximum(now, [start[group].max() + COMM_S for group in groups])
        computes = lane == "compute"
        times[:, end] = now
    for column in range(1, stamps.count):
        gone = np.isnan(times[:, column])
        times[gone, column] = times[gone, column - 1]
    return times


RANDOM = np.random.default_rng(0)


class _Device:
    process_index = 0


def made_run(run, *, mesh=(2, 2, 2), steps=range(1, 17), scale: Scale = lambda *_: 1.0, detail_every=8, lost=(), attempt=0, noise=None):
    """Write a run's events; ``lost``: pairs of step and device that nobody wrote."""
    stamps = made_stamps(mesh)
    devices = np.array([_Device() for _ in range(int(np.prod(mesh)))]).reshape(mesh)
    plan = SimpleNamespace(
        executor=SimpleNamespace(clock=object(), stamps=lambda _: stamps),
        experiment=SimpleNamespace(num_micro_batches=4),
        mesh=SimpleNamespace(devices=devices),
    )
    events = Events(run / "events", run="made", attempt=attempt)
    events.describe(run="made", mesh=mesh, devices=range(devices.size))
    writer = StampEvents(plan, events, detail_every)
    at_ns = 10**12 + attempt * 10**11
    for step in steps:
        times = play(stamps, mesh, scale, step, noise)
        for device in range(devices.size):
            if (step, device) not in lost:
                pipe = int(np.unravel_index(device, mesh)[0])
                writer._write_device(step, device, pipe, at_ns + np.rint(times[device] * 1e9).astype(np.int64))
        at_ns += int(times.max() * 1e9)
    events.close()
    return run

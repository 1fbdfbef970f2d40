"""Steps of a real program on the CPU's virtual devices, with the events that the trainer writes of them."""

import time

import jax
import numpy as np

from megascale_jax.config.load import load_experiment
from megascale_jax.observe.events import EVENTS_FOLDER, Events
from megascale_jax.parallel.plan import make_plan
from megascale_jax.train.stamps import StampEvents
from megascale_jax.train.state import initial_state
from megascale_jax.train.step import make_steps, place_batch, place_vote
from tests.build import TINY

SMALL = [*TINY, "model.num_layers=4", "train.events.stamps=true"]


def train_steps(run, steps, **parallel):
    """Train so many steps with details; the schedule, and the sizes of the mesh."""
    run.mkdir()
    experiment = load_experiment("quickstart", [*SMALL, *(f"parallel.{name}={value}" for name, value in parallel.items())])
    plan = make_plan(experiment, jax.devices())
    programs, events = make_steps(experiment, plan), Events(run / EVENTS_FOLDER)
    events.describe(mesh=plan.mesh.devices.shape, devices=list(range(plan.mesh.size)))
    out = StampEvents(plan, events, 1)
    out.begin(0)
    state, m = initial_state(plan, programs.optimizer, 0), experiment.num_micro_batches
    shape = (m, experiment.train.global_batch_size // m, experiment.model.sequence_length)
    tokens = np.random.default_rng(0).integers(0, 100, shape).astype(np.int32)
    positions = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape).copy()
    rows = {"tokens": tokens, "targets": tokens, "segment_ids": np.ones_like(tokens), "positions": positions}
    taken, counts = plan.executor.clock.taken, []
    untouched = [taken(device) or 0 for device in range(plan.mesh.size)]
    for step in range(1, steps + 1):
        began_ns = time.monotonic_ns()
        batch = place_batch(plan, rows)
        events.record("data", began_ns, time.monotonic_ns() - began_ns, step=step)
        with events.span("step", step=step):
            state, metrics = programs.train(state, batch, place_vote(plan, False))
            jax.block_until_ready((state, metrics))
        out.write(step, metrics["stamps"])
        counts.append([(taken(device) or 0) - before for device, before in enumerate(untouched)])
    events.close()
    each = plan.executor.stamps(m).count
    assert counts == [[step * each] * plan.mesh.size for step in range(1, steps + 1)], "every stamp of every device was counted"
    return plan.executor.schedule(m), plan.mesh.devices.shape

"""Traces of jobs that never ran: interleaved 1F1B by our own schedule table, with noise and whatever else a test puts in."""

from collections.abc import Callable

import numpy as np

from megascale_jax.config.layout import MeshShape
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.views.dependencies import build_graph
from megascale_jax.views.operations import CODES, NONE, OPTYPES, Operations, TraceLayout
from megascale_jax.views.replay import Replay

BASE_S = {"forward": 10e-3, "backward": 20e-3, "optimizer": 2e-3, "params-sync": 3e-3, "grads-sync": 4e-3, "gradient-norm": 1e-4}
TRANSFER_S = 2e-4

Scale = Callable[[str, int, int, int, int], float]
"""What an operation takes over the base: of its type, pipe, data, step and micro-batch."""


def table(rows, layout: TraceLayout) -> Operations:
    """Rows of ``(step, pipe, data, tensor, optype, microbatch, chunk, start_s, duration_s)``; ranks as in `MeshShape`."""
    step, pipe, data, tensor, optype, microbatch, chunk, start_s, duration_s = zip(*rows, strict=True)
    place = np.array([pipe, data, tensor])
    return Operations(
        step=np.array(step),
        rank=(place[0] * layout.mesh.data + place[1]) * layout.mesh.tensor + place[2],
        pipe=place[0],
        data=place[1],
        tensor=place[2],
        optype=np.array([CODES[name] for name in optype]),
        microbatch=np.array(microbatch),
        chunk=np.array(chunk),
        start_s=np.array(start_s, float),
        duration_s=np.array(duration_s, float),
        layout=layout,
    )


def program(schedule: Schedule, stage: int):
    """What a worker does in a step, in order: ``(optype, microbatch, chunk)``."""
    chunks, last = range(schedule.virtual_stages), schedule.period - 1
    yield from (("params-sync", NONE, chunk) for chunk in chunks)
    for tick in range(schedule.ticks):
        for direction, unit_at, ends in (("forward", schedule.forward, (0, last)), ("backward", schedule.backward, (last, 0))):
            unit = unit_at(tick, stage)
            if unit is None:
                continue
            virtual = unit.chunk * schedule.pipe + stage
            if schedule.pipe > 1 and virtual != ends[0]:
                yield f"{direction}-recv", unit.micro_batch, unit.chunk
            yield direction, unit.micro_batch, unit.chunk
            if schedule.pipe > 1 and virtual != ends[1]:
                yield f"{direction}-send", unit.micro_batch, unit.chunk
    yield from (("grads-sync", NONE, chunk) for chunk in reversed(chunks))
    yield "gradient-norm", NONE, NONE
    yield "optimizer", NONE, NONE


def made_trace(schedule: Schedule, *, data=4, tensor=1, steps=2, noise=0.05, seed=0, scale: Scale = lambda *_: 1.0) -> Operations:
    """A trace without gaps. Noise is that of each pass and transfer; tensor peers run in lock-step."""
    draw = np.random.default_rng(seed)
    layout = TraceLayout(MeshShape(schedule.pipe, data, tensor), schedule.virtual_stages, 1, "interleaved-1f1b")
    rows = []
    for step in range(steps):
        for pipe in range(schedule.pipe):
            for replica in range(data):
                for place, (optype, microbatch, chunk) in enumerate(program(schedule, pipe)):
                    seconds = BASE_S.get(optype, TRANSFER_S) * scale(optype, pipe, replica, step, microbatch)
                    seconds *= max(1 + noise * draw.standard_normal(), 0.1)
                    rows += [(step, pipe, replica, peer, optype, microbatch, chunk, place, seconds) for peer in range(tensor)]
    graph = build_graph(table(rows, layout))
    made = graph.operations
    starts = Replay(graph).ends(made.duration_s) - made.duration_s
    return Operations(**{name: getattr(made, name) for name in COLUMNS_BUT_START}, start_s=starts + 100 * made.step, layout=layout)


COLUMNS_BUT_START = ("step", "rank", "pipe", "data", "tensor", "optype", "microbatch", "chunk", "duration_s")


def names(operations: Operations) -> list[str]:
    """The operation types of all rows."""
    return [OPTYPES[code] for code in operations.optype]

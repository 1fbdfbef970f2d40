"""Which of a step's time stamps is which: the plan of the program that takes them (`engine.py`, `interleaved.py`), as data. No JAX.

A step takes stamps in this order: its begin; the first gather of weights; the phases that fill the pipeline; the ticks, loop by loop
(those of a loop's run one after the other for each of its repetitions, then the next run's); the last scatter of gradients; their
norm; the optimizer. In between, a *span* is what happened from one to another.

A phase is two spans. *compute*: from the end of the phase before until its compute is done, glue in front of it included. *wait*:
from there until its collectives are done as well: what the compute did not hide. So a rank that computes slowly has long
computes, and those that wait for it have long waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import numpy as np

from megascale_jax import axes
from megascale_jax.observe.step_sums import STEP_NAMES, Pass
from megascale_jax.parallel.pipeline.loops import training_loops
from megascale_jax.parallel.pipeline.phases import TickPlan
from megascale_jax.parallel.pipeline.schedule import Schedule, TickKind
from megascale_jax.parallel.pipeline.shape import TickShape

Lane = Literal["compute", "tensor", "pipe", "data"]
"""What a span is drawn with: computing, or waiting for a collective over a mesh axis."""


class Span(NamedTuple):
    """From the stamp with the number ``begin`` to that with the number ``end``, both counted from the first of its tick."""

    name: str
    lane: Lane
    of: Pass
    begin: int
    end: int


_SLOTS: dict[Pass, str] = {"forward": "FabT", "backward": "RBL", "weight": "W", "head": "H", "embed": "ED"}
PASSES: dict[str, Pass] = {slot: kind for kind, slots in _SLOTS.items() for slot in slots}
"""What the operations of a slot belong to; messages (``P``) and ZeRO's pieces (``Z``) belong to what they run beside."""

TOGETHER = " + "
"""Between the names of collectives that are waited for at once."""


def pass_of(name: str) -> Pass:
    """What the computation of this name belongs to."""
    return PASSES.get(name[0], "step")


def axes_of(name: str) -> tuple[str, ...]:
    """Mesh axes of the collective of this name in a tick (`operations.py`)."""
    if name == "H.join":
        return axes.PIPE, axes.TENSOR
    if name[0] == "Z":
        return (axes.DATA,)
    return (axes.PIPE,) if name.split(".")[-1].split("_")[0] in ("send", "spread", "sum") else (axes.TENSOR,)


def tick_spans(plan: TickPlan) -> tuple[int, tuple[Span, ...]]:
    """How many stamps the phases of a tick take, and their spans in order."""
    spans: list[Span] = []
    last = 0
    of: Pass = PASSES["F"]
    for phase in plan.phases:
        owners: list[Pass] = [PASSES[name[0]] for name in (phase.compute, *phase.collectives) if name and name[0] in PASSES]
        if owners:  # a message alone belongs to what came before it
            of = owners[0]
        if phase.compute is not None:
            spans.append(Span(phase.compute, "compute", of, last, last + 1))
            last += 1
        if phase.collectives:
            axis = cast(Lane, plan.by_name[phase.collectives[0]].axes[0])
            spans.append(Span(TOGETHER.join(phase.collectives), axis, of, last, last + 1))
            last += 1
    return last + 1, tuple(spans)


@dataclass(frozen=True)
class StepStamps:
    """The stamps of a step: how many, and its spans as columns of one length, in the order of the ticks; ``fill`` is tick -1.

    ``names``, ``lanes`` and ``passes`` are what the columns ``name``, ``lane`` and ``of`` index.
    """

    schedule: Schedule
    count: int
    names: tuple[str, ...]
    lanes: tuple[str, ...]
    passes: tuple[str, ...]
    name: np.ndarray
    lane: np.ndarray
    of: np.ndarray
    tick: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    def units(self, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """Micro-batch and chunk of every span on a stage, int32; ``-1``: a slot without a unit computes on nothing, or it has none."""
        found = [
            self._unit(self.passes[of], self.names[name], int(tick), stage)
            for of, name, tick in zip(self.of, self.name, self.tick, strict=True)
        ]
        micro_batches, chunks = np.array(found, np.int32).reshape(-1, 2).T
        return micro_batches, chunks

    def _unit(self, of: str, name: str, tick: int, stage: int) -> tuple[int, int]:
        schedule, last = self.schedule, self.schedule.virtual_stages - 1
        if of == "step":
            return -1, -1
        if of in ("forward", "backward"):
            late = tick - 1 if name[0] in LATE_SLOTS else tick
            unit = (schedule.forward if of == "forward" else schedule.backward)(late, stage)
            return (-1, -1) if unit is None else (unit.micro_batch, unit.chunk)
        if of == "weight":
            number = schedule.weight_unit(tick)
            return (-1, -1) if number is None else (schedule.decode(number)[0], last - schedule.decode(number)[1])
        if of == "head":
            micro_batch, chunk = schedule.at_head(tick), last
        else:
            micro_batch, chunk = (schedule.leaving if name[0] == "D" else schedule.entering)(tick), 0
        return (-1, -1) if micro_batch is None else (micro_batch, chunk)


LATE_SLOTS = "LT"
"""Slots that finish what the tick before has begun."""


def step_stamps(
    schedule: Schedule, shape: TickShape, plan_of: Callable[[TickKind], TickPlan], fill: TickPlan, settle: TickPlan
) -> StepStamps:
    """The stamps of a step: ``plan_of`` a kind of tick, ``fill`` before the first one, ``settle`` where ticks in halves end."""
    layout = _Layout([], 1)
    layout.step(STEP_NAMES[0], "data")
    layout.ticks(fill, [-1])
    in_halves = shape.split
    for loop in training_loops(schedule):
        if in_halves and not shape.in_halves(loop.runs[0].kind):
            layout.ticks(settle, [loop.start])
            in_halves = False
        first = loop.start
        for run in loop.runs:
            layout.ticks(
                plan_of(run.kind), [first + again * loop.period + tick for again in range(loop.repeats) for tick in range(run.ticks)]
            )
            first += run.ticks
    for name, lane in zip(STEP_NAMES[1:], ("data", "data", "compute"), strict=True):
        layout.step(name, lane)
    rows = sorted(layout.rows, key=lambda row: row[3])  # stable: a tick's spans stay in order
    names, lanes, passes = (tuple(dict.fromkeys(str(row[column]) for row in rows)) for column in range(3))
    codes = [[known.index(row[column]) for row in rows] for column, known in enumerate((names, lanes, passes))]
    columns = [np.array(column, np.int32) for column in (*codes, *zip(*(row[3:] for row in rows), strict=True))]
    return StepStamps(schedule, layout.place, names, lanes, passes, *columns)


@dataclass
class _Layout:
    """Rows of name, lane, pass, tick, begin and end, while the stamps of a step are counted."""

    rows: list[tuple[str, str, str, int, int, int]]
    place: int

    def step(self, name: str, lane: Lane) -> None:
        """From the last stamp to a new one."""
        tick = _FIRST if name == STEP_NAMES[0] else LAST_TICK
        self.rows.append((name, lane, "step", tick, self.place - 1, self.place))
        self.place += 1

    def ticks(self, plan: TickPlan, ticks: Sequence[int]) -> None:
        """Ticks one after the other."""
        count, spans = tick_spans(plan)
        for tick in ticks:
            self.rows += [(span.name, span.lane, span.of, tick, self.place + span.begin, self.place + span.end) for span in spans]
            self.place += count


_FIRST, LAST_TICK = -2, 2**31 - 1
"""Ticks of what comes before and after all ticks, for the order."""

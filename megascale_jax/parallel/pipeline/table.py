"""The schedule as one table of small integers: what every stage does in every tick. No JAX.

The step looks its row up instead of computing with tick and stage numbers, so that the only arithmetic about the schedule
is the one in `schedule.py`, which `validate` proves. Row 0 is the fill before the first tick, the last row that of the last
weight gradients.
"""

from dataclasses import dataclass, fields
from typing import Literal

from megascale_jax.parallel.pipeline.schedule import Schedule, Unit


@dataclass(frozen=True)
class Row:
    """One stage in one tick. An idle slot has busy 0, micro-batch 0, chunk 0 and the scratch slot behind all others.

    ``late_*`` is the unit whose backward pass ran in the tick before; ``next_*`` and ``past_*`` the ones that the forward slot
    runs in the next and ran in the last tick. ``*_first`` and ``*_last``: 1 where it is on the first or last virtual stage.
    ``entering``, ``head`` and ``leaving`` are micro-batches at the vocabulary, the same on all stages; ``head_busy`` 0: there
    is none at the head. ``keep_slot`` and ``recall_slot``: where this tick's backward pass puts the operands of its weight
    gradients, and where those of ``weight_chunk`` lie. ``gather_part`` and ``scatter_part`` are the parts that move of
    ``gather_chunk`` and ``scatter_chunk``. ``*_turns``: 1 where a slot takes another chunk's weights, the forward slot for the
    next tick; ``close_turns``: not before the window that ends with this tick is closed.
    """

    forward_micro_batch: int
    forward_chunk: int
    forward_slot: int
    forward_first: int
    backward_busy: int
    backward_micro_batch: int
    backward_chunk: int
    backward_slot: int
    backward_last: int
    late_chunk: int
    late_first: int
    next_chunk: int
    next_first: int
    past_chunk: int
    entering: int
    head: int
    head_busy: int
    leaving: int
    keep_slot: int
    recall_slot: int
    weight_chunk: int
    gather_chunk: int
    gather_part: int
    scatter_chunk: int
    scatter_part: int
    forward_turns: int
    backward_turns: int
    close_turns: int


def keep_slots(schedule: Schedule) -> int:
    """Slots for operands of weight gradients: stage ``s`` reads them ``s + 1`` ticks later, and never while it writes."""
    return schedule.pipe + 1


COLUMNS = {field.name: index for index, field in enumerate(fields(Row))}
"""Position of each field in a row of `schedule_table`."""


def schedule_row(schedule: Schedule, stage: int, tick: int) -> Row:
    """What a stage does in a tick, from -1 (fill) to the schedule's number of ticks (drain)."""
    idle = Unit(0, 0, schedule.slots)
    busy = schedule.forward(tick, stage) is not None
    forward, backward = schedule.forward(tick, stage) or idle, schedule.backward(tick, stage)
    late, following = schedule.backward(tick - 1, stage), schedule.forward(tick + 1, stage)
    at_head, slots = schedule.at_head(tick), keep_slots(schedule)
    turns = following is not None and following.chunk != _held(schedule, "forward", stage, tick + 1)
    closes = schedule.gathered(tick) is not None and schedule.closes_window(tick)
    gathered, scattered = schedule.gathered(tick) or (0, 0), schedule.scattered(tick) or (0, 0)
    last_stage, last_chunk = stage == schedule.pipe - 1, schedule.virtual_stages - 1
    return Row(
        forward_micro_batch=forward.micro_batch,
        forward_chunk=forward.chunk,
        forward_slot=forward.slot,
        forward_first=int(busy and stage == 0 and forward.chunk == 0),
        backward_busy=int(backward is not None),
        backward_micro_batch=(backward or idle).micro_batch,
        backward_chunk=(backward or idle).chunk,
        backward_slot=(backward or idle).slot,
        backward_last=int(backward is not None and last_stage and backward.chunk == last_chunk),
        late_chunk=(late or idle).chunk,
        late_first=int(late is not None and stage == 0 and late.chunk == 0),
        next_chunk=(following or idle).chunk,
        next_first=int(following is not None and stage == 0 and following.chunk == 0),
        past_chunk=(schedule.forward(tick - 1, stage) or idle).chunk,
        entering=(schedule.entering(tick) or 0) if tick >= 0 else 0,
        head=at_head or 0,
        head_busy=int(at_head is not None),
        leaving=schedule.leaving(tick) or 0,
        keep_slot=tick % slots,
        recall_slot=(tick - stage - 1) % slots,
        weight_chunk=schedule.weight_chunk(tick) or 0,
        gather_chunk=gathered[0],
        gather_part=gathered[1],
        scatter_chunk=scattered[0],
        scatter_part=scattered[1],
        forward_turns=int(turns and not closes),
        backward_turns=int(backward is not None and backward.chunk != _held(schedule, "backward", stage, tick)),
        close_turns=int(turns and closes),
    )


def _held(schedule: Schedule, direction: Literal["forward", "backward"], stage: int, tick: int) -> int:
    """Chunk whose weights a slot holds before a tick: that of its last unit; chunk 0 at first."""
    unit_at, number_at = (
        (schedule.forward, schedule.forward_unit) if direction == "forward" else (schedule.backward, schedule.backward_unit)
    )
    if number_at(tick - 1, stage) is None:
        return 0
    unit = unit_at(tick - 1, stage)
    assert unit is not None
    return unit.chunk


def schedule_table(schedule: Schedule) -> list[list[tuple[int, ...]]]:
    """``[stage][tick + 1][column]``, from the fill to the last weight gradients."""
    columns = list(COLUMNS)
    rows = [[schedule_row(schedule, stage, tick) for tick in range(-1, schedule.length)] for stage in range(schedule.pipe)]
    return [[tuple(getattr(row, column) for column in columns) for row in stage] for stage in rows]

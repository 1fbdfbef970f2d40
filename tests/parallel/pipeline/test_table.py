import pytest

from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.parallel.pipeline.table import COLUMNS, schedule_row, schedule_table


def test_table_holds_every_row_from_fill_to_drain():
    schedule = Schedule(2, 2, 4, 1)
    table = schedule_table(schedule)
    assert len(table) == 2 and all(len(stage) == schedule.length + 1 for stage in table)
    row = dict(zip(COLUMNS, table[1][1 + 5], strict=True))
    assert row["forward_micro_batch"] == 2 and row["forward_chunk"] == 0, "stage 1 in tick 5 runs unit 4"
    assert table[1][6] == tuple(getattr(schedule_row(schedule, 1, 5), column) for column in COLUMNS)


def test_operands_of_weight_gradients_are_read_where_they_were_put():
    schedule = Schedule(4, 2, 8, 1)
    for stage in range(4):
        rows = {tick: schedule_row(schedule, stage, tick) for tick in range(schedule.length)}
        for tick, row in rows.items():
            if schedule.weight_unit(tick) is not None:
                kept = tick - stage - 1
                assert row.recall_slot == rows[kept].keep_slot, "the slot of the tick of its backward pass"
                assert row.weight_chunk == rows[kept].backward_chunk
                assert row.recall_slot not in [rows[later].keep_slot for later in range(kept + 1, tick + 1)], "not overwritten since"


@pytest.mark.parametrize("delay", [0, 1])
def test_slots_hold_the_weights_of_their_chunk(delay):
    schedule = Schedule(4, 3, 8, delay)
    for stage in range(4):
        forward = backward = turns = 0
        for tick in range(-1, schedule.ticks):
            row = schedule_row(schedule, stage, tick)
            if unit := schedule.forward(tick, stage):
                assert unit.chunk == forward
            if row.backward_turns:
                backward, turns = row.backward_chunk, turns + 1
            if unit := schedule.backward(tick, stage):
                assert unit.chunk == backward
            if row.forward_turns or row.close_turns:
                arrived = [c for t in range(tick + 1 if row.close_turns else tick) if (moved := schedule.gathered(t)) for c in moved[:1]]
                assert row.next_chunk == 0 or arrived.count(row.next_chunk) == 4, "no sooner than it is complete"
                forward, turns = row.next_chunk, turns + 1
        assert turns <= 2 * schedule.units // schedule.pipe, "one a slot and window"


def test_idle_slots_point_at_the_scratch_slot_and_are_not_busy():
    schedule = Schedule(4, 1, 4)
    for stage in range(4):
        for tick in range(-1, schedule.length):
            row = schedule_row(schedule, stage, tick)
            if schedule.forward(tick, stage) is None:
                assert row.forward_slot == schedule.slots
            assert row.backward_busy == (schedule.backward(tick, stage) is not None)
            assert row.late_first in (0, 1) and (not row.late_first or stage == 0)

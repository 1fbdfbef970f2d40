from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.parallel.pipeline.table import COLUMNS, schedule_row, schedule_table


def test_table_holds_every_row_from_fill_to_drain():
    schedule = Schedule(2, 2, 4, 1)
    table = schedule_table(schedule)
    assert len(table) == 2 and all(len(stage) == schedule.ticks + 2 for stage in table)
    row = dict(zip(COLUMNS, table[1][1 + 5], strict=True))
    assert row["forward_micro_batch"] == 2 and row["forward_chunk"] == 0, "stage 1 in tick 5 runs unit 4"
    assert table[1][6] == tuple(getattr(schedule_row(schedule, 1, 5), column) for column in COLUMNS)


def test_idle_slots_point_at_the_scratch_slot_and_are_not_busy():
    schedule = Schedule(4, 1, 4)
    for stage in range(4):
        for tick in range(-1, schedule.ticks + 1):
            row = schedule_row(schedule, stage, tick)
            if schedule.forward(tick, stage) is None:
                assert row.forward_slot == schedule.slots
            assert row.backward_busy == (schedule.backward(tick, stage) is not None)
            assert row.late_first in (0, 1) and (not row.late_first or stage == 0)

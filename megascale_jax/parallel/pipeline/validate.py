"""Proves a schedule by walking it. No JAX."""

from collections.abc import Iterator
from typing import Literal

from megascale_jax.parallel.pipeline.schedule import Schedule, Unit


def validate(schedule: Schedule) -> None:
    """Prove the schedule by walking it: every unit once in each pass, in order of its dependencies, no slot shared.

    Raises AssertionError with the first fault found. Covers: one forward and one backward pass of every (virtual stage,
    micro-batch); each pass one tick or more after what it needs; residuals still in their slot when they are read; the
    bubble; the bound of the slots; weight gradients after the backward passes that they belong to; every chunk's weights
    there before its first forward pass, and its gradients complete before they leave.
    """
    forward_tick: dict[tuple[int, int], int] = {}
    backward_tick: dict[tuple[int, int], int] = {}
    holders: dict[tuple[int, int], tuple[int, int]] = {}
    for tick, stage, unit in _walk(schedule, "forward"):
        key = (unit.chunk * schedule.pipe + stage, unit.micro_batch)
        assert key not in forward_tick, f"forward of {key} runs twice"
        forward_tick[key] = tick
    for tick, stage, unit in _walk(schedule, "backward"):
        key = (unit.chunk * schedule.pipe + stage, unit.micro_batch)
        assert key not in backward_tick, f"backward of {key} runs twice"
        backward_tick[key] = tick
    virtual = schedule.period
    expected = {(stage, batch) for stage in range(virtual) for batch in range(schedule.micro_batches)}
    assert forward_tick.keys() == backward_tick.keys() == expected, "a unit is missing"
    for (stage, batch), tick in forward_tick.items():
        assert stage == 0 or forward_tick[stage - 1, batch] < tick, f"forward of {(stage, batch)} before its input"
        next_tick = backward_tick.get((stage + 1, batch))
        assert next_tick is None or next_tick < backward_tick[stage, batch], f"backward of {(stage, batch)} before its gradient"
    for batch in range(schedule.micro_batches):
        waited = backward_tick[virtual - 1, batch] - forward_tick[virtual - 1, batch]
        assert waited == schedule.backward_delay, f"micro-batch {batch} waits {waited} ticks at the head"
    assert max(forward_tick.values()) < schedule.warmup + schedule.steady, "a forward pass in the cool-down"
    assert min(backward_tick.values()) == schedule.warmup, "the first backward pass does not end the warm-up"
    for tick in range(schedule.ticks):
        for stage in range(schedule.pipe):
            if unit := schedule.forward(tick, stage):
                assert (stage, unit.slot) not in holders, f"slot {unit.slot} of stage {stage} is overwritten in tick {tick}"
                holders[stage, unit.slot] = (unit.micro_batch, unit.chunk)
            if unit := schedule.backward(tick, stage):
                assert holders.pop((stage, unit.slot)) == (unit.micro_batch, unit.chunk), f"wrong residuals in tick {tick}"
    _validate_windows(schedule, forward_tick, backward_tick)
    assert abs(schedule.bubble - (schedule.pipe - 1) / (schedule.virtual_stages * schedule.micro_batches)) < 1e-12
    assert schedule.slots <= schedule.slot_bound, f"{schedule.slots} slots, bound {schedule.slot_bound}"


def _validate_windows(schedule: Schedule, forward_tick: dict[tuple[int, int], int], backward_tick: dict[tuple[int, int], int]) -> None:
    p, v = schedule.pipe, schedule.virtual_stages
    gathered: dict[int, list[tuple[int, int]]] = {chunk: [] for chunk in range(1, v)}
    scattered: dict[int, list[tuple[int, int]]] = {chunk: [] for chunk in range(1, v)}
    weight_ticks: dict[int, list[int]] = {chunk: [] for chunk in range(v)}
    for tick in range(schedule.length):
        for moved, found in ((gathered, schedule.gathered(tick)), (scattered, schedule.scattered(tick))):
            if found is not None:
                moved[found[0]].append((tick, found[1]))
        if (unit := schedule.weight_unit(tick)) is not None:
            chunk = schedule.weight_chunk(tick)
            assert chunk is not None
            weight_ticks[chunk].append(tick)
            for stage in range(p):
                key = (chunk * p + stage, schedule.decode(unit)[0])
                assert tick - backward_tick[key] == stage + schedule.weight_delay, f"weight gradients of {key} in tick {tick}"
    for chunk in range(v):
        assert len(weight_ticks[chunk]) == schedule.micro_batches, f"weight gradients of chunk {chunk}: {weight_ticks[chunk]}"
        ends = [tick for tick in weight_ticks[chunk] if schedule.closes_window(tick)]
        assert ends == weight_ticks[chunk][p - 1 :: p], f"windows of chunk {chunk} end after {ends}"
    for chunk in range(1, v):
        first_forward = min(forward_tick[chunk * p + stage, 0] for stage in range(p))
        for moved in (gathered[chunk], scattered[chunk]):
            assert [part for _, part in moved] == list(range(p)), f"parts of chunk {chunk}: {moved}"
        assert gathered[chunk][-1][0] < first_forward, f"chunk {chunk} arrives too late"
        assert scattered[chunk][0][0] > weight_ticks[chunk][-1], f"chunk {chunk} leaves too early"


def _walk(schedule: Schedule, direction: Literal["forward", "backward"]) -> Iterator[tuple[int, int, Unit]]:
    slot = schedule.forward if direction == "forward" else schedule.backward
    for tick in range(schedule.ticks):
        for stage in range(schedule.pipe):
            if (unit := slot(tick, stage)) is not None:
                yield tick, stage, unit

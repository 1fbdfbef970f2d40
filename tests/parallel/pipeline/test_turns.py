"""What copying weights costs: once a window where it is planned, in every tick anywhere else. Stages as a clockwork, no JAX."""

import pytest

from megascale_jax.parallel.pipeline.operations import tick_operations
from megascale_jax.parallel.pipeline.phases import Phase, plan_phases
from megascale_jax.parallel.pipeline.schedule import Schedule, TickKind
from megascale_jax.parallel.pipeline.shape import HEAD_GEMMS, TickShape
from megascale_jax.parallel.pipeline.table import schedule_row

SCHEDULE = Schedule(8, 6, 32, 1)
KIND = TickKind(forward=True, backward=True, weight_gradients=True)
COPY, MESSAGE = 1.0, 0.3
"""Length of a copy and of a message, about as in gpt-175b; a phase with a kernel takes 1."""


def planned():
    halved = frozenset((branch, matrix) for branch in (0, 1) for matrix in ("in", "out"))
    operations = tick_operations(KIND, TickShape(2, False, 1, halved))
    return plan_phases(operations, {"pipe": 8, "data": 8, "tensor": 8}, HEAD_GEMMS).phases


def moved_to_the_end(phases):
    copies = tuple(name for phase in phases for name in phase.copies)
    bare = tuple(Phase(phase.compute, phase.collectives) for phase in phases)
    return (*bare, Phase(None, (), copies))


def step_time(phases, copy):
    """All stages through all ticks; a message leaves where its sender begins the phase, and the receiver's phase waits for it."""
    p = SCHEDULE.pipe
    clock = [0.0] * p
    for tick in range(SCHEDULE.ticks):
        rows = [schedule_row(SCHEDULE, stage, tick) for stage in range(p)]
        for phase in phases:
            began = list(clock)
            for stage in range(p):
                turns = {
                    "P.turn_forward": rows[stage].forward_turns or rows[stage].close_turns,
                    "P.turn_backward": rows[stage].backward_turns,
                }
                own = began[stage] + (1.0 if phase.compute else 0.0) + sum(copy for name in phase.copies if turns[name])
                sender = {"P.send_y": stage - 1, "P.send_g": stage + 1}
                sent = [began[sender[name] % p] + MESSAGE for name in phase.collectives if name in sender]
                clock[stage] = max([own, *sent])
    return max(clock)


def test_copies_beside_the_messages_cost_once_a_window():
    added = step_time(planned(), COPY) - step_time(planned(), 0.0)
    windows = SCHEDULE.units // SCHEDULE.pipe
    assert added <= 2 * COPY * windows * 1.2
    assert added >= 2 * COPY * (windows - 1), "they are not free either"


def test_copies_between_ticks_would_add_up_over_the_stages():
    late = moved_to_the_end(planned())
    added = step_time(late, COPY) - step_time(late, 0.0)
    assert added > 2 * (step_time(planned(), COPY) - step_time(planned(), 0.0))


@pytest.mark.parametrize("copy", [0.2, 1.5])
def test_the_cost_is_in_proportion(copy):
    added = step_time(planned(), copy) - step_time(planned(), 0.0)
    assert added == pytest.approx(copy / COPY * (step_time(planned(), COPY) - step_time(planned(), 0.0)), rel=0.3)

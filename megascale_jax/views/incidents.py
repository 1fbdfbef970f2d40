"""Interruptions of a run's training, and what each cost. No JAX.

An interruption goes from the end of the last step before to the end of the first step (with its compilation) of the processes that go on.
It costs what is booked in between, and the steps of the processes before that were done in vain (`booking.py`: recomputed). After
the last step of all there is one that is not over if there was a hang, a restart or a diagnosis.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megascale_jax.observe.booked import Kind
from megascale_jax.views.booking import HANG, Timeline
from megascale_jax.views.driver_phases import DriverEvents
from megascale_jax.views.passes import Passes


@dataclass(frozen=True)
class Incident:
    """Nanoseconds since 1970. ``step``: newest that was done; ``resumed_step``: after which it went on; ``None``: it did not so far.

    ``lost_ns``: by class, all of it; ``cause``: the driver's words, empty without a driver.
    """

    number: int
    begin_ns: int
    end_ns: int
    step: int
    resumed_step: int | None
    recomputed_steps: int
    cause: str
    lost_ns: Mapping[Kind, int]

    @property
    def is_over(self) -> bool:
        """Whether the training went on."""
        return self.resumed_step is not None


def find_incidents(passes: Passes, lost: np.ndarray, timeline: Timeline, driver: DriverEvents) -> tuple[Incident, ...]:
    """All interruptions, in order; ``lost`` as of `goodput.lost_passes`."""
    trains = passes.of("compile", "step") & (passes.step > 0) & (passes.is_open == 0)
    if not trains.any():
        return ()
    begins, starts = _starts(passes, trains)
    rows = np.flatnonzero(trains)
    start_of = np.searchsorted(begins, passes.begin_ns[rows], "right") - 1
    rows = rows[np.argsort(start_of, kind="stable")]
    edges = np.cumsum(np.bincount(start_of, minlength=len(starts)))
    found: list[Incident] = []
    for number in range(len(starts)):
        own = rows[edges[number - 1] if number else 0 : edges[number]]
        begin_ns = int(passes.end_ns[own].max())
        is_last = number + 1 == len(starts)
        end_ns = int(timeline.edges_ns[-1]) if is_last else starts[number + 1][1]
        spent = timeline.booked_ns(begin_ns, end_ns)
        if is_last and not (timeline.activities_ns(begin_ns, end_ns)[HANG] or spent["restart"] or spent["diagnosis"]):
            break
        before = timeline.booked_ns(int(begins[number]), begin_ns)
        costs: dict[Kind, int] = {kind: spent[kind] + (before[kind] if kind == "recomputed" else 0) for kind in spent if kind != "training"}
        vain = own[lost[own]]
        found.append(
            Incident(
                len(found) + 1,
                begin_ns,
                end_ns,
                int(passes.step[own].max()),
                None if is_last else starts[number + 1][0] - 1,
                int(np.unique(passes.step[vain]).size),
                next((words for at_ns, words in driver.causes if begins[number] <= at_ns <= end_ns and at_ns >= begin_ns - _EARLY_NS), ""),
                {kind: cost for kind, cost in costs.items() if cost},
            )
        )
    return tuple(found)


_EARLY_NS = 60 * 10**9
"""How long before the last step's end the driver may have had its reason: other ranks went on, and hosts' clocks differ."""


def _starts(passes: Passes, trains: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Begins of the starts that came to a step, int64[n]; of each the first step, and when the last of its processes had done it.

    Processes belong to one start if each begins before any has done a step.
    """
    firsts: list[tuple[int, int, int]] = []
    for number, one in enumerate(passes.processes):
        own = np.flatnonzero(trains & (passes.process == number))
        if own.size:
            first = own[np.argmin(passes.step[own])]
            firsts.append((one.begin_ns, int(passes.step[first]), int(passes.end_ns[first])))
    begins: list[int] = []
    starts: list[tuple[int, int]] = []
    for begin_ns, step, end_ns in sorted(firsts):
        if starts and begin_ns < starts[-1][1]:
            starts[-1] = (min(step, starts[-1][0]), max(end_ns, starts[-1][1]))
        else:
            begins.append(begin_ns)
            starts.append((step, end_ns))
    return np.array(begins, np.int64), starts

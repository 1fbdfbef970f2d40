"""Steps of a run for the heat map: what every device takes beyond its peers, by pass and by step, who is slow, what that costs."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascale_jax.config.layout import MeshShape
from megascale_jax.errors import UsageError
from megascale_jax.observe.event_store import read_events
from megascale_jax.views.dashboard.packed import fractions, packed
from megascale_jax.views.phases_replay import read_replays
from megascale_jax.views.run_heat_map import SPAN
from megascale_jax.views.run_what_if import RunCosts, find_costs
from megascale_jax.views.slow_devices import SlowDevices, excess_of_steps, find_slow
from megascale_jax.views.step_times import StepTimes, read_step_times

Steps = tuple[int | None, int | None]
"""``first <= step < end``; either may be None."""
MOST_CELLS = 4_000_000
"""Devices times steps of a window: 325 steps of 12,288 devices. Of each pass a browser gets two bytes a cell."""
_LAST_STEP = 1 << 30
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Window:
    """``excess`` by pass, int16[device] in ten-thousandths, over all steps; ``by_step`` the same [step, device] (`packed.fractions`).

    ``number``: of this reading, so that a browser knows whether it has it.
    """

    mesh: MeshShape
    steps: np.ndarray
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    excess: dict[str, np.ndarray]
    by_step: dict[str, np.ndarray]
    slow: SlowDevices
    step_s: float
    notes: tuple[str, ...]
    number: int

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of passes."""
        return tuple(self.excess)


def read_window(run: Path, steps: Steps) -> Window:
    """Read one. Raises UsageError, RunFolderError."""
    times = read_step_times(run, steps)
    return window_of(times, find_slow(times))


def window_of(times: StepTimes, slow: SlowDevices) -> Window:
    """The window of times that were read. Raises UsageError when they are too many to be shown."""
    if times.steps.size * times.mesh.size > MOST_CELLS:
        raise UsageError(
            f"{times.steps.size} steps of {times.mesh.size} devices are too many to show at once; "
            f"choose at most {MOST_CELLS // times.mesh.size} steps"
        )
    return Window(
        times.mesh,
        times.steps,
        times.ranks or (-1,) * times.mesh.size,
        times.hosts or ("",) * times.mesh.size,
        {name: fractions(excess.ravel()) for name, excess in slow.excess.items()},
        {name: fractions(excess_of_steps(seconds).reshape(times.steps.size, -1)) for name, seconds in times.computed.items()},
        slow,
        float(np.nanmedian(times.whole)),
        (*times.notes, *slow.notes),
        next(_numbers),
    )


def read_costs(run: Path, steps: Steps) -> tuple[RunCosts, tuple[str, ...]]:
    """What slow parts cost, by replay, and notes. Raises as `read_window`."""
    first, end = steps
    times = read_step_times(run, steps)
    with read_events(run, steps=None if first is None and end is None else range(first or 0, _LAST_STEP if end is None else end)) as store:
        replays, notes = read_replays(store, times)
    return find_costs(replays, times.mesh, find_slow(times).devices), notes


def cells(window: Window, chosen: str) -> bytes:
    """What the drawings show: all passes over the window, and the ``chosen`` pass step by step."""
    names = sorted(set(window.hosts))
    codes = {name: code for code, name in enumerate(names)}
    facts = {
        "mesh": [window.mesh.pipe, window.mesh.data, window.mesh.tensor],
        "steps": window.steps.tolist(),
        "passes": window.passes,
        "chosen": chosen,
        "span": SPAN,
        "hosts": names,
        "slow": [[one.device, one.optype] for one in window.slow.devices],
    }
    return packed(
        facts,
        {
            "excess": np.array([*window.excess.values()], np.int16),
            "by_step": window.by_step[chosen],
            "rank": np.array(window.ranks, np.int32),
            "host": np.array([codes[name] for name in window.hosts], np.int32),
        },
    )

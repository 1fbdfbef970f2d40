"""What takes longer in a run's steps than it did: two ranges of steps compared segment by segment, from the stamps of devices. No JAX.

A step's time, from the end of one to the end of the next, is cut into

- what the slowest device of each pass computes (``forward``, ``backward``, ``optimizer``, ...) and the pipeline's idle slots;
- what devices wait for at each axis' collectives, in two parts. The device that comes last to a collective waits for the messages alone:
  the least wait over the devices of an axis is ``messages``. What the others wait longer is for those that come late: ``late launch``. The
  collective that ends a step, in which the gradients are reduced, stands by itself. In the paper's case (section 6.3) forward and backward
  were flat, the waits there grew, and the bandwidth was steady: so ranks launched it late, by a skew that drifts;
- ``data wait`` and ``host``: what the devices' steps do not cover.

Growth is in seconds a step, its share that of the growth of the whole step. Parts overlap on different devices, so shares need not sum up.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascale_jax.observe.event_sums import SumsReader
from megascale_jax.observe.step_sums import STEP_NAMES
from megascale_jax.views.step_seconds import StepSeconds
from megascale_jax.views.step_times import StepTimes, read_step_times

PIECES, PIECE_STEPS = 8, 16
"""So many pieces of each range, of so many steps, are read: a range may have 100,000s. What disturbed one piece does not count."""
LATE, MESSAGES, WAIT = "late launch", "messages", "wait"
"""``wait``: of an axis along which one device alone was read."""
_WAITS = (LATE, MESSAGES, WAIT)
_AXES = {"pipe": 1, "data": 2, "tensor": 3}
_LAST = STEP_NAMES[1]


@dataclass(frozen=True)
class Grown:
    """A segment of a step: seconds before and after, and its share of what the step takes longer; negative where it shrank.

    ``device``: of the mesh, of which it grew most; ``None`` for what no single one has.
    """

    segment: str
    before_s: float
    after_s: float
    share: float
    device: int | None = None

    @property
    def growth_s(self) -> float:
        """Seconds a step that it takes longer."""
        return self.after_s - self.before_s


def find_grown(
    run: Path, seconds: StepSeconds, before: tuple[int, int], after: tuple[int, int]
) -> tuple[tuple[Grown, ...], tuple[str, ...]]:
    """Segments of the steps ``after`` against those ``before`` (first and last step), most growth first; notes.

    Raises UsageError when the run has no stamps of one of both.
    """
    reader = SumsReader(run)
    old, new = (_segments(reader, seconds, steps) for steps in (before, after))
    growth = _mean_of(seconds.seconds, seconds, after) - _mean_of(seconds.seconds, seconds, before)
    if {name: part.shape for name, part in old.items()} != {name: part.shape for name, part in new.items()}:
        return (), ("what takes longer is not known: the mesh or the schedule changed in between",)
    found: list[Grown] = []
    for name in old:
        is_wait = name.startswith(_WAITS)  # of which the mean counts: what one device does the others wait for
        pair = [float(np.nanmean(one[name]) if is_wait else np.nanmax(one[name])) for one in (old, new)]
        device = int(np.nanargmax(new[name] - old[name])) if new[name].size > 1 and not is_wait else None
        found.append(Grown(name, pair[0], pair[1], (pair[1] - pair[0]) / growth if growth > 0 else float("nan"), device))
    return tuple(sorted(found, key=lambda one: (-one.growth_s, one.segment))), ()


def _mean_of(values: np.ndarray, seconds: StepSeconds, steps: tuple[int, int]) -> float:
    return float(values[(seconds.steps >= steps[0]) & (seconds.steps <= steps[1])].mean())


def _segments(reader: SumsReader, seconds: StepSeconds, steps: tuple[int, int]) -> dict[str, np.ndarray]:
    """Mean seconds of each segment by device, float64[devices] (NaN: not known), or of the whole job, [1]."""
    first, last = steps
    begins = np.unique(np.linspace(first, max(last + 1 - PIECE_STEPS, first), PIECES).astype(int)).tolist()
    pieces = [_cut(read_step_times(reader, (begin, min(begin + PIECE_STEPS, last + 1)))) for begin in begins]
    pieces = [piece for piece in pieces if piece["whole"].shape == pieces[-1]["whole"].shape]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a device that was not read
        found = {name: np.nanmedian([piece[name] for piece in pieces if name in piece], axis=0) for name in pieces[-1]}
    step_s, rows_s = (_mean_of(values, seconds, steps) for values in (seconds.seconds, seconds.rows))
    found["data wait"] = np.array([rows_s])
    found["host"] = np.maximum(step_s - found.pop("whole") - rows_s, 0.0)
    return found


def _cut(times: StepTimes) -> dict[str, np.ndarray]:
    """Means over steps of the parts of a device's step, float64[devices]."""
    parts = {**times.computed, "idle": times.idle, "whole": times.whole}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for (name, lane), wait in times.waits.items():
            key = _LAST if name == _LAST else lane
            seen = (~np.isnan(wait)).sum(axis=_AXES[lane])
            split = {f"{WAIT}, {key}": wait}
            if seen.max(initial=0) > 1 or wait.shape[_AXES[lane]] == 1:
                least = np.nanmin(wait, axis=_AXES[lane], keepdims=True) + np.zeros_like(wait)
                split = {f"{LATE}, {key}": wait - least, f"{MESSAGES}, {key}": least}
            for segment, part in split.items():
                parts[segment] = parts[segment] + part if segment in parts else part
        return {name: np.nanmean(part, axis=0).ravel() for name, part in parts.items()}

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

from dataclasses import dataclass

import numpy as np

from megascale_jax.observe.event_store import EventStore
from megascale_jax.parallel.pipeline.stamps import STEP_NAMES
from megascale_jax.views.step_seconds import StepSeconds
from megascale_jax.views.step_times import StepTimes, read_step_times

PIECES, PIECE_STEPS = 8, 16
"""So many pieces of each range, of so many steps, are read: a range may have 100,000s. What disturbed one piece does not count."""
LATE, MESSAGES = "late launch", "messages"
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
    store: EventStore, seconds: StepSeconds, before: tuple[int, int], after: tuple[int, int]
) -> tuple[tuple[Grown, ...], tuple[str, ...]]:
    """Segments of the steps ``after`` against those ``before`` (first and last step), most growth first; notes.

    Raises UsageError when the run has no stamps of either, or its mesh changed.
    """
    ranges = [_segments(store, seconds, steps) for steps in (before, after)]
    whole = [_seconds_of(seconds, steps)[0] for steps in (before, after)]
    growth = whole[1] - whole[0]
    found: list[Grown] = []
    for name in ranges[0].keys() | ranges[1].keys():
        old, new = (one.get(name) for one in ranges)
        if old is None or new is None or old.shape != new.shape:
            return (), ("what takes longer is not known: the mesh or the schedule changed in between",)
        is_wait = name.startswith((LATE, MESSAGES))  # of which the mean counts: what one device does the others wait for
        device = int(np.argmax(new - old)) if new.size > 1 and not is_wait else None
        pair = [float(one.mean() if is_wait else one.max()) for one in (old, new)]
        found.append(Grown(name, pair[0], pair[1], (pair[1] - pair[0]) / growth if growth > 0 else float("nan"), device))
    return tuple(sorted(found, key=lambda one: (-one.growth_s, one.segment))), ()


def _seconds_of(seconds: StepSeconds, steps: tuple[int, int]) -> tuple[float, float]:
    """Means of a step and of its wait for rows."""
    rows = (seconds.steps >= steps[0]) & (seconds.steps <= steps[1])
    return float(seconds.seconds[rows].mean()), float(seconds.rows[rows].mean())


def _segments(store: EventStore, seconds: StepSeconds, steps: tuple[int, int]) -> dict[str, np.ndarray]:
    """Mean seconds of each segment by device, float64[devices], or of the whole job, [1]."""
    first, last = steps
    begins = np.unique(np.linspace(first, max(last + 1 - PIECE_STEPS, first), PIECES).astype(int))
    pieces = [_cut(read_step_times(store, (int(begin), min(int(begin) + PIECE_STEPS, last + 1)))) for begin in begins]
    names = dict.fromkeys(name for piece in pieces for name in piece)
    found = {name: np.nanmedian([piece[name] for piece in pieces if name in piece], axis=0) for name in names}
    step_s, rows_s = _seconds_of(seconds, steps)
    found["data wait"] = np.array([rows_s])
    found["host"] = np.maximum(step_s - found.pop("whole") - rows_s, 0.0)
    return found


def _cut(times: StepTimes) -> dict[str, np.ndarray]:
    """Means over steps of the parts of a device's step, float64[devices]."""
    found = {name: _mean(part) for name, part in (*times.computed.items(), ("idle", times.idle), ("whole", times.whole))}
    lanes: dict[str, np.ndarray] = {}
    for (name, lane), wait in times.waits.items():
        key, axis = (_LAST, "data") if name == _LAST else (lane, lane)
        least = np.broadcast_to(np.nanmin(wait, axis=_AXES[axis], keepdims=True), wait.shape)
        for kind, part in ((LATE, wait - least), (MESSAGES, least)):
            lanes[f"{kind}, {key}"] = lanes.get(f"{kind}, {key}", np.zeros_like(part)) + part
    return found | {name: _mean(part) for name, part in lanes.items()}


def _mean(seconds: np.ndarray) -> np.ndarray:
    return np.nanmean(seconds, axis=0).ravel()

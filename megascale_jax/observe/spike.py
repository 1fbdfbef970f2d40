"""Loss spikes: steps in a row whose loss is far above what it was, and how a run could be rewound to before them. Pure.

*Far* is a number of median absolute deviations above the median of the last good steps, so neither a slope nor a few outliers move the
limit. Losses that are not finite are another matter (skipped steps) and count for nothing. A level that stays for as long as the
window is a new level and no spike. Every rank sees the same losses, so all find the same.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

_TO_DEVIATION = 1.4826
"""Standard deviations of a normal distribution in a median absolute one."""
_LEAST = 0.005
"""Of the median: a deviation taken for smaller would make spikes of rounding."""
_YOUNG = 10
"""Times the steps that make a spike."""


@dataclass(frozen=True)
class Spike:
    """Steps ``first`` to ``last`` were too high.

    ``begin`` to ``end - 1`` are the samples that they were trained on, and those of some steps before; ``rewind_step``: the newest
    checkpoint from before those, ``None`` when none is known.
    """

    first: int
    last: int
    rewind_step: int | None
    begin: int
    end: int


class SpikeWatch:
    """Looks at one loss after the other. A spike has ``steps`` in a row above median + ``deviations`` x MAD of ``window`` good ones."""

    def __init__(self, *, window: int, deviations: float, steps: int, margin: int, keep: int, every: int | None):
        """``margin``: steps before a spike whose samples go with it; ``keep``, ``every``: of the checkpoints."""
        self._good: deque[float] = deque(maxlen=window)
        self._deviations, self._steps, self._keep, self._every = deviations, steps, keep, every
        self._positions: deque[tuple[int, int]] = deque(maxlen=margin + 1)
        self._durable: list[int] = []
        self._saved = 0
        self._high: list[float] = []
        self._first = 0
        self._before = (0, 0)

    def begin(self, step: int, position: int) -> None:
        """Training goes on after ``step`` steps and ``position`` samples of the order."""
        self._positions.append((step, position))

    def saved(self, step: int) -> None:
        """A state has been handed to the keeper."""
        self._saved = max(self._saved, step)

    def durable(self, step: int) -> None:
        """A checkpoint is on storage."""
        if step not in self._durable[-1:]:
            self._durable.append(step)
            del self._durable[: -self._keep]
            self.saved(step)

    @property
    def is_young(self) -> bool:
        """Whether the loss is too high now, and has not been for much longer than a spike takes."""
        return 0 < len(self._high) <= _YOUNG * self._steps

    def seen(self, step: int, loss: float, position: int) -> Spike | None:
        """The spike that goes on after ``step``, whose batch ended at sample ``position`` of the order."""
        if not math.isfinite(loss):
            return None
        if len(self._good) == self._good.maxlen and loss > self.limit:
            if not self._high:
                self._first, self._before = step, self._positions[0]
            self._high.append(loss)
            if len(self._high) >= (self._good.maxlen or 0):
                self._good.clear()
                self._good.extend(self._high)
                self._positions.append((step, position))
                self._high = []
        else:
            self._good.append(loss)
            self._positions.append((step, position))
            self._high = []
        if len(self._high) < self._steps:
            return None
        return Spike(self._first, step, self._rewind_step(), self._before[1], position)

    @property
    def limit(self) -> float:
        """What a loss may not be above, by the good steps so far."""
        usual = median(self._good)
        deviation = _TO_DEVIATION * median(abs(loss - usual) for loss in self._good)
        return usual + self._deviations * max(deviation, _LEAST * abs(usual))

    def _rewind_step(self) -> int | None:
        """The newest checkpoint from before the samples that go, of those that retention has not let go meanwhile."""
        kept = self._saved - self._keep * (self._every or 0)
        return max((step for step in self._durable if kept < step <= self._before[0]), default=None)

"""Tokens per second, MFU and time left, from the moments at which steps complete. No JAX.

Call `step_done` each time the result of a step has arrived. The time between two completions, less what `pause` booked in
between (evaluation, a blocking save), is one step's time. The first completion only starts the clock, because it follows the compilation.

MFU convention: *training FLOPs per token x tokens/s / peak FLOP/s of all devices*. FLOPs per token are those of the model
(forward and backward, from `model/flops.py`), so recomputation lowers MFU and padding rows count as tokens.

Failure case: a pause entered while a step still runs on the device hides that step's time; drain the device first.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class ThroughputSummary:
    """The whole run so far. Rates are None until two steps have completed."""

    measured_steps: int
    measured_s: float
    paused_s: float
    tokens_per_s: float | None
    mfu: float | None


class Throughput:
    """Rolling and overall rates of one try of a run.

    `flops_per_token` in FLOPs, `peak_flops_total` in FLOP/s over all devices; `window` is the number of latest steps
    behind the rolling rates. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops_total: float,
        *,
        window: int = 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert tokens_per_step > 0 and peak_flops_total > 0 and window > 0
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_token
        self._peak_flops_total = peak_flops_total
        self._clock = clock
        self._recent_s: deque[float] = deque(maxlen=window)
        self._last_done: float | None = None
        self._pause_depth = 0
        self._paused_since_done_s = 0.0
        self._measured_steps = 0
        self._measured_s = 0.0
        self._paused_s = 0.0

    def step_done(self) -> None:
        """Book the completion of a step, now."""
        assert self._pause_depth == 0, "a step cannot complete inside a pause"
        now = self._clock()
        if self._last_done is not None:
            step_s = now - self._last_done - self._paused_since_done_s
            self._recent_s.append(step_s)
            self._measured_steps += 1
            self._measured_s += step_s
        self._last_done = now
        self._paused_since_done_s = 0.0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Book the time inside as no part of any step, also if it ends in an exception. Pauses may nest."""
        began = self._clock()
        self._pause_depth += 1
        try:
            yield
        finally:
            self._pause_depth -= 1
            if self._pause_depth == 0:
                pause_s = self._clock() - began
                self._paused_since_done_s += pause_s
                self._paused_s += pause_s

    @property
    def last_step_s(self) -> float | None:
        """Seconds of the newest step; None until two steps have completed."""
        return self._recent_s[-1] if self._recent_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second over the latest steps; None until two steps have completed."""
        return self._rate(len(self._recent_s), sum(self._recent_s))

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation over the latest steps, a fraction; None until two steps have completed."""
        return self._utilisation(self.tokens_per_s)

    def eta_s(self, steps_left: int) -> float | None:
        """Seconds that `steps_left` steps take at the rolling rate, pauses not foreseen; None before there is a rate."""
        rate = self.tokens_per_s
        return None if rate is None else steps_left * self._tokens_per_step / rate

    def summary(self) -> ThroughputSummary:
        """Rates over all measured steps of this try."""
        rate = self._rate(self._measured_steps, self._measured_s)
        return ThroughputSummary(self._measured_steps, self._measured_s, self._paused_s, rate, self._utilisation(rate))

    def _rate(self, steps: int, seconds: float) -> float | None:
        return steps * self._tokens_per_step / seconds if seconds > 0 else None

    def _utilisation(self, rate: float | None) -> float | None:
        return None if rate is None else self._flops_per_token * rate / self._peak_flops_total

"""Whether a run trains slower than it did, and what takes longer: MFU over its steps, with an alarm on decay. No JAX.

Steps are put into at most `MOST_WINDOWS` windows of equal length, at least `LEAST_STEPS` each; the level of a window is its MFU, by the
mean time of its steps and `metrics.jsonl`, or without that its speed. **The rule**: the median level of the last quarter of the windows
is below that of the best quarter before it by `LEAST_DECAY` at least, and by `SIGMAS` times the error of that difference. The error is
that of two medians, by how windows scatter around their quarter's (1.4826 MAD), with what neighbours have in common
(sqrt((1 + r) / (1 - r)), r their correlation): a machine that is disturbed for a while is no decay. Theil's slope is shown beside it
and decides nothing. With 5 % noise a step, a decay of 5 % over the run is found from about 1,000 steps on.

The segment that grew is found in the stamps (`grown.py`), only on alarm. Failure case: fewer than `FEWEST_WINDOWS` windows; no alarm
then, and a note says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megascale_jax.errors import UsageError
from megascale_jax.views.grown import Grown, find_grown
from megascale_jax.views.step_seconds import StepSeconds

MOST_WINDOWS, FEWEST_WINDOWS, LEAST_STEPS = 256, 32, 10
LEAST_DECAY = 0.02
"""Of the level before, below which no decay is worth an alarm: days and nights of a large job differ by 1 to 2 % (Llama 3, section 3.3)."""
SIGMAS = 4.0
_QUARTERS = 4
_MAD, _MEDIAN_ERROR, _MOST_CORRELATION = 1.4826, 1.2533, 0.9


@dataclass(frozen=True)
class MfuTrend:
    """``steps``: last one of each window, int64[windows]; ``levels`` float64[windows]: MFU, or steps/s where ``is_mfu`` is False.

    ``decay``: of the last quarter below the best one before, a fraction, negative where it is above; ``error``: its standard error;
    ``per_1000_steps``: Theil's slope, as a fraction of the median level; all NaN with too few windows. ``best``: first and last step of the
    best quarter, ``last``: of the last one. ``grown``: on alarm, what takes longer, most first.
    """

    steps: np.ndarray
    levels: np.ndarray
    is_mfu: bool
    decay: float
    error: float
    per_1000_steps: float
    best: tuple[int, int] | None
    last: tuple[int, int] | None
    is_alarm: bool
    grown: tuple[Grown, ...]
    notes: tuple[str, ...]

    @property
    def level(self) -> float | None:
        """Median level of the last quarter, or of all windows if they are too few; ``None`` without any."""
        if not self.levels.size:
            return None
        count = self.levels.size // _QUARTERS if self.last is not None else 0
        return float(np.median(self.levels[-count:]))


def find_trend(run: Path, seconds: StepSeconds, metrics: Sequence[Mapping], *, is_peak_measured: bool) -> MfuTrend:
    """The trend of a run; ``metrics``: its lines of kind ``train``; ``is_peak_measured``: as of `mfu_seconds`."""
    trend = trend_of(seconds.steps, seconds.seconds, mfu_seconds(seconds.steps, metrics, is_peak_measured=is_peak_measured))
    if not trend.is_alarm or trend.best is None or trend.last is None:
        return trend
    try:
        grown, notes = find_grown(run, seconds, trend.best, trend.last)
    except UsageError as error:
        grown, notes = (), (f"what takes longer is not known: {error}",)
    return replace(trend, grown=grown, notes=(*trend.notes, *notes))


def mfu_seconds(steps: np.ndarray, metrics: Sequence[Mapping], *, is_peak_measured: bool = False) -> np.ndarray:
    """MFU times seconds of each step, float64[n], NaN where not known: what one step computes over what the devices could in a second.

    From lines of `metrics.jsonl`, which have both MFU and tokens/s: that of the newest line up to the step, since a mesh may have changed.
    With ``is_peak_measured`` the newest line's for all steps: a peak that every start measures anew, as on CPUs, is no trend.
    """
    known = [
        (line["step"], line["mfu"] / line["tokens_per_s"] * line["tokens"] / line["step"])
        for line in metrics
        if line["step"] > 0 and all(isinstance(line.get(key), int | float) and line[key] > 0 for key in ("mfu", "tokens_per_s", "tokens"))
    ]
    if not known:
        return np.full(steps.size, np.nan)
    at, values = (np.array(column) for column in zip(*sorted(known), strict=True))
    if is_peak_measured:
        return np.full(steps.size, values[-1])
    return values[np.maximum(np.searchsorted(at, steps, "right") - 1, 0)]


def trend_of(steps: np.ndarray, seconds: np.ndarray, work: np.ndarray) -> MfuTrend:
    """The trend of steps [n] in order, that took so many seconds; ``work`` as of `mfu_seconds`."""
    count = min(MOST_WINDOWS, steps.size // LEAST_STEPS)
    is_mfu = bool(steps.size) and not np.isnan(work).any()
    if not count:
        return _short(steps[:0], np.empty(0), is_mfu, steps.size)
    first = np.linspace(0, steps.size, count, endpoint=False).astype(np.int64)
    last = np.append(first[1:], steps.size) - 1
    times = np.add.reduceat(np.maximum(seconds, 0.0), first)
    done = np.add.reduceat(work if is_mfu else np.ones_like(seconds), first)
    with np.errstate(divide="ignore"):
        levels = np.where(times > 0, done / times, np.nan)
    whole = np.isfinite(levels)
    first, last, levels = first[whole], last[whole], levels[whole]
    if levels.size < FEWEST_WINDOWS:
        return _short(steps[last], levels, is_mfu, steps.size)
    quarters = np.array_split(np.arange(levels.size), _QUARTERS)
    middles = np.array([np.median(levels[quarter]) for quarter in quarters])
    best = int(np.argmax(middles[:-1]))
    decay = float(1 - middles[-1] / middles[best])
    error = _error(levels / np.repeat(middles, [quarter.size for quarter in quarters]) - 1, quarters[-1].size)
    return MfuTrend(
        steps=steps[last],
        levels=levels,
        is_mfu=is_mfu,
        decay=decay,
        error=error,
        per_1000_steps=_slope(steps[last], levels) * 1000,
        best=(int(steps[first[quarters[best][0]]]), int(steps[last[quarters[best][-1]]])),
        last=(int(steps[first[quarters[-1][0]]]), int(steps[last[-1]])),
        is_alarm=decay >= max(LEAST_DECAY, SIGMAS * error),
        grown=(),
        notes=(),
    )


def _short(steps: np.ndarray, levels: np.ndarray, is_mfu: bool, count: int) -> MfuTrend:
    note = f"{count} timed steps are too few to see a decay; that takes {FEWEST_WINDOWS * LEAST_STEPS}"
    return MfuTrend(steps, levels, is_mfu, np.nan, np.nan, np.nan, None, None, False, (), (note,))


def _error(left: np.ndarray, quarter: int) -> float:
    """Standard error of the difference of two quarters' medians, from what windows differ from them."""
    deviation = _MAD * float(np.median(np.abs(left)))
    spread = float(np.mean(left**2))
    shared = float(np.mean(left[1:] * left[:-1])) / spread if spread > 0 else 0.0
    shared = min(max(shared, 0.0), _MOST_CORRELATION)
    return float(_MEDIAN_ERROR * deviation * np.sqrt(2 / quarter) * np.sqrt((1 + shared) / (1 - shared)))


def _slope(steps: np.ndarray, levels: np.ndarray) -> float:
    """Theil's: the median of the slopes of all pairs, over the median level, per step."""
    before, after = np.triu_indices(levels.size, 1)
    between = (steps[after] - steps[before]).astype(np.float64)
    slopes = (levels[after] - levels[before])[between > 0] / between[between > 0]
    return float(np.median(slopes) / np.median(levels)) if slopes.size else 0.0

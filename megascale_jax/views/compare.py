"""Whether a changed recipe trains as well as the old one, by a rule that is printed with the verdict.

A is the control, B the candidate. Two relative differences (B - A) / A are judged against one tolerance: that of the final
held-out losses, and the mean, over the last quarter of the common range, of that of the training losses, each smoothed over the
same window. The range is counted in consumed tokens, so that batches of different sizes compare, or in steps on request.

Failure case: losses on different held-out rows, or runs that never trained over the same range, get no verdict but
`incomparable`, with the reasons. A candidate that diverged is worse; a control that diverged proves nothing.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megascale_jax.observe.summary import RunSummary
from megascale_jax.views.curve import RunRecord, Series, smooth
from megascale_jax.views.same_data import ConfigDifference, config_differences, config_int, held_out_difference, mixes_evaluations

Against = Literal["tokens", "steps"]
Verdict = Literal["equivalent", "better", "worse", "incomparable"]

_GRID_POINTS = 256
_WINDOW_FRACTION = 0.02
_WINDOW_LINES = 4
_TAIL_FRACTION = 0.25
_SAME_END = 0.01
_REACH = 0.05
"""A held-out loss counts as the one at x when it was measured within this fraction of x."""


@dataclass(frozen=True)
class Measure:
    """One of the two judged quantities, in nats per token. None: not known; NaN: the run diverged."""

    name: str
    a: float | None
    b: float | None
    difference: float | None


@dataclass(frozen=True)
class CommonRange:
    """Where both runs logged training losses, in tokens or steps.

    The last quarter begins at `tail_start`; `spacing` is the distance of lines in the run that logged more rarely.
    """

    start: float
    end: float
    tail_start: float
    spacing: float
    smoothing_window: float


@dataclass(frozen=True)
class Comparison:
    """Everything that the verdict rests on."""

    run_a: str
    run_b: str
    against: Against
    tolerance: float
    rule: str
    verdict: Verdict
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    validation: Measure
    train: Measure
    common_range: CommonRange | None
    config_differences: tuple[ConfigDifference, ...]
    summary_a: RunSummary | None
    summary_b: RunSummary | None


def rule_text(tolerance: float, against: Against) -> str:
    """The rule in words, printed with every verdict."""
    return (
        f"B is equivalent to A if the final held-out losses differ by at most {tolerance:.4g} relative, and the training losses, "
        f"smoothed over the same window of {against}, differ by at most {tolerance:.4g} relative in the mean over the last quarter of the "
        "common range. Otherwise B is worse if either is above A's by more than that, else better."
    )


def compare_runs(a: RunRecord, b: RunRecord, *, tolerance: float, against: Against) -> Comparison:
    """Judge candidate `b` against control `a`. Raises RunFolderError if a config lacks the batch size or row length."""
    curve_a, curve_b = train_curve(a, against), train_curve(b, against)
    ends = [float(along(run, run.train, against).steps[-1]) for run in (a, b)]
    common = _common_range(curve_a, curve_b)
    reason, note = held_out_difference(a, b)
    reasons, notes = [reason] if reason else [], [note] if note else []
    if common is None:
        reasons.append(_no_range(curve_a, curve_b, against))
        validation, train = Measure("held-out loss", None, None, None), Measure("training loss", None, None, None)
    else:
        held_out_a, held_out_b = (_held_out(run, against, min(ends)) for run in (a, b))
        validation = Measure("held-out loss", held_out_a, held_out_b, _relative(held_out_a, held_out_b))
        train = _compare_tails(curve_a, curve_b, common)
        if max(ends) > min(ends) * (1 + _SAME_END):
            longer = a if ends[0] > ends[1] else b
            if mixes_evaluations(longer):
                reasons.append(
                    f"{'A' if longer is a else 'B'} went on for longer, and its evaluations on the way are of other rows than the last; "
                    "compare runs of one length, or set train.evaluation.batches and final_batches alike"
                )
            notes.append(
                f"A ends at {ends[0]:,.0f} {against}, B at {ends[1]:,.0f}; both are judged at {min(ends):,.0f}, where the longer run's "
                "learning rate may not have decayed yet"
            )
    verdict: Verdict = "incomparable"
    if not reasons:
        verdict, why = _judge((validation, train), tolerance)
        reasons.extend(why)
    return Comparison(
        run_a=str(a.folder),
        run_b=str(b.folder),
        against=against,
        tolerance=tolerance,
        rule=rule_text(tolerance, against),
        verdict=verdict,
        reasons=tuple(reasons),
        notes=tuple(notes),
        validation=validation,
        train=train,
        common_range=common,
        config_differences=config_differences(a.config, b.config),
        summary_a=a.summary,
        summary_b=b.summary,
    )


def along(run: RunRecord, series: Series, against: Against) -> Series:
    """`series` of `run` with its steps scaled to consumed tokens (row positions), or as it is."""
    if against == "steps":
        return series
    tokens_per_step = config_int(run, "train.global_batch_size") * config_int(run, "model.sequence_length")
    return Series(series.steps * tokens_per_step, series.losses)


def train_curve(run: RunRecord, against: Against) -> Series:
    """The training losses of `run`, each at the tokens consumed before its step: a larger batch is not moved to later tokens."""
    shifted = Series(run.train.steps - 1, run.train.losses) if against == "tokens" else run.train
    return along(run, shifted, against)


def _common_range(a: Series, b: Series) -> CommonRange | None:
    """The overlap of two curves, or None if the last quarter of it holds fewer than two points of either."""
    start, end = max(a.steps[0], b.steps[0]), min(a.steps[-1], b.steps[-1])
    tail_start = end - _TAIL_FRACTION * (end - start)
    if any(np.count_nonzero((curve.steps >= tail_start) & (curve.steps <= end)) < 2 for curve in (a, b)):
        return None
    spacing = max(float(np.median(np.diff(curve.steps))) for curve in (a, b))
    window = max(_WINDOW_FRACTION * (end - start), _WINDOW_LINES * spacing)
    return CommonRange(float(start), float(end), float(tail_start), spacing, float(window))


def _no_range(a: Series, b: Series, against: Against) -> str:
    ranges = " and ".join(f"{curve.steps[0]:,.0f} to {curve.steps[-1]:,.0f}" for curve in (a, b))
    return f"too few training losses over the same {against}: A and B logged {ranges}; train both over the same range"


def _compare_tails(a: Series, b: Series, common: CommonRange) -> Measure:
    """Mean smoothed training losses over the last quarter, and the mean of their relative difference."""
    tail_a, tail_b = (_tail(curve, common) for curve in (a, b))
    difference = float(np.mean((tail_b - tail_a) / tail_a))
    return Measure("training loss", float(np.mean(tail_a)), float(np.mean(tail_b)), difference)


def _tail(curve: Series, common: CommonRange) -> np.ndarray:
    """The smoothed curve on a grid over the last quarter; NaN if most of its losses there are not finite."""
    inside = curve.steps <= common.end
    steps, losses = curve.steps[inside], curve.losses[inside]
    finite = np.isfinite(losses)
    if np.mean(finite[steps >= common.tail_start]) < 0.5:
        return np.full(_GRID_POINTS, np.nan)
    grid = np.linspace(common.tail_start, common.end, _GRID_POINTS)
    return smooth(steps[finite], losses[finite], grid, common.smoothing_window)


def _held_out(run: RunRecord, against: Against, x: float) -> float | None:
    """Held-out loss at `x`: the run's last one if it ends there, interpolated if it went on; None if none was measured near."""
    points = along(run, run.evaluation, against)
    steps, losses = points.steps, points.losses
    final = run.summary.validation_loss if run.summary else None
    last = along(run, run.train, against).steps[-1]
    if final is not None and last <= x * (1 + _SAME_END):
        return final
    if not steps.size or steps[-1] < x * (1 - _REACH) or steps[0] > x * (1 + _REACH):
        return None
    return float(np.interp(x, steps, losses))


def _relative(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else (b - a) / a


def _judge(measures: tuple[Measure, ...], tolerance: float) -> tuple[Verdict, list[str]]:
    """The verdict of the rule and the reasons for it."""
    for run, values in (("A", [m.a for m in measures]), ("B", [m.b for m in measures])):
        if None in values:
            return "incomparable", [f"{run} has no held-out loss near the end of the range; set train.evaluation.every, or finish it"]
    for measure in measures:
        if measure.a is None or not math.isfinite(measure.a):
            return "incomparable", [f"the control A diverged: its {measure.name} is not finite"]
    diverged = [f"B diverged: its {m.name} is not finite" for m in measures if m.b is None or not math.isfinite(m.b)]
    if diverged:
        return "worse", diverged
    changes = [(m.name, m.difference) for m in measures if m.difference is not None]
    above = [f"{name} is {change:+.2%}" for name, change in changes if change > tolerance]
    below = [f"{name} is {change:+.2%}" for name, change in changes if change < -tolerance]
    if above:
        return "worse", above
    if below:
        return "better", below
    return "equivalent", [f"{name} is {change:+.2%}" for name, change in changes]

"""What the devices of a profile did with their time: computing, communication that nothing hides, copies, nothing; top operations. No JAX.

Of a device and its window, from the first begin to the last end of an operation in the file, each moment is counted once, in this order:

    window = compute + exposed + copy + idle

*compute*: some operation computes; *exposed*: a collective runs, and none computes; *copy*: only copies run; *idle*: nothing runs. The
share of communication that is not hidden is ``exposed / collective``, with *collective* the moments in which any runs. A collective runs
while its kernel does, so waiting for a peer that is late counts as communication, as in any profile of kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megascale_jax.errors import UsageError
from megascale_jax.views.xplane import COLLECTIVE, COMPUTE, KINDS, Line, Profile


@dataclass(frozen=True)
class DeviceTimes:
    """Seconds of one device; ``source``: the file's name without ending."""

    source: str
    device: str
    operations: int
    window_s: float
    compute_s: float
    collective_s: float
    exposed_s: float
    copy_s: float
    idle_s: float


@dataclass(frozen=True)
class OperationTimes:
    """All runs of an operation, on ``devices`` devices together; ``share`` of what all operations take, which may run side by side."""

    name: str
    kind: str
    count: int
    devices: int
    total_s: float
    share: float


@dataclass(frozen=True)
class ProfileTimes:
    """``exposed_share``: of all devices' communication, what no computation hides; ``None`` without any.

    ``steps``: numbers of the steps that the host began; ``step_s``: median seconds between two begins, ``None`` with fewer.
    """

    devices: tuple[DeviceTimes, ...]
    exposed_share: float | None
    steps: tuple[int, ...]
    step_s: float | None
    operations: tuple[OperationTimes, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


def measure(profiles: Sequence[tuple[str, Profile]], steps: tuple[int | None, int | None] = (None, None)) -> ProfileTimes:
    """All of several profiles with their names, of ``first <= step < end`` if given. Raises UsageError when no such step is there."""
    cut = [(source, _within(profile, steps)) for source, profile in profiles]
    devices = [_device(source, profile, number) for source, profile in cut for number in np.unique(profile.device)]
    collective = sum(one.collective_s for one in devices)
    between: list[float] = []
    for _, profile in cut:
        follows = np.diff(profile.steps) == 1
        between += (np.diff(profile.step_begin_ps)[follows] / 1e12).tolist()
    return ProfileTimes(
        devices=tuple(devices),
        exposed_share=sum(one.exposed_s for one in devices) / collective if collective else None,
        steps=tuple(sorted({int(step) for _, profile in cut for step in profile.steps})),
        step_s=float(np.median(between)) if between else None,
        operations=tuple(_operations(cut)),
        lines=tuple(line for _, profile in cut for line in profile.lines),
        notes=tuple(f"{source}: {note}" for source, profile in cut for note in profile.notes),
    )


def _within(profile: Profile, steps: tuple[int | None, int | None]) -> Profile:
    """The operations that began between the begins of two steps, cut where the last ends."""
    if steps == (None, None):
        return profile
    first, end = steps
    chosen = np.ones(profile.steps.size, bool)
    chosen &= profile.steps >= first if first is not None else chosen
    chosen &= profile.steps < end if end is not None else chosen
    if not chosen.any():
        has = f"it has the steps {profile.steps.min()} to {profile.steps.max()}" if profile.steps.size else "it names no steps"
        raise UsageError(f"--steps chooses no step of the profile: {has}")
    begins = profile.step_begin_ps
    low = begins[chosen].min()
    later = begins[~chosen & (begins > begins[chosen].max())]
    high = later.min() if later.size else np.iinfo(np.int64).max
    rows = (profile.begin_ps >= low) & (profile.begin_ps < high)
    if not rows.any():
        raise UsageError("--steps chooses a time in which no device did anything; choose others")
    columns = {name: getattr(profile, name)[rows] for name in ("device", "name", "kind", "begin_ps", "duration_ps")}
    columns["duration_ps"] = np.minimum(columns["duration_ps"], high - columns["begin_ps"])
    return replace(profile, **columns, steps=profile.steps[chosen], step_begin_ps=begins[chosen])


def _device(source: str, profile: Profile, number: int) -> DeviceTimes:
    rows = profile.device == number
    begin, kind = profile.begin_ps[rows], profile.kind[rows]
    end = begin + profile.duration_ps[rows]
    compute = covered_ps(begin[kind == COMPUTE], end[kind == COMPUTE])
    collective = covered_ps(begin[kind == COLLECTIVE], end[kind == COLLECTIVE])
    both = (kind == COMPUTE) | (kind == COLLECTIVE)
    work, busy, window = covered_ps(begin[both], end[both]), covered_ps(begin, end), int(end.max() - begin.min())
    return DeviceTimes(
        source=source,
        device=profile.devices[number],
        operations=int(rows.sum()),
        window_s=window / 1e12,
        compute_s=compute / 1e12,
        collective_s=collective / 1e12,
        exposed_s=(work - compute) / 1e12,
        copy_s=(busy - work) / 1e12,
        idle_s=(window - busy) / 1e12,
    )


def covered_ps(begin_ps: np.ndarray, end_ps: np.ndarray) -> int:
    """How long at least one of these intervals lasts, int64[n] each; overlaps count once."""
    if not begin_ps.size:
        return 0
    order = np.argsort(begin_ps, kind="stable")
    begin, end = begin_ps[order], end_ps[order]
    reached = np.maximum.accumulate(end)
    before = np.concatenate([begin[:1], reached[:-1]])
    return int(np.maximum(0, end - np.maximum(begin, before)).sum())


def _operations(profiles: Sequence[tuple[str, Profile]]) -> list[OperationTimes]:
    """Longest first."""
    found: dict[str, list[int]] = {}
    kinds: dict[str, int] = {}
    for _, profile in profiles:
        total = np.zeros(len(profile.names))
        np.add.at(total, profile.name, profile.duration_ps)
        count = np.bincount(profile.name, minlength=len(profile.names))
        pairs = np.unique(np.stack([profile.name, profile.device]), axis=1)
        devices = np.bincount(pairs[0], minlength=len(profile.names))
        kinds |= dict(zip((profile.names[code] for code in profile.name), profile.kind.tolist(), strict=True))
        for code in np.flatnonzero(count):
            sums = found.setdefault(profile.names[code], [0, 0, 0])
            sums[:] = sums[0] + int(count[code]), sums[1] + int(devices[code]), sums[2] + int(total[code])
    whole = sum(sums[2] for sums in found.values()) or 1
    rows = [
        OperationTimes(name, KINDS[kinds[name]], runs, devices, total / 1e12, total / whole)
        for name, (runs, devices, total) in found.items()
    ]
    return sorted(rows, key=lambda one: (-one.total_s, one.name))

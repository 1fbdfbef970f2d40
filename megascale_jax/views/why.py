"""Why a run stands still: which rank the others wait for, and what speaks for it. From what `progress.py` read; no JAX.

In a collective all wait for the last one, so whoever is first behind holds the others up. Ranks are put in the order of their
progress: where their devices are (step, stamps taken in it) if every rank says so, then where their main threads are (completed steps,
section in the order of the loop). The rule, in this order:

1. A rank whose process has ended, or whose events ended `SILENT_S` before the others', while no living one is further behind than it
   was seen last: it is named.
2. The ranks first behind, if each of them is in something of its own (waiting for its rows, computing), which nobody else can hold
   up: they are named. Not if that is all ranks: then it is what they share.
3. A single rank first behind is named, whatever it does, as long as every rank is known.
4. Ranks without a file, if all others are equally far: they are named. A rank whose file is cut may have come further than it says.
5. Else it cannot be told: those first behind, and those of which nothing is known, are suspects.

How long is too long is the driver's rule (`cluster/limits.py`) with what these files show of the run's passes. All is judged as of the
newest event; but that a run goes on is not said of one whose files have not changed for long.
"""

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from megascale_jax.cluster.limits import Limits
from megascale_jax.observe.events import FLUSH_S, PULSE_S
from megascale_jax.observe.marks import DEAF
from megascale_jax.views.progress import Place, Progress, RankProgress

SILENT_S = 3 * PULSE_S + 5 * FLUSH_S
"""Without an event for so long and a step, by which clocks may still differ, while others have some, a process does not run, or its
disk takes nothing."""
SLOW = 2.0
"""Times the longest pass of its kind."""
OWN_SECTIONS = ("start", "data")
"""Sections in which a process waits for no other."""
MOST_NAMED = 8
"""Ranks that a text lists."""

Outcome = Literal["hang", "slow", "running", "ended", "unknown"]
State = Literal["stuck", "silent", "suspect", "waiting", "running", "ended"]


@dataclass(frozen=True)
class RankState:
    """A rank as judged.

    ``coordinates``: pipe, data, tensor of its devices; ``since_s``: seconds in its section so far; ``last_seen``: seconds since 1970.
    """

    rank: int
    host: str
    coordinates: tuple[Place, ...]
    state: State
    step: int | None
    section: str | None
    operation: str
    since_s: float | None
    last_seen: float | None
    note: str = ""


@dataclass(frozen=True)
class Judgement:
    """``named``: ranks that hold the others up; ``suspects``: it is among them.

    ``until``: newest event, seconds since 1970; ``age_s``: for how long no file has changed and none has a newer event, seconds.
    """

    verdict: Outcome
    reason: str
    named: tuple[int, ...]
    suspects: tuple[int, ...]
    attempt: int
    mesh: Place | None
    until: float
    age_s: float
    ranks: tuple[RankState, ...]


@dataclass(frozen=True)
class Behind:
    """Who is behind, and what speaks for it."""

    named: tuple[RankProgress, ...] = ()
    suspects: tuple[RankProgress, ...] = ()
    reason: str = ""


def judge(progress: Progress, limits: Limits | None = None, now: float | None = None) -> Judgement:
    """The verdict, as of the newest event. ``limits``: a run's own; default: what the files teach on top of the usual floors.

    ``now``: seconds since 1970, by default this moment; a run that was silent for longer than its ranks may be does not count as running.
    """
    limits = limits or Limits()
    for one in progress.ranks:
        limits.learn(one.longest_s)
    others = [one for one in progress.ranks if not one.has_finished]
    all_gone = all(one.is_gone or one.is_missing for one in others)
    silent = [one for one in others if _is_silent(one, progress.until_ns, limits) or (one.is_gone and not all_gone)]
    found = _judged(progress, limits, others, silent, all_gone=all_gone)
    newest = max(progress.until_ns, progress.changed_ns) / 1e9
    age_s = round(max(0.0, (time.time() if now is None else now) - newest), 3)
    found = replace(found, age_s=age_s)
    patience_s = max((_patience_s(one, limits) for one in others), default=0.0)
    if found.verdict not in ("running", "slow", "hang") or all_gone or age_s <= patience_s:
        return found
    text = f"all ranks are silent since {datetime.fromtimestamp(newest, UTC):%Y-%m-%d %H:%M:%S} UTC, {age_s:.0f} s ago"
    if found.verdict == "running":
        ranks = tuple(replace(one, state="ended" if one.state == "ended" else "silent") for one in found.ranks)
        return replace(found, verdict="unknown", reason=f"{text}; until then it went on: {found.reason}", ranks=ranks)
    return replace(found, reason=f"{found.reason}; {text}")


def _judged(
    progress: Progress, limits: Limits, others: Sequence[RankProgress], silent: Sequence[RankProgress], *, all_gone: bool
) -> Judgement:
    """The verdict as of the newest event; ``others`` have not finished, of which some are silent."""
    numbers = {one.rank for one in silent}
    alive = [one for one in others if one.rank not in numbers and one.section]
    if not others:
        return _judgement(progress, "ended", "every rank has finished", Behind(), numbers)
    if not alive:
        text = "no rank says where it is: its events are from before the first pulse, or its files are damaged"
        return _judgement(progress, "unknown", text, Behind(suspects=tuple(others)), numbers)
    finished = [one for one in progress.ranks if one.has_finished]
    if finished:
        behind = Behind(suspects=tuple(others), reason=f"{_listed(finished)} finished the run, {_listed(others)} did not")
    else:
        behind = first_behind(alive, silent)
    first = (behind.named or behind.suspects or tuple(alive))[0]
    stalled_s = max(0.0, (progress.until_ns - max(one.moved_ns for one in alive)) / 1e9)
    verdict = _outcome(alive, first, stalled_s, limits, is_silent=any(one.rank in numbers for one in behind.named))
    if verdict == "running" and all_gone and not any(one.is_missing for one in others):
        last = min(others, key=lambda one: one.last_ns)
        text = f"every process has ended, and no run was finished; {_name(last)} was seen last, {_where(last)}, before all others"
        return _judgement(progress, "ended", text, Behind(), numbers)
    if verdict == "running":
        moved = max(alive, key=lambda one: one.moved_ns)
        text = f"{_name(moved)} came further {stalled_s:.1f} s before the newest event"
        return _judgement(progress, verdict, text, Behind(), numbers)
    return _judgement(progress, verdict, f"nobody came further for {stalled_s:.1f} s. {behind.reason}", behind, numbers)


def first_behind(alive: Sequence[RankProgress], silent: Sequence[RankProgress]) -> Behind:
    """Who holds the others up, by the rule above; ``alive`` is not empty."""
    by_device = all(one.device_order is not None for one in alive)
    orders = {one.rank: _order(one, by_device) for one in alive}
    behind, host_behind = min(orders.values()), min(one.host_order for one in alive)
    last = tuple(one for one in alive if orders[one.rank] == behind)
    unknown = tuple(one for one in silent if one.is_missing or one.note or not one.section)
    is_unknown = {one.rank for one in unknown}
    lost = tuple(one for one in silent if one.rank not in is_unknown and _is_behind(one, behind, host_behind))
    first, but, is_all = f"{_listed(last)} {_verb(last)} first behind: {_where(last[0])}", _but(unknown), len(last) == len(alive)
    if lost:
        return Behind(lost, reason=f"{_listed(lost)} {_verb(lost)} silent, last seen {_where(lost[0])}; no living rank is further behind")
    if not is_all and all(_is_own(one) for one in last):
        return Behind(last, reason=f"{first}, which waits for no other rank{but}")
    if len(last) == 1 and not unknown:
        return Behind(last, reason=first if not is_all else f"{_listed(last)} is the only one: {_where(last[0])}")
    if is_all and unknown:
        text = f"all others are equally far: {_where(last[0])}"
        if all(one.is_missing for one in unknown):
            return Behind(unknown, reason=f"{_listed(unknown)} left no events; {text}")
        return Behind(suspects=unknown, reason=f"it cannot be told who is behind: {text}{but}")
    text = f"all ranks are equally far: {_where(last[0])}" if is_all else f"{first}, equally far"
    return Behind(suspects=(*last, *unknown), reason=f"it cannot be told who is behind: {text}{but}")


def _order(one: RankProgress, by_device: bool) -> tuple[tuple[int, ...], tuple[int, int, bool]]:
    return (one.device_order or () if by_device else ()), one.host_order


def _is_behind(one: RankProgress, behind: tuple, host_behind: tuple[int, int, bool]) -> bool:
    """Whether a silent rank was last seen no further than the last of the living, by their devices and by their main threads."""
    if behind[0] and one.device_order is not None:
        return _order(one, True) <= behind
    return one.host_order <= host_behind


def _is_silent(one: RankProgress, until_ns: int, limits: Limits) -> bool:
    return one.is_missing or not one.section or (until_ns - one.last_ns) / 1e9 > _patience_s(one, limits)


def _patience_s(one: RankProgress, limits: Limits) -> float:
    """For how long a rank may have no event, seconds."""
    if one.section in DEAF and not one.is_past:
        return limits.limit_s(one.section, one.passes)
    return SILENT_S + one.longest_s.get("step", 0.0)


def _is_own(one: RankProgress) -> bool:
    """Whether nobody else can hold it up in what it does."""
    device = one.slowest
    if device is not None and device.passed.stamps < device.passed.of:
        return device.passed.lane == "compute"
    return one.section in OWN_SECTIONS and not one.is_past


def _outcome(alive: Sequence[RankProgress], first: RankProgress, stalled_s: float, limits: Limits, *, is_silent: bool) -> Outcome:
    """A silent rank has no section to be in for too long: the others' counts."""
    held = first if not is_silent and first.section else min(alive, key=lambda one: one.host_order)
    longest_s = max((one.longest_s.get(held.section, 0.0) for one in alive), default=0.0)
    if stalled_s > limits.limit_s(held.section, held.passes):
        return "hang"
    if is_silent and stalled_s > max(SILENT_S, SLOW * longest_s):
        return "hang"
    return "slow" if longest_s and stalled_s > SLOW * longest_s + 2 * PULSE_S else "running"


def _judgement(progress: Progress, verdict: Outcome, reason: str, behind: Behind, silent: AbstractSet[int]) -> Judgement:
    named, suspects = ({one.rank for one in some} for some in (behind.named, behind.suspects))
    stands = verdict in ("hang", "slow")

    def state(one: RankProgress) -> State:
        if one.has_finished or (verdict == "ended" and one.is_gone):
            return "ended"
        if one.rank in silent:
            return "silent"
        return "stuck" if one.rank in named else "suspect" if one.rank in suspects else "waiting" if stands else "running"

    ranks = tuple(_rank_state(one, state(one), progress.until_ns) for one in progress.ranks)
    lists = (tuple(sorted(named)), tuple(sorted(suspects)))
    return Judgement(verdict, reason, *lists, progress.attempt, progress.mesh, progress.until_ns / 1e9, 0.0, ranks)


def _rank_state(one: RankProgress, state: State, until_ns: int) -> RankState:
    since_s = (until_ns - one.since_ns) / 1e9 if one.since_ns and not one.is_past else None
    seen = one.last_ns / 1e9 if one.last_ns else None
    step = one.step if one.step >= 0 else None
    found = RankState(one.rank, one.host, one.places, state, step, one.section or None, _where(one), since_s, seen, one.note)
    return found if since_s is None else replace(found, since_s=max(0.0, round(since_s, 3)))


def operation_of(one: RankProgress) -> str:
    """What a rank does or waits for, in words that ranks in the same place share; empty: not known."""
    if not one.section or one.is_past:
        return one.section and f"after {one.section}"
    device = one.slowest
    if device is None or device.passed.stamps >= device.passed.of:
        return f"in {one.section}"
    does = "computing" if device.passed.lane == "compute" else f"waiting over {device.passed.lane} for"
    return f"{does} {device.passed.name}"


def _where(one: RankProgress) -> str:
    """What a rank does, in words, and how far it is."""
    if not one.section:
        return "nowhere that is known"
    what = operation_of(one)
    of = f" of step {one.step}" if one.step >= 0 else ""
    device = one.slowest
    if one.is_past or device is None or device.passed.stamps >= device.passed.of:
        return f"{what}{of}"
    tick = f" in tick {device.tick}" if device.tick >= 0 else ""
    where = f"{what}{tick} of step {device.step}, stamp {device.passed.stamps} of {device.passed.of}"
    return where if one.section in ("step", "compile") else f"{where} (main thread in {one.section}{of})"


def _name(one: RankProgress) -> str:
    places = ", ".join(f"pipe {pipe} data {data} tensor {tensor}" for pipe, data, tensor in one.places[:1])
    more = " and others" if len(one.places) > 1 else ""
    known = ", ".join(part for part in (one.host, f"{places}{more}") if part)
    return f"rank {one.rank}" + (f" ({known})" if known else "")


def _listed(some: Sequence[RankProgress]) -> str:
    if len(some) <= 2:
        return " and ".join(map(_name, some))
    shown = ", ".join(str(one.rank) for one in some[:MOST_NAMED])
    return f"ranks {shown}" + (f" and {len(some) - MOST_NAMED} more" if len(some) > MOST_NAMED else "")


def _verb(some: Sequence[RankProgress]) -> str:
    return "is" if len(some) == 1 else "are"


def _notes(some: Sequence[RankProgress]) -> str:
    notes = [one.note for one in some if one.note]
    return f" ({'; '.join(notes[:2])})" if notes else ""


def _but(unknown: Sequence[RankProgress]) -> str:
    return f"; of {_listed(unknown)} too little is known{_notes(unknown)}" if unknown else ""

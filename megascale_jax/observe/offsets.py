"""How far the clocks of a run's processes are apart, estimated from the events alone. No JAX.

All devices leave the reduction at the end of a step at the same moment, give or take its last message, and each says when by its own
host's CLOCK_MONOTONIC (`events.STEP_END`). The differences to one process, the reference, are those of the clocks plus noise. They are
taken in pieces of `PIECE_NS`: in each the median over its steps, and between pieces a straight line, so a clock that drifts is followed;
before the first and after the last it is taken as constant. CLOCK_MONOTONIC is never set, only slowed down or sped up; that wall
clocks are set does not matter here. The stated uncertainty is the spread of the steps around that line, a normal deviation by the median.

What this cannot see: a rank that always leaves the reduction later than the others by the same time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megascale_jax.observe.event_store import EventStore
from megascale_jax.observe.events import STEP_END

PIECE_NS = 60 * 10**9
FEWEST = 3
"""Steps below which no spread can be stated."""
_DEVIATIONS = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

Stamps = Mapping[int, int]
"""End of each step by a process's clock, nanoseconds."""


@dataclass(frozen=True)
class Offset:
    """A process's clock against the reference's: own - reference is ``offset_ns`` [k] at ``at_ns`` [k], middles of pieces by its own."""

    reference: str
    """Name of that process (`EventStore`)."""
    at_ns: np.ndarray
    offset_ns: np.ndarray
    steps: int
    """Steps that both were seen to end."""
    uncertainty_ns: float | None
    """``None``: too few steps."""

    def to_reference(self, begin_ns: np.ndarray) -> np.ndarray:
        """Times of the process's clock [n] as those of the reference's, int64 nanoseconds."""
        own, base = np.asarray(begin_ns, np.int64), int(self.offset_ns[0])
        # differences, since a float does not hold the nanoseconds of a long uptime
        drift = np.interp((own - self.at_ns[0]).astype(float), (self.at_ns - self.at_ns[0]).astype(float), self.offset_ns - base)
        return own - base - np.rint(drift).astype(np.int64)


def estimate(own: Stamps, reference: Stamps, name: str = "reference", piece_ns: int = PIECE_NS) -> Offset | None:
    """The clock of ``own`` against that of ``reference``; ``None`` when they share no step."""
    shared = sorted(own.keys() & reference.keys(), key=lambda step: own[step])
    if not shared:
        return None
    at = np.array([own[step] for step in shared], np.int64)
    differences = at - np.array([reference[step] for step in shared], np.int64)
    numbers = (at - at[0]) // piece_ns
    pieces = [numbers == number for number in np.unique(numbers)]
    middles = np.array([_middle(at[piece]) for piece in pieces], np.int64)
    offsets = np.array([_middle(differences[piece]) for piece in pieces], np.int64)
    found = Offset(name, middles, offsets, len(shared), None)
    if len(shared) < FEWEST:
        return found
    left = found.to_reference(at) - (at - differences)
    spread = _DEVIATIONS * float(np.median(np.abs(left - np.median(left))))
    return Offset(name, middles, offsets, len(shared), spread)


def _middle(values: np.ndarray) -> int:
    """The median, without the rounding that a float of a long uptime has."""
    return int(values[0]) + round(float(np.median(values - values[0])))


def offsets(store: EventStore) -> dict[str, Offset]:
    """Of every process whose clock is known, by name; the reference's own is 0.

    The reference of an attempt is the lowest rank with stamps; where a run was started several times without a driver, the one that
    ran at the time. A process without stamps, as a keeper, has the clock of those on its host.
    """
    stamps, seen = _stamps(store)
    found: dict[str, Offset] = {}
    for process, (attempt, _, first, last) in seen.items():
        lowest = min(rank for other, rank, _, _ in seen.values() if other == attempt)
        candidates = {name: one for name, one in seen.items() if one[:2] == (attempt, lowest)}
        reference = max(candidates, key=lambda name: min(last, candidates[name][3]) - max(first, candidates[name][2]))
        if (offset := estimate(stamps[process], stamps[reference], reference)) is not None:
            found[process] = offset
    clocks = {file.facts.boot_id: found[file.process] for file in store.files if file.facts is not None and file.process in found}
    for file in store.files:
        if file.facts is not None and file.facts.boot_id in clocks:
            found.setdefault(file.process, clocks[file.facts.boot_id])
    return found


def _stamps(store: EventStore) -> tuple[dict[str, dict[int, int]], dict[str, tuple[int, int, int, int]]]:
    """Of each process with stamps: end of each step, the median over its devices; attempt, rank, first and last time since 1970."""
    table = store.sql(
        "select process, attempt, rank, step, quantile_disc(begin_ns + duration_ns, 0.5) as end_ns, min(unix_ns) as first, "
        f"max(unix_ns) as last from events where name = '{STEP_END}' and lane = 'compute' and device >= 0 and step >= 0 "
        "group by all order by process, step"
    )
    stamps: dict[str, dict[int, int]] = {}
    seen: dict[str, tuple[int, int, int, int]] = {}
    for row in table.to_pylist():
        stamps.setdefault(row["process"], {})[row["step"]] = row["end_ns"]
        known = seen.get(row["process"], (row["attempt"], row["rank"], row["first"], row["last"]))
        seen[row["process"]] = (*known[:2], min(known[2], row["first"]), max(known[3], row["last"]))
    return stamps, seen

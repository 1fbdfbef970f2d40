"""Every nanosecond of a job in exactly one class, from what its processes and its driver are known to have done. Pure, no files.

A job of many ranks has one timeline. All ranks step together, so a moment is what the rank does that the others wait for: the job trains
while every rank that is known of trains, and as soon as one of them starts, compiles, saves, evaluates or waits for its rows, the job
does that. `ORDER` is that rule: of all that is going on at a moment, the first of it counts. The driver's phases count
where no process tells anything, and what then is left is idle.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megascale_jax.observe.booked import KINDS, Kind

HANG, UNSEEN, NOTHING = "a step that did not end", "no process tells anything, though the driver counts them as running", "no process ran"
"""Reasons of idle time."""
ORDER: tuple[tuple[str, Kind], ...] = (
    ("restart", "restart"),
    ("compile", "compile"),
    ("checkpoint", "checkpoint"),
    ("evaluation", "evaluation"),
    ("data wait", "data wait"),
    ("recomputed", "recomputed"),
    ("training", "training"),
    ("driver diagnoses", "diagnosis"),
    ("driver restarts", "restart"),
    (HANG, "idle"),
    (UNSEEN, "idle"),
    (NOTHING, "idle"),
)
"""What may go on at a moment, and its class. Of a hang the known part is a step's usual time; see `passes.py`."""
CODES = {activity: code for code, (activity, _) in enumerate(ORDER)}
_KIND_OF = np.array([KINDS.index(kind) for _, kind in ORDER], np.int8)


@dataclass(frozen=True)
class Segment:
    """A stretch of one class, nanoseconds since 1970; ``activity``: of `ORDER`."""

    begin_ns: int
    end_ns: int
    kind: Kind
    activity: str


@dataclass(frozen=True)
class Timeline:
    """The whole of a job: stretch k goes from ``edges_ns[k]`` to ``edges_ns[k + 1]``, int64[n + 1].

    ``codes[k]``, int8[n], is its place in `ORDER`; no two neighbours are the same. Without any time ``codes`` is empty.
    """

    edges_ns: np.ndarray
    codes: np.ndarray

    @property
    def wall_ns(self) -> int:
        """From the first event to the newest."""
        return int(self.edges_ns[-1] - self.edges_ns[0]) if self.edges_ns.size else 0

    @cached_property
    def kinds(self) -> np.ndarray:
        """Index in `KINDS` of each stretch, int8[n]."""
        return _KIND_OF[self.codes]

    def booked_ns(self, begin_ns: int | None = None, end_ns: int | None = None) -> dict[Kind, int]:
        """Nanoseconds of every class, which sum up to the wall time, or to that of the part between two moments."""
        return dict(zip(KINDS, self._sums(self.kinds, len(KINDS), begin_ns, end_ns), strict=True))

    def activities_ns(self, begin_ns: int | None = None, end_ns: int | None = None) -> dict[str, int]:
        """The same by what went on."""
        return dict(zip(CODES, self._sums(self.codes, len(ORDER), begin_ns, end_ns), strict=True))

    def _sums(self, codes: np.ndarray, count: int, begin_ns: int | None, end_ns: int | None) -> list[int]:
        edges = self.edges_ns
        if not codes.size:
            return [0] * count
        first = 0 if begin_ns is None else max(int(np.searchsorted(edges, begin_ns, "right")) - 1, 0)
        last = codes.size if end_ns is None else int(np.searchsorted(edges, end_ns, "left"))
        lasted = np.diff(np.clip(edges[first : last + 1], begin_ns, end_ns)) if last > first else edges[:0]
        return [int(lasted[codes[first:last] == code].sum()) for code in range(count)]

    def segments(self) -> Iterator[Segment]:
        """All stretches; a long run has millions, see `shares`."""
        edges = self.edges_ns.tolist()
        for number, code in enumerate(self.codes.tolist()):
            activity, kind = ORDER[code]
            yield Segment(edges[number], edges[number + 1], kind, activity)

    def shares(self, bins: int) -> np.ndarray:
        """Share of every class in each of so many equal pieces of the wall time, float64[bins, kinds]: what a picture needs of any run."""
        if not self.codes.size:
            return np.zeros((0, len(KINDS)))
        offset = (self.edges_ns - self.edges_ns[0]).astype(np.float64)
        at, lasted = np.linspace(0.0, offset[-1], bins + 1), np.diff(offset)
        shares = np.empty((bins, len(KINDS)))
        for kind in range(len(KINDS)):
            so_far = np.concatenate(([0.0], np.cumsum(np.where(self.kinds == kind, lasted, 0.0))))
            shares[:, kind] = np.diff(np.interp(at, offset, so_far))
        return shares / shares.sum(axis=1, keepdims=True)


def book(begin_ns: np.ndarray, end_ns: np.ndarray, codes: np.ndarray) -> Timeline:
    """The timeline of what went on: activity ``codes[i]`` (`CODES`) from ``begin_ns[i]`` to ``end_ns[i]``, int64[n], in any order.

    From the first begin to the last end every moment is booked once. What ends before it begins counts for nothing.
    """
    real = end_ns >= begin_ns
    begin_ns, end_ns, codes = begin_ns[real], end_ns[real], codes[real]
    edges, place = np.unique(np.concatenate((begin_ns, end_ns)), return_inverse=True)
    if edges.size < 2:
        return Timeline(edges, np.empty(0, np.int8))
    begins, ends = place[: begin_ns.size], place[begin_ns.size :]
    found = np.full(edges.size - 1, CODES[NOTHING], np.int8)
    for code in range(len(ORDER) - 1, -1, -1):  # the first of them is written last
        of_code = codes == code
        if of_code.any():
            change = np.bincount(begins[of_code], minlength=edges.size) - np.bincount(ends[of_code], minlength=edges.size)
            found[np.cumsum(change)[:-1] > 0] = code
    changes = np.flatnonzero(np.diff(found)) + 1
    return Timeline(edges[np.concatenate(([0], changes, [edges.size - 1]))], found[np.concatenate(([0], changes))])

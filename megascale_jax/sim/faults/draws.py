"""The failures of a job as chance has them: Poisson processes by kind, one stream of random numbers a seed.

A longer horizon goes on where a shorter one ends, and a seed's failures do not depend on how many other seeds there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megascale_jax.sim.faults.case import NEVER_NS, SECOND_NS, Case


@dataclass(frozen=True)
class Draws:
    """Failures of one seed in order of time.

    ``times_ns`` int64[n]; ``kinds`` int64[n], index in `Case.events`; ``ranks`` int64[n], first node's; ``heals`` and ``found`` bool[n], of
    a restart and of the first diagnosis; ``slow`` bool[nodes + spares], which nodes are slow.
    """

    seed: int
    times_ns: np.ndarray
    kinds: np.ndarray
    ranks: np.ndarray
    heals: np.ndarray
    found: np.ndarray
    slow: np.ndarray

    def without(self, dropped: np.ndarray) -> "Draws":
        """The same without some of the failures, ``dropped`` bool[n]."""
        kept = ~dropped
        columns = (column[kept] for column in (self.times_ns, self.kinds, self.ranks, self.heals, self.found))
        return Draws(self.seed, *columns, slow=self.slow)


def draw(case: Case, seed: int, horizon_ns: int) -> Draws:
    """Failures until a moment. A corrupt copy comes into play when the next comparison of states sees it."""
    streams = np.random.default_rng([seed]).spawn(6)
    times = _times(case.per_second, horizon_ns, streams[0])
    count = times.size
    shares = np.array([event.per_second for event in case.events])
    edges = np.cumsum(shares) / shares.sum() if shares.sum() else np.ones(len(case.events))
    kinds = np.minimum(np.searchsorted(edges, streams[1].random(count), "right"), len(case.events) - 1)
    events = case.events
    takes, groups = (np.array([getattr(event, name) for event in events], np.int64)[kinds] for name in ("takes", "groups"))
    first = (streams[2].random(count) * groups).astype(np.int64) * takes
    chances = streams[3].random((count, 2))
    heals = chances[:, 0] < np.array([event.heals for event in events])[kinds]
    found = chances[:, 1] < np.array([event.found for event in events])[kinds]
    is_corrupt = np.array([event.shows == "corrupt" for event in events])[kinds]
    times = times + np.where(is_corrupt, streams[4].random(count) * case.digest_ns, 0).astype(np.int64)
    order = np.argsort(times, kind="stable")
    share = case.slow_nodes.share if case.slow_nodes is not None else 0.0
    slow = streams[5].random(case.nodes + case.spares) < share
    return Draws(seed, times[order], kinds[order], first[order], heals[order], found[order], slow)


def _times(per_second: float, horizon_ns: int, random: np.random.Generator) -> np.ndarray:
    """Moments of a Poisson process before the horizon, int64[n]."""
    if per_second <= 0:
        return np.empty(0, np.int64)
    found: list[np.ndarray] = []
    last = 0.0
    while last < horizon_ns:
        gaps = random.exponential(SECOND_NS / per_second, 256)
        found.append(last + np.cumsum(gaps))
        last = float(found[-1][-1])
    times = np.concatenate(found)
    return times[times < horizon_ns].astype(np.int64)


@dataclass(frozen=True)
class Batch:
    """Failures of many seeds, each row filled up with `NEVER_NS`; int64[seeds, most + 1], and bool for ``heals`` and ``found``."""

    times_ns: np.ndarray
    kinds: np.ndarray
    heals: np.ndarray
    found: np.ndarray
    is_slow: np.ndarray
    """Whether a node of the job is slow, bool[seeds]."""

    @classmethod
    def of(cls, case: Case, draws: Sequence[Draws]) -> "Batch":
        """Stack them."""
        width = max(one.times_ns.size for one in draws) + 1

        def stacked(name: str, fill: int) -> np.ndarray:
            rows = np.full((len(draws), width), fill, getattr(draws[0], name).dtype)
            for row, one in zip(rows, draws, strict=True):
                column = getattr(one, name)
                row[: column.size] = column
            return rows

        is_slow = np.array([one.slow[: case.nodes].any() for one in draws])
        return cls(stacked("times_ns", NEVER_NS), stacked("kinds", 0), stacked("heals", 1), stacked("found", 1), is_slow)

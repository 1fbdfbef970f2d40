"""Which state a run goes on from: this host's memory, a peer's, or durable storage. A pure choice from what all ranks report.

A state counts only if every rank can get its part of it. The newest wins; at the same step memory wins, which is faster.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

LOCAL = "local"


@dataclass(frozen=True)
class Report:
    """What one rank found: states in its own slots, and copies of others' that its host keeps.

    ``own``: (step, launch, slot); ``copies``: (rank, step, launch, fingerprint); ``address``: where other hosts reach its keeper.
    """

    fingerprint: str
    keeper: str
    address: tuple[str, int]
    own: Sequence[tuple[int, str, int]]
    copies: Sequence[tuple[int, int, str, str]]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Report":
        """The inverse of `dataclasses.asdict` through JSON."""
        return cls(
            document["fingerprint"],
            document["keeper"],
            (document["address"][0], document["address"][1]),
            [(step, launch, slot) for step, launch, slot in document["own"]],
            [(rank, step, launch, mark) for rank, step, launch, mark in document["copies"]],
        )


Place = str | tuple[str, int]
"""Where a rank gets its part of a state in memory: `LOCAL`, or the address of the keeper that has a copy."""


@dataclass(frozen=True)
class MemoryState:
    """A state that all ranks can get from memory: for each rank its places, the first to be tried first; none is without one."""

    step: int
    launch: str
    places: tuple[tuple[Place, ...], ...]

    def without(self, failed: Collection[int]) -> "MemoryState | None":
        """What is left when the first place of these ranks turned out to be no good; ``None``: one of them has no other."""
        places = tuple(places[1:] if rank in failed else places for rank, places in enumerate(self.places))
        return replace(self, places=places) if all(places) else None

    @property
    def tier(self) -> str:
        """``local`` when no rank needs another host."""
        return "local" if all(places[0] == LOCAL for places in self.places) else "peer"


def memory_states(reports: Sequence[Report]) -> list[MemoryState]:
    """States that are whole in memory, newest first."""
    names = {(step, launch) for report in reports for step, launch, _ in report.own}
    names |= {(step, launch) for report in reports for _, step, launch, _ in report.copies}
    states = []
    for step, launch in sorted(names, reverse=True):
        places = tuple(tuple(_places(rank, step, launch, reports)) for rank in range(len(reports)))
        if all(places):
            states.append(MemoryState(step, launch, places))
    return states


def _places(rank: int, step: int, launch: str, reports: Sequence[Report]) -> Iterator[Place]:
    if any((step, launch) == own[:2] for own in reports[rank].own):
        yield LOCAL
    wanted = (rank, step, launch, reports[rank].fingerprint)
    yield from dict.fromkeys(report.address for report in reports if wanted in report.copies)


def peer_of(rank: int, reports: Sequence[Report]) -> tuple[str, int] | None:
    """Address of the keeper that gets this rank's copies: the next host's, ``None`` where there is only one host."""
    hosts = list(dict.fromkeys(report.keeper for report in reports))
    if len(hosts) == 1:
        return None
    following = hosts[(hosts.index(reports[rank].keeper) + 1) % len(hosts)]
    return next(report.address for report in reports if report.keeper == following)

"""Who is to blame when two nodes cannot talk, or talk slowly: pairs of nodes in rounds, and what follows from the results.

Round one pairs neighbours under the same switch. Later rounds pair those in *doubt* with those that are *proven*. A node is proven once
a pair with it was good; it is *bad* if a pair with a proven node was slow or failed and no pair with it was good. So a healthy node is
never named, as long as two healthy nodes are good together, and a bad one is named as soon as it meets a proven one.

One bad node is named in two rounds, in three for n = 3 and n = 5. Several may take more, `MOST_ROUNDS` at most. What cannot be told: with
fewer than two healthy nodes no pair is good (so it is for n = 2), and all that failed are *suspects*; nodes that are all alike slow look
healthy without a baseline (two slow ones can, up to n = 5).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_ROUNDS = 6
PAIR_FLOOR = 0.25
"""Share below the reference at which a pair is slow: paths differ more than devices do (NVRx names a rank below 0.75)."""
CPU_PAIR_FLOOR = 0.8
"""Pairs of virtual nodes share the cores of a machine."""

type Pair = tuple[str, str]
type Round = Mapping[Pair, float | None]
"""GB/s of each pair that was asked; ``None``: it failed or did not end in time."""


@dataclass(frozen=True)
class Scale:
    """How pairs are judged. ``switches``: the switch of each node, as far as known; ``baseline``: GB/s that a good pair reaches."""

    switches: Mapping[str, str]
    floor: float = PAIR_FLOOR
    baseline: float | None = None

    def is_across(self, pair: Pair) -> bool:
        """Whether the two are known to be under different switches."""
        one, other = (self.switches.get(node) for node in pair)
        return one is not None and other is not None and one != other


@dataclass(frozen=True)
class Blame:
    """What the pairs prove. Bad and suspect nodes have their reasons; ``links``: ways between two proven nodes that are slow."""

    bad: Mapping[str, str]
    suspects: Mapping[str, str]
    links: Mapping[Pair, str]
    proven: frozenset[str]
    untested: tuple[str, ...]


def pairs(nodes: Sequence[str], scale: Scale, rounds: Sequence[Round]) -> tuple[Pair, ...]:
    """The pairs of the next round; none when nothing is in doubt, or nothing more can be learned. ``rounds``: results so far."""
    if not rounds:
        return _neighbours(nodes, scale.switches)
    known = blame(nodes, scale, rounds)
    doubted = [*known.suspects, *known.untested]
    if len(rounds) >= MOST_ROUNDS:
        return ()
    tested = {frozenset(pair) for results in rounds for pair in results}
    fastest_first = sorted(known.proven, key=lambda node: (-_best_rate(node, rounds), nodes.index(node)))
    free, chosen = set(nodes), []
    for node in doubted:
        helpers = sorted(fastest_first, key=lambda other: scale.is_across((node, other)))  # the same switch first: alike paths
        partners = (other for other in (*helpers, *reversed(doubted)) if other != node and frozenset((node, other)) not in tested)
        partner = next((other for other in partners if other in free), None)
        if node in free and partner is not None:
            chosen.append((node, partner))
            free -= {node, partner}
    return tuple(chosen)


def _neighbours(nodes: Sequence[str], switches: Mapping[str, str]) -> tuple[Pair, ...]:
    """Neighbours under one switch; those left over meet each other."""
    chosen, waiting = [], []
    for node in sorted(nodes, key=lambda node: switches.get(node, "")):
        if waiting and switches.get(waiting[-1]) == switches.get(node):
            chosen.append((waiting.pop(), node))
        else:
            waiting.append(node)
    return (*chosen, *zip(waiting[::2], waiting[1::2], strict=False))


def _best_rate(node: str, rounds: Sequence[Round]) -> float:
    return max((rate for results in rounds for pair, rate in results.items() if rate is not None and node in pair), default=0.0)


def blame(nodes: Sequence[str], scale: Scale, rounds: Sequence[Round]) -> Blame:
    """Judge all pairs together."""
    results = [(pair, rate) for tested in rounds for pair, rate in tested.items()]
    reference = {across: _reference(results, scale, across) for across in (False, True)}
    good: list[Pair] = []
    wrong: list[tuple[Pair, str]] = []
    for pair, rate in results:
        wanted = reference[scale.is_across(pair)]
        if rate is not None and rate >= wanted * (1 - scale.floor):
            good.append(pair)
        else:
            wrong.append((pair, "no all-reduce" if rate is None else f"{rate:.3g} GB/s instead of {wanted:.3g}"))
    proven = frozenset(node for pair in good for node in pair)
    bad: dict[str, str] = {}
    failed: dict[str, str] = {}
    links: dict[Pair, str] = {}
    for pair, how in wrong:
        if proven.issuperset(pair):
            links[pair] = f"{how} between {pair[0]} and {pair[1]}, both good with others"
            continue
        for node, peer in (pair, pair[::-1]):
            if node not in proven:
                failed.setdefault(node, f"{how} with {peer}")
                if peer in proven:
                    bad.setdefault(node, f"{how} with {peer}, which is good with others")
    suspects = {node: reason for node, reason in failed.items() if node not in bad}
    touched = {node for pair, _ in results for node in pair}
    return Blame(bad, suspects, links, proven, tuple(node for node in nodes if node not in touched))


def _reference(results: Sequence[tuple[Pair, float | None]], scale: Scale, across: bool) -> float:
    """What a good pair reaches: the baseline, or about the best of all, since one bad node makes half of the pairs of four nodes slow."""
    if scale.baseline is not None:
        return scale.baseline
    rates = sorted((rate for pair, rate in results if rate is not None and scale.is_across(pair) == across), reverse=True)
    return rates[len(rates) // 10] if rates else 0.0

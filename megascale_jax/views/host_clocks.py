"""How far the wall clocks of a run's hosts are apart, by the passes of their main threads: good to about a step. No JAX.

All ranks end a step at about the same moment, since each waits for the others in it, and begin their events when all have met. So what
a host's ends of steps differ by from the middle of all ranks' is its clock. `observe/offsets.py` finds that to microseconds, but from
every device's stamps of whole steps, which of a run that hangs are many to read and may not be there.
"""

from collections.abc import Mapping
from statistics import median_low

Seen = tuple[str, int, Mapping[int, int]]
"""Of a rank: the name of its clock, when it met the others, and by step when it ended; nanoseconds since 1970."""
_MET = -1


def ahead_ns(ranks: Mapping[int, Seen]) -> dict[int, int]:
    """By rank how much its clock is ahead of the middle one, nanoseconds; 0 where all have the same.

    The median over the steps that another clock has too; without any, by when the ranks met.
    """
    ends = {rank: {**seen, _MET: met_ns} for rank, (_, met_ns, seen) in ranks.items()}
    of_step: dict[int, list[int]] = {}
    clocks: dict[int, set[str]] = {}
    for rank, (clock, _, _) in ranks.items():
        for step, end_ns in ends[rank].items():
            of_step.setdefault(step, []).append(end_ns)
            clocks.setdefault(step, set()).add(clock)
    middle_ns = {step: median_low(seen) for step, seen in of_step.items() if len(clocks[step]) > 1}
    apart: dict[str, dict[bool, list[int]]] = {}
    for rank, (clock, _, _) in ranks.items():
        for step in ends[rank].keys() & middle_ns.keys():
            apart.setdefault(clock, {}).setdefault(step == _MET, []).append(ends[rank][step] - middle_ns[step])
    found = {clock: median_low(by.get(False) or by[True]) for clock, by in apart.items()}
    return {rank: found.get(clock, 0) for rank, (clock, _, _) in ranks.items()}

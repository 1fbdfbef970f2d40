"""How each rank computes beside its peers in a window of steps, for the driver that decides what follows (`cluster/governance.py`).

    python -m megascale_jax.views.slow_nodes RUN --first N --end M --attempt A      # one line of JSON: `slow_windows.Window`

A rank's time for a pass is the mean over its devices of a stage, so a node that is slow as a whole is compared with other nodes, never
with itself; its peers are the other ranks with devices of that stage. A rank alone in its stage has none, and nothing is said of it.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megascale_jax.cluster.slow_windows import TOTAL, PassTimes, RankTimes, Window
from megascale_jax.errors import MegascaleError
from megascale_jax.observe.output import printable
from megascale_jax.observe.priority import lowest_priority
from megascale_jax.views.peers import beside_peers, by_stage, deviation, excess_over_peers, median
from megascale_jax.views.step_times import StepTimes, read_step_times

FEWEST_STEPS = 8
"""Of a window that must be known of a rank."""
_NOTES, _NOTE_LENGTH = 16, 255


def window_of(times: StepTimes, attempt: int) -> Window:
    """What is known of each rank in the steps of ``times``."""
    owners = np.array(times.ranks or (-1,) * times.mesh.size).reshape(times.mesh.pipe, -1)
    ranks = _padded([np.unique(row[row >= 0]) for row in owners])
    known = ~np.isnan(by_stage(times.whole))
    passes = {name: by_stage(seconds) for name, seconds in times.computed.items()}
    total = np.where(known, np.nansum([*passes.values()], axis=0), np.nan)
    waited = median(_by_rank(by_stage(times.waited), owners, ranks))
    less = -beside_peers(waited[None])[0]
    found: dict[int, dict[str, list[np.ndarray]]] = {}
    for name, seconds in (passes | {TOTAL: total}).items():
        by_rank = _by_rank(seconds, owners, ranks)
        more = beside_peers(by_rank)
        relative = excess_over_peers(by_rank, more)
        over, cost = median(relative), median(more)
        evidence = np.divide(less, cost, out=np.zeros_like(cost), where=cost > 0)
        values = np.stack([over, deviation(relative, over), cost, evidence], axis=-1)
        enough = (~np.isnan(relative)).sum(axis=0) >= FEWEST_STEPS
        for place in np.argwhere(enough & np.isfinite(values).all(axis=-1) & (ranks >= 0)):
            at = tuple(place)
            found.setdefault(int(ranks[at]), {}).setdefault(name, []).append(values[at])
    notes = tuple(printable(note)[:_NOTE_LENGTH] for note in times.notes[:_NOTES])
    one_step = float(np.nanmedian(times.whole))
    first, end = int(times.steps[0]), int(times.steps[-1]) + 1
    return Window(attempt=attempt, first=first, end=end, step_s=one_step, ranks=tuple(_ranks(found)), notes=notes)


def _ranks(found: dict[int, dict[str, list[np.ndarray]]]) -> Iterator[RankTimes]:
    """A rank with devices of several stages has the mean of what it is in each, and the sum of what it costs."""
    for rank, passes in sorted(found.items()):
        told = {}
        for name, stages in passes.items():
            over, spread, cost, less = np.clip(np.mean(stages, axis=0), -1e6, 1e6).tolist()
            total = float(np.clip(cost * len(stages), -1e6, 1e6))
            told[name] = PassTimes(excess=round(over, 4), deviation=round(spread, 5), cost_s=round(total, 7), waits_less=round(less, 3))
        yield RankTimes(rank=rank, passes=told)


def _padded(rows: list[np.ndarray]) -> np.ndarray:
    """Rows of different lengths as one array, -1 where there is nothing."""
    padded = np.full((len(rows), max(1, *(row.size for row in rows))), -1)
    for number, row in enumerate(rows):
        padded[number, : row.size] = row
    return padded


def _by_rank(seconds: np.ndarray, owners: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Of [step, stage, device] the mean over the devices of each rank, [step, stage, ranks of the stage]; NaN if one is not known."""
    result = np.full((seconds.shape[0], *ranks.shape), np.nan)
    for stage, (owner, own) in enumerate(zip(owners, ranks, strict=True)):
        own = own[own >= 0]
        if own.size:
            order = np.argsort(owner, kind="stable")[(owner < 0).sum() :]
            begins = np.searchsorted(owner[order], own)
            sums = np.add.reduceat(seconds[:, stage, order], begins, axis=1)
            result[:, stage, : own.size] = sums / np.diff([*begins, order.size])
    return result


def main(arguments: list[str] | None = None) -> int:
    """Entry point: the window as one line; what is wrong goes to standard error, with exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m megascale_jax.views.slow_nodes", description=main.__doc__)
    parser.add_argument("run", type=Path)
    for name in ("first", "end", "attempt"):
        parser.add_argument(f"--{name}", type=int, required=True)
    asked = parser.parse_args(arguments)
    lowest_priority()
    try:
        window = window_of(read_step_times(asked.run, (asked.first, asked.end)), asked.attempt)
    except MegascaleError as error:
        print(error, file=sys.stderr)
        return 1
    print(window.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())

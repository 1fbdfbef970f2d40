"""How long each step of a run took, by the passes of one main thread: what `mfu_trend.py` looks at. No JAX."""

from dataclasses import dataclass

import numpy as np

from megascale_jax.observe.marks import UNTAUGHT_PASSES
from megascale_jax.views.passes import Passes


@dataclass(frozen=True)
class StepSeconds:
    """Of the steps that count and whose time is known, in order: ``steps`` int64[n], ``seconds`` and, of these, ``rows``: waited for rows
    while the devices had nothing to do, float64[n].

    A step's time goes from the wait for its rows to the end of its pass, without saves and evaluations; first steps of a process, which
    are compiled, are left out. A main thread is a step ahead of its devices, and looks at two steps at once before a save: only
    sums over several steps are times of devices.
    """

    steps: np.ndarray
    seconds: np.ndarray
    rows: np.ndarray


def step_seconds(passes: Passes, lost: np.ndarray) -> StepSeconds:
    """Times of steps by the rank that has most of them; ``lost`` as of `goodput.lost_passes`."""
    ranks = np.array([one.rank for one in passes.processes], np.int64)[passes.process]
    good = passes.of("step") & (passes.step > 0) & (passes.is_open == 0) & ~lost
    if not good.any():
        return StepSeconds(np.empty(0, np.int64), np.empty(0), np.empty(0))
    known, counts = np.unique(ranks[good], return_counts=True)
    of_rank = ranks == known[np.argmax(counts)]
    lasted = passes.end_ns - passes.begin_ns
    key = passes.process << 32 | passes.step
    rows = np.flatnonzero(_is_taught(passes, good & of_rank))
    rows = rows[np.argsort(passes.step[rows], kind="stable")]
    waits = np.flatnonzero(passes.of("data") & of_rank)
    saves = np.flatnonzero(passes.of("checkpoint") & of_rank)
    inside = saves[passes.begin_ns[saves] < _summed(key[rows], passes.end_ns[rows], key[saves])]  # one after an evaluation is not
    seconds = lasted[rows] + _summed(key[waits], lasted[waits], key[rows]) - _summed(key[inside], lasted[inside], key[rows])
    exposed = _summed(key[waits], passes.end_ns[waits] - passes.rows_from_ns[waits], key[rows])
    return StepSeconds(passes.step[rows], seconds / 1e9, exposed / 1e9)


def _is_taught(passes: Passes, good: np.ndarray) -> np.ndarray:
    """Without the first passes of each process, which may be compiled anew; bool[n]."""
    rows = np.flatnonzero(good)
    rows = rows[np.lexsort((passes.begin_ns[rows], passes.process[rows]))]
    begins = np.searchsorted(passes.process[rows], passes.process[rows])
    taught = good.copy()
    taught[rows[np.arange(rows.size) - begins < UNTAUGHT_PASSES["step"]]] = False
    return taught


def _summed(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Sums of values by key, of the wanted keys; 0 where there is none."""
    found, place = np.unique(keys, return_inverse=True)
    if not found.size:
        return np.zeros(wanted.size, np.int64)
    sums = np.zeros(found.size, np.int64)
    np.add.at(sums, place, values)
    at = np.minimum(np.searchsorted(found, wanted), found.size - 1)
    return np.where(found[at] == wanted, sums[at], 0)

"""What the devices did in each step, in sums: their names, and how rows of events become one column of numbers a step and device. No JAX.

Of every step a device has rows whose names and lanes are `COLUMNS` (`train/stamps.py`): a pass by its units, waits by pass and mesh axis,
what is outside of all ticks, the step itself. `sums_of` adds them up, `joined` what several files have of one step. No pyarrow either.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np

Pass = Literal["forward", "backward", "weight", "head", "embed", "step"]
"""What a span of a device belongs to; ``weight``: weight gradients, ``head``: loss included."""
PASSES: tuple[str, ...] = tuple(name for name in get_args(Pass) if name != "step")
"""What a device computes in a step, by the names of its sums."""
STEP_SPAN = "step"
"""Span of a whole step on a device."""
IDLE = "idle"
"""What a device computes on nothing: slots of the pipeline without a unit."""
STEP_NAMES = ("gather first chunk", "scatter last chunk", "gradient norm", "optimizer")
"""Spans outside the ticks, in order; between the first two are the fill and the ticks."""
OPTIMIZER = STEP_NAMES[-1]
WAIT_LANES = ("tensor", "pipe", "data")

WAITS = (*((f"{name} wait", lane) for name in PASSES for lane in WAIT_LANES), *((name, "data") for name in STEP_NAMES[:-1]))
COLUMNS = (*((name, "compute") for name in (*PASSES, IDLE)), *WAITS, (OPTIMIZER, "compute"), (STEP_SPAN, "compute"))
"""Name and lane of every sum that a step has."""
FIELDS = ("step", "device", "began_ns", "computes", "spans", *(f"{name}, {lane}" for name, lane in COLUMNS))
"""Rows of a table of sums: the first begin, nanoseconds since 1970; how many rows are of `PASSES` and `IDLE`, and how many of `STEP_SPAN`;
nanoseconds of each of `COLUMNS`."""
NONE = np.iinfo(np.int64).min
"""In a table of sums: there is no such row."""

_BEGAN, _COUNTS, _FIRST = FIELDS.index("began_ns"), slice(FIELDS.index("computes"), len(FIELDS) - len(COLUMNS)), len(FIELDS) - len(COLUMNS)
_COMPUTES = len(PASSES) + 1
# A detailed step has these twice, as sums and among its phases, so the longest counts.
_ONCE = np.array([name in {*STEP_NAMES, STEP_SPAN} for name, _ in COLUMNS])


def sums_of(codes: np.ndarray, rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """The sums of events, int64[`FIELDS`, n] in the order of step and device.

    ``codes``: numbers in `COLUMNS`, int64[rows], -1: none; ``rows``: columns ``step``, ``device``, ``duration_ns`` and ``unix_ns``.
    """
    chosen = np.flatnonzero((codes >= 0) & (rows["step"] >= 0) & (rows["device"] >= 0))
    codes, rows = codes[chosen], {name: column[chosen] for name, column in rows.items()}
    keys, at = np.unique(rows["step"].astype(np.int64) << 32 | rows["device"].astype(np.int64), return_inverse=True)
    found = np.full((len(FIELDS), keys.size), NONE)
    found[:2] = keys >> 32, keys & 0xFFFFFFFF
    began = np.full(keys.size, np.iinfo(np.int64).max)
    np.minimum.at(began, at, rows["unix_ns"])
    cells, shape = codes * keys.size + at, (len(COLUMNS), keys.size)
    counts = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
    lasted = np.where(_ONCE, NONE, 0)[:, None].repeat(keys.size, axis=1)
    is_once = _ONCE[codes]
    np.maximum.at(lasted.reshape(-1), cells[is_once], rows["duration_ns"][is_once])
    np.add.at(lasted.reshape(-1), cells[~is_once], rows["duration_ns"][~is_once])
    found[_BEGAN], found[_COUNTS] = began, (counts[:_COMPUTES].sum(axis=0), counts[-1])
    found[_FIRST:] = np.where(counts > 0, lasted, NONE)
    return found


def joined(sums: np.ndarray, process: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One column for each process, step and device, in no order: of int64[`FIELDS`, n] and ``process`` [n] several may be of one."""
    if not has_repeats(sums):
        return sums, process
    order = np.lexsort((sums[1], sums[0], process))
    sums, process = sums[:, order], process[order]
    is_first = np.ones(order.size, bool)
    is_first[1:] = (np.diff(sums[:2], axis=1) != 0).any(axis=0) | (np.diff(process) != 0)
    first = np.flatnonzero(is_first)
    found = np.maximum.reduceat(sums, first, axis=1)
    found[_BEGAN] = np.minimum.reduceat(sums[_BEGAN], first)
    found[_COUNTS] = np.add.reduceat(sums[_COUNTS], first, axis=1)
    lasted, most = sums[_FIRST:][~_ONCE], found[_FIRST:][~_ONCE]
    added = np.add.reduceat(np.where(lasted == NONE, 0, lasted), first, axis=1)
    found[_FIRST + np.flatnonzero(~_ONCE)] = np.where(most == NONE, NONE, added)
    return found, process[first]


def has_repeats(sums: np.ndarray) -> bool:
    """Whether two columns of int64[`FIELDS`, n] are of the same step and device."""
    step, device = sums[:2]
    if not step.size:
        return False
    first, devices = step.min(), device.max() + 1
    cells = (step - first) * devices + device
    is_dense = (step.max() - first + 1) * devices <= _SPARSE * cells.size
    return bool(np.bincount(cells).max() > 1) if is_dense else np.unique(cells).size < cells.size


_SPARSE = 16
"""Places of a table a column, beyond which sorting is cheaper than counting them."""

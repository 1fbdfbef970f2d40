"""What would a step take if these devices were normal? The phases of detailed steps, replayed with other durations.

All devices run the same phases in the same order. A phase is a compute and collectives beside it; its end on device ``d`` is

    start[k+1, d] = max(start[k, d] + c[k, d], max(start[k, m] for the members m of d's groups) + comm[k, d]) + after[k, d]

where the groups are those of the collectives' mesh axes: all of an axis; of a message to the next stage both neighbours; of the gradient
norm all devices. What a collective takes by itself is not recorded, only what computation did not hide. The device that comes
last waits least. Where the least wait of those that wait for each other is more than `HIDDEN` of a compute, ``comm`` is their least
compute and wait. Else the collective was hidden: ``comm`` is 0, and that least wait is overhead, ``after``.

The *ideal* duration of a compute is the median of its peers, the devices of the same stage, in the same phase. `Replay.times` is the step
for any durations; how well it repeats the recorded step is `Replay.recorded_s` against it.

Of a step that was run again only the rows that `StepTimes` counts are replayed.

Failure case: a step of which a device has no phases, or other ones, is not replayed; of steps with more than `MOST_ROWS` rows in all, fewer
are, and a note says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import pyarrow as pa

from megascale_jax.axes import MESH_AXES
from megascale_jax.observe.event_store import EventStore, quoted
from megascale_jax.observe.step_sums import STEP_NAMES
from megascale_jax.parallel.pipeline.stamps import TOGETHER, axes_of, pass_of
from megascale_jax.views.step_times import COMPUTED, SUMS, StepTimes

HIDDEN = 0.05
"""Least wait, over the compute beside it, up to which a collective counts as hidden."""
MOST_STEPS = 5
"""Detailed steps that are replayed, the last ones."""
MOST_ROWS = 20_000_000
"""Rows of phases that are read in all: they are ordered and replayed in memory."""

_NORM = STEP_NAMES[2]
_NEIGHBOURS = (-1,)


@dataclass(frozen=True)
class Phase:
    """A phase: its compute's pass ("": none), and the groups that its collectives join, as axes of [pipe, data, tensor]; -1: neighbours."""

    optype: str
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Replay:
    """The phases of one detailed step: ``phases`` [k], seconds ``computed``, ``comm`` and ``after`` [k, pipe, data, tensor]."""

    step: int
    recorded_s: float
    phases: tuple[Phase, ...]
    computed: np.ndarray
    comm: np.ndarray
    after: np.ndarray

    @cached_property
    def ideal(self) -> np.ndarray:
        """Every compute as long as the median of its stage, float64[k, pipe, 1, 1]."""
        return np.median(self.computed, axis=(2, 3), keepdims=True)

    def times(self, is_ideal: np.ndarray) -> np.ndarray:
        """Seconds of the step where these computes are ideal, bool[what-if, optype in `COMPUTED`, pipe, data, tensor]; float64[what-if]."""
        start = np.zeros((len(is_ideal), *self.computed.shape[1:]))
        for phase, own, ideal, comm, after in zip(self.phases, self.computed, self.ideal, self.comm, self.after, strict=True):
            end = start
            if phase.optype:
                end = start + np.where(is_ideal[:, COMPUTED.index(phase.optype)], ideal, own)
            if phase.groups:
                end = np.maximum(end, _most(start, phase.groups) + comm) + after
            start = end
        return start.max(axis=(1, 2, 3))


def read_replays(store: EventStore, times: StepTimes) -> tuple[tuple[Replay, ...], tuple[str, ...]]:
    """The last `MOST_STEPS` detailed steps of these that are whole, in order, and notes, one line each."""
    whole = times.steps[~np.isnan(times.whole).any(axis=(1, 2, 3))]
    names = ", ".join(f"'{name}'" for name in SUMS if name not in STEP_NAMES)
    detailed = f"device >= 0 and lane in ('compute', 'tensor', 'pipe', 'data') and not is_instant and name not in ({names})"
    table = store.sql(f"select step, count(*) as rows from events where {detailed} and tick >= 0 group by step order by step desc")
    steps = [(step, rows) for step, rows in zip(*(table[name].to_pylist() for name in ("step", "rows")), strict=True) if step in whole]
    latest = steps[:MOST_STEPS]
    few = [step for (step, _), rows in zip(latest, accumulate(rows for _, rows in latest), strict=True) if rows <= MOST_ROWS]
    notes = ()
    if len(few) < len(latest):
        text = f"the phases of the last {len(latest)} detailed steps are {sum(rows for _, rows in latest):,} rows"
        notes = (f"{text}, more than the {MOST_ROWS:,} that are read: {len(few)} of these steps are replayed",)
    found = []
    for step in sorted(few):
        row = int(np.searchsorted(times.steps, step))
        query = _ORDERED.format(where=f"{detailed} and step = {int(step)}{_counted(times, row)}")
        replay = _replay(int(step), float(np.median(times.whole[row])), store.sql(query), times)
        found += [] if replay is None else [replay]
    return tuple(found), notes


def _counted(times: StepTimes, row: int) -> str:
    """The condition for rows that `times` counts of its step number ``row``."""
    if times.processes is None:
        return ""
    pairs = ", ".join(f"({device}, {quoted(process)})" for device, process in enumerate(times.processes[row]) if process is not None)
    return f" and (device, process::varchar) in ({pairs})"


_ORDERED = """
with spans as (
    select device, name, lane, begin_ns, duration_ns, max(tick) as tick from events where {where}
    group by device, name, lane, begin_ns, duration_ns
), placed as (
    select *, row_number() over (partition by device order by begin_ns, begin_ns + duration_ns, tick) as place,
        row_number() over (partition by device, tick, name, lane order by begin_ns) as nth
    from spans
), agreed as (select *, avg(place) over (partition by tick, name, lane, nth) as agreed from placed)
select device, name, lane, duration_ns from agreed order by device, agreed, tick, name, lane
"""
"""Spans of each device in the one order of all: a coarse clock gives short spans one time, on some devices only."""


def _replay(step: int, recorded_s: float, table: pa.Table, times: StepTimes) -> Replay | None:
    """The replay of one step from its spans, in the order of each device; None where devices differ."""
    mesh = times.mesh
    spans, left = divmod(table.num_rows, mesh.size)
    if left or (np.bincount(table["device"].to_numpy(), minlength=mesh.size) != spans).any():
        return None
    coded = [table[name].combine_chunks().dictionary_encode() for name in ("name", "lane")]
    if any((codes != codes[0]).any() for codes in (column.indices.to_numpy().reshape(mesh.size, spans) for column in coded)):
        return None
    names, lanes = (column[:spans].to_pylist() for column in coded)
    lasted = (table["duration_ns"].to_numpy().astype(float) / 1e9).reshape(mesh.size, spans).T
    lasted = lasted.reshape(spans, mesh.pipe, mesh.data, mesh.tensor)
    phases, computed, waited = [], [], []
    none = np.zeros(lasted.shape[1:])
    for own, waits in _phases(lanes):
        optype = "" if own is None else names[own] if names[own] in STEP_NAMES else pass_of(names[own])
        phases.append(Phase(optype, () if waits is None else _groups(names[waits])))
        computed.append(none if own is None else lasted[own])
        waited.append(none if waits is None else lasted[waits])
    own, waits = np.array(computed), np.array(waited)
    comm, after = np.zeros_like(own), np.zeros_like(own)
    for k, phase in enumerate(phases):
        if not phase.groups:
            continue
        least, both, computing = (_least(values, phase.groups) for values in (waits[k], own[k] + waits[k], own[k]))
        hidden = least <= HIDDEN * computing
        comm[k], after[k] = np.where(hidden, 0.0, both), np.where(hidden, least, 0.0)
    return Replay(step, recorded_s, tuple(phases), own, comm, after)


def _phases(lanes: list[str]) -> Iterator[tuple[int | None, int | None]]:
    """The spans of every phase's compute and wait."""
    own: int | None = None
    for span, lane in enumerate(lanes):
        if lane != "compute":
            yield own, span
            own = None
            continue
        if own is not None:
            yield own, None
        own = span
    if own is not None:
        yield own, None


def _groups(name: str) -> tuple[tuple[int, ...], ...]:
    """Which devices the collectives of a wait join (`Phase`)."""
    if name == _NORM:
        return ((0, 1, 2),)
    if name in STEP_NAMES:
        return ((1,),)
    found = (_NEIGHBOURS if one.startswith("P.send") else tuple(map(MESH_AXES.index, axes_of(one))) for one in name.split(TOGETHER))
    return tuple(dict.fromkeys(found))


def _least(values: np.ndarray, groups: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """The least of all devices that wait for each other, also through others, float64[pipe, data, tensor]."""
    joined = {axis for axes in groups for axis in ((0,) if axes == _NEIGHBOURS else axes)}
    return np.broadcast_to(values.min(axis=tuple(sorted(joined)), keepdims=True), values.shape)


def _most(values: np.ndarray, groups: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """The most of every device's groups, float64[..., pipe, data, tensor]."""
    result = values
    for axes in groups:
        if axes == _NEIGHBOURS:
            result = np.maximum(result, np.maximum(np.roll(values, 1, -3), np.roll(values, -1, -3)))
        else:
            result = np.maximum(result, values.max(axis=tuple(axis - 3 for axis in axes), keepdims=True))
    return result

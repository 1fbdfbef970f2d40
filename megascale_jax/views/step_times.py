"""What the devices of a run computed and waited for in each step, as arrays over steps and mesh, out of its events (`train/stamps.py`).

A time is known only if the device's process wrote all of its rows of that step; otherwise it is NaN in every array, and the
notes say how many are. Of a step that was run again, after a resume, the last run counts. Of a run that changed its mesh within these
steps the newest mesh counts, and what ran on others is left out.
"""

from dataclasses import dataclass
from typing import get_args

import numpy as np

from megascale_jax.config.layout import MeshShape
from megascale_jax.errors import UsageError
from megascale_jax.observe.event_segments import Facts
from megascale_jax.observe.event_store import EventStore
from megascale_jax.observe.events import STEP_END
from megascale_jax.parallel.pipeline.stamps import IDLE, STEP_NAMES, STEP_SPAN, Pass

PASSES: tuple[str, ...] = tuple(name for name in get_args(Pass) if name != "step")
"""What a device computes in a step, by the names of its sums."""
OPTIMIZER = STEP_NAMES[-1]
COMPUTED = (*PASSES, OPTIMIZER)
"""Names of computation."""
WAIT_LANES = ("tensor", "pipe", "data")

_WAITS = (*((f"{name} wait", lane) for name in PASSES for lane in WAIT_LANES), *((name, "data") for name in STEP_NAMES[:-1]))
_COLUMNS = (*((name, "compute") for name in (*PASSES, IDLE)), *_WAITS, (OPTIMIZER, "compute"), (STEP_SPAN, "compute"))
"""Name and lane of every sum that a step has."""
SUMS = (*dict.fromkeys(name for name, _ in _COLUMNS), STEP_END)
"""Names of rows that a device has of every step; what else it has are the phases of a detailed step."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the steps ``steps`` [step], float64 arrays [step, pipe, data, tensor]; NaN: not known.

    ``computed`` by pass and ``optimizer``, those that the run has; ``idle``: computing on nothing; ``waits`` by name and lane of the
    mesh axis; ``whole``: from a step's begin to its end. ``hosts`` and ``ranks`` [device] of its process, in the order of `MeshShape`;
    empty and -1: not known.
    ``notes``: what is missing, one line each. ``processes``: names of the processes whose rows these are, object[step, device] (None: no
    rows); None where every device's rows of a step are of one process.
    """

    mesh: MeshShape
    steps: np.ndarray
    hosts: tuple[str, ...]
    computed: dict[str, np.ndarray]
    idle: np.ndarray
    waits: dict[tuple[str, str], np.ndarray]
    whole: np.ndarray
    notes: tuple[str, ...]
    processes: np.ndarray | None = None
    ranks: tuple[int, ...] = ()

    @property
    def waited(self) -> np.ndarray:
        """Seconds that a device waited in all, float64[step, pipe, data, tensor]."""
        return np.sum([*self.waits.values()], axis=0) if self.waits else np.zeros_like(self.whole)


def read_step_times(store: EventStore, steps: tuple[int | None, int | None] = (None, None)) -> StepTimes:
    """The times of the steps ``first <= step < end``, either may be None. Raises UsageError if the run has no stamps of any."""
    first, end = steps
    within = "".join(f" and step {sign} {int(bound)}" for sign, bound in ((">=", first), ("<", end)) if bound is not None)
    mesh, owners, chosen, others = _mesh(store, within)
    within += f" and process in ({', '.join(map(quoted, chosen))})" if chosen else ""
    whole_steps = f"from events where name = '{STEP_SPAN}' and lane = 'compute' and device >= 0{within}"
    again = store.sql(f"select 1 {whole_steps} group by step, device having count(*) > 1 limit 1")
    by_process = again.num_rows > 0 or bool(chosen)
    table = store.sql(_query(within, by_process=by_process))
    if not table.num_rows:
        raise UsageError(f"no stamps of {_range_text(steps)}; expected a run with train.events.stamps and at least one step of these")
    oldest_first = np.argsort(table["began_ns"].to_numpy(), kind="stable")
    column = {name: table[name].to_numpy()[oldest_first] for name in table.column_names}
    found, at = np.unique(column["step"], return_inverse=True)
    place = column["device"]
    if place.max() >= mesh.size:
        raise UsageError(f"events of device {place.max()}, but the run's mesh has {mesh.size} devices; its events are of different runs")
    whole = _known(column, place // (mesh.data * mesh.tensor), mesh.pipe)
    arrays: dict[tuple[str, str], np.ndarray] = {}
    for number, key in enumerate(_COLUMNS):
        seconds = column[f"c{number}"] / 1e9
        if key != (IDLE, "compute") and np.isnan(seconds[whole]).all():
            continue
        array = np.full((found.size, mesh.size), np.nan)
        array[at, place] = np.where(whole, seconds, np.nan)
        arrays[key] = array.reshape(-1, mesh.pipe, mesh.data, mesh.tensor)
    if (STEP_SPAN, "compute") not in arrays:
        raise UsageError(f"the stamps of {_range_text(steps)} are incomplete on every device; expected at least one whole step")
    processes = np.full((found.size, mesh.size), None) if by_process else None
    if processes is not None:
        processes[at, place] = column["process"]
    length = arrays[STEP_SPAN, "compute"]
    idle = arrays[IDLE, "compute"]
    return StepTimes(
        mesh,
        found,
        tuple("" if owner is None else owner.host for owner in owners),
        {name: arrays[name, "compute"] for name in COMPUTED if (name, "compute") in arrays},
        np.where(np.isnan(length), np.nan, np.nan_to_num(idle)),
        {key: arrays[key] for key in _WAITS if key in arrays},
        length,
        (*others, *_notes(found, length)),
        processes,
        tuple(-1 if owner is None else owner.rank for owner in owners),
    )


def _query(within: str, *, by_process: bool) -> str:
    """One row for each device and step, and each process if some ran a step again, which takes longer.

    A detailed step has the spans outside of ticks twice, so `max`.
    """
    codes = ", ".join(f"('{name}', '{lane}', {code})" for code, (name, lane) in enumerate(_COLUMNS))
    once = {*STEP_NAMES, STEP_SPAN}
    sums = ", ".join(
        f"{'max' if name in once else 'sum'}(lasted) filter (code = {code}) as c{code}" for code, (name, _) in enumerate(_COLUMNS)
    )
    return (
        f"with codes(name, lane, code) as (values {codes}) "
        f"select step, device, {'process::varchar as process, ' if by_process else ''}min(unix_ns) as began_ns, {sums}, "
        f"count(*) filter (code < {len(PASSES) + 1}) as computes, "
        f"count(*) filter (code = {len(_COLUMNS) - 1}) as times "
        f"from (select *, duration_ns::double as lasted from events) join codes using (name, lane) "
        f"where device >= 0 and step >= 0{within} group by {'process, ' if by_process else ''}step, device"
    )


def _known(column: dict[str, np.ndarray], stage: np.ndarray, stages: int) -> np.ndarray:
    """Which rows are whole, bool[rows]: one step, and as many sums and kinds of sums as other devices of the stage have."""
    known = column["times"] == 1
    kinds = np.sum([~np.isnan(column[f"c{number}"]) for number in range(len(_COLUMNS))], axis=0)
    for count in (column["computes"], kinds):
        most = np.zeros(stages, np.int64)
        np.maximum.at(most, stage[known], count[known])
        known = known & (count == most[stage])
    return known


def _notes(steps: np.ndarray, length: np.ndarray) -> tuple[str, ...]:
    missing = np.isnan(length).reshape(steps.size, -1)
    devices = np.flatnonzero(missing.all(axis=0))
    notes = []
    if devices.size:
        shown = ", ".join(map(str, devices[:_SHOWN])) + (", ..." if devices.size > _SHOWN else "")
        notes.append(f"{devices.size} of {missing.shape[1]} devices have no whole step: {shown}")
    partly = missing[:, ~missing.all(axis=0)]
    if partly.any():
        notes.append(f"{int(partly.sum())} of {partly.size} steps of the other devices are missing or incomplete")
    return tuple(notes)


_SHOWN = 8


def quoted(name: str) -> str:
    """A name as a string of SQL."""
    return "'" + name.replace("'", "''") + "'"


def _mesh(store: EventStore, within: str) -> tuple[MeshShape, list[Facts | None], tuple[str, ...], tuple[str, ...]]:
    """The mesh and every device's process, by what processes say; to which processes the steps are restricted, empty: to none; notes."""
    described = [file for file in store.files if file.facts is not None and file.facts.role == "trainer" and file.facts.mesh is not None]
    described.sort(key=lambda file: file.summary.last_unix_ns)
    stated = [(file.process, file.facts) for file in described if file.facts is not None]
    chosen, notes = (), ()
    if len({facts.mesh for _, facts in stated}) > 1:
        table = store.sql(f"select distinct process::varchar as process from events where name = '{STEP_SPAN}' and device >= 0{within}")
        there = set(table["process"].to_pylist())
        stated = [(process, facts) for process, facts in stated if process in there] or stated[-1:]
    meshes = list(dict.fromkeys(facts.mesh for _, facts in reversed(stated) if facts.mesh is not None))
    if not meshes:
        raise UsageError("the run's processes state 0 meshes; expected one: choose a run whose trainers wrote their events")
    mesh = MeshShape(*meshes[0])
    if len(meshes) > 1:
        stated = [(process, facts) for process, facts in stated if facts.mesh == meshes[0]]
        chosen = tuple(dict.fromkeys(process for process, _ in stated))
        shown = ", ".join("x".join(map(str, one)) for one in meshes[1:])
        notes = (f"the mesh changed within these steps: those on {shown} are left out, {'x'.join(map(str, meshes[0]))} is the newest",)
    owners: list[Facts | None] = [None] * mesh.size
    for _, facts in stated:
        for device in facts.devices:
            if device < mesh.size:
                owners[device] = facts
    return mesh, owners, chosen, notes


def _range_text(steps: tuple[int | None, int | None]) -> str:
    first, end = steps
    return "any step" if first is None and end is None else f"steps {'' if first is None else first}:{'' if end is None else end}"

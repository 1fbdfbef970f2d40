"""What the devices of a run computed and waited for in each step, as arrays over steps and mesh, out of its events (`train/stamps.py`).

A time is known only if the device's process wrote all of its rows of that step; otherwise it is NaN in every array, and the
notes say how many are. Of a step that was run again, after a resume, the last run counts. Of a run that changed its mesh within these
steps the newest mesh counts, and what ran on others is left out.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascale_jax.config.layout import MeshShape
from megascale_jax.errors import UsageError
from megascale_jax.observe.event_segments import Facts
from megascale_jax.observe.event_sums import RunSums, SumsReader
from megascale_jax.observe.events import STEP_END
from megascale_jax.observe.step_sums import COLUMNS, FIELDS, IDLE, NONE, OPTIMIZER, PASSES, STEP_SPAN, WAITS, has_repeats

COMPUTED = (*PASSES, OPTIMIZER)
"""Names of computation."""
SUMS = (*dict.fromkeys(name for name, _ in COLUMNS), STEP_END)
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


def read_step_times(run: Path | SumsReader, steps: tuple[int | None, int | None] = (None, None)) -> StepTimes:
    """The times of the steps ``first <= step < end``, either may be None. Whoever asks again and again gives one reader.

    Raises RunFolderError if the run has no events, and UsageError if it has no stamps of any of these steps.
    """
    read = (run if isinstance(run, SumsReader) else SumsReader(run)).read(*steps)
    mesh, owners, counted, others = _mesh(read)
    again, column, process = _newest(read, counted)
    place = column["device"]
    if not place.size:
        raise UsageError(f"no stamps of {_range_text(steps)}; expected a run with train.events.stamps and at least one step of these")
    if place.max() >= mesh.size:
        raise UsageError(f"events of device {place.max()}, but the run's mesh has {mesh.size} devices; its events are of different runs")
    found, at = np.unique(column["step"], return_inverse=True)
    cells = at * mesh.size + place
    whole = _known(column, place // (mesh.data * mesh.tensor), mesh.pipe)
    arrays: dict[tuple[str, str], np.ndarray] = {}
    for key, name in zip(COLUMNS, FIELDS[-len(COLUMNS) :], strict=True):
        is_known = whole & (column[name] != NONE)
        if key != (IDLE, "compute") and not is_known.any():
            continue
        array = np.full(found.size * mesh.size, np.nan)
        array[cells] = np.where(is_known, column[name] / 1e9, np.nan)
        arrays[key] = array.reshape(-1, mesh.pipe, mesh.data, mesh.tensor)
    if (STEP_SPAN, "compute") not in arrays:
        raise UsageError(f"the stamps of {_range_text(steps)} are incomplete on every device; expected at least one whole step")
    processes = np.full((found.size, mesh.size), None) if again or others else None
    if processes is not None:
        processes[at, place] = np.array(read.processes, object)[process]
    length = arrays[STEP_SPAN, "compute"]
    idle = arrays[IDLE, "compute"]
    return StepTimes(
        mesh,
        found,
        tuple("" if owner is None else owner.host for owner in owners),
        {name: arrays[name, "compute"] for name in COMPUTED if (name, "compute") in arrays},
        np.where(np.isnan(length), np.nan, np.nan_to_num(idle)),
        {key: arrays[key] for key in WAITS if key in arrays},
        length,
        (*read.notes, *others, *_notes(found, length)),
        processes,
        tuple(-1 if owner is None else owner.rank for owner in owners),
    )


def _newest(read: RunSums, counted: np.ndarray) -> tuple[bool, dict[str, np.ndarray], np.ndarray]:
    """Whether processes ran a step of a device again; of each step and device the sums by field of the process that began it last; which.

    ``counted``: whether a process counts, bool[process].
    """
    sums, process = read.sums, read.process
    if not counted.all():
        sums, process = sums[:, counted[process]], process[counted[process]]
    column = dict(zip(FIELDS, sums, strict=True))
    if not has_repeats(sums):
        return False, column, process
    order = np.lexsort((column["began_ns"], column["device"], column["step"]))
    step, device = column["step"][order], column["device"][order]
    is_last = np.ones(order.size, bool)
    is_last[:-1] = (np.diff(step) != 0) | (np.diff(device) != 0)
    chosen = order[is_last]
    return True, {name: values[chosen] for name, values in column.items()}, process[chosen]


def _known(column: dict[str, np.ndarray], stage: np.ndarray, stages: int) -> np.ndarray:
    """Which rows are whole, bool[rows]: one step, and as many sums and kinds of sums as other devices of the stage have."""
    known = column["spans"] == 1
    kinds = np.sum([column[name] != NONE for name in FIELDS[-len(COLUMNS) :]], axis=0)
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


def _mesh(read: RunSums) -> tuple[MeshShape, list[Facts | None], np.ndarray, tuple[str, ...]]:
    """The mesh and every device's process, by what processes say; which processes count, bool[process]; notes."""
    described = [source for source in read.sources if source.facts.role == "trainer" and source.facts.mesh is not None]
    described.sort(key=lambda source: source.last_unix_ns)
    counted, notes = np.ones(len(read.processes), bool), ()
    if len({source.facts.mesh for source in described}) > 1:
        with_steps = np.unique(read.process[read.sums[FIELDS.index("spans")] > 0])
        there = {read.processes[number] for number in with_steps}
        described = [source for source in described if source.process in there] or described[-1:]
    meshes = list(dict.fromkeys(source.facts.mesh for source in reversed(described) if source.facts.mesh is not None))
    if not meshes:
        raise UsageError("the run's processes state 0 meshes; expected one: choose a run whose trainers wrote their events")
    mesh = MeshShape(*meshes[0])
    if len(meshes) > 1:
        described = [source for source in described if source.facts.mesh == meshes[0]]
        of_mesh = {source.process for source in described}
        counted = np.array([process in of_mesh for process in read.processes])
        shown = ", ".join("x".join(map(str, one)) for one in meshes[1:])
        notes = (f"the mesh changed within these steps: those on {shown} are left out, {'x'.join(map(str, meshes[0]))} is the newest",)
    owners: list[Facts | None] = [None] * mesh.size
    for source in described:
        for device in source.facts.devices:
            if device < mesh.size:
                owners[device] = source.facts
    return mesh, owners, counted, notes


def _range_text(steps: tuple[int | None, int | None]) -> str:
    first, end = steps
    return "any step" if first is None and end is None else f"steps {'' if first is None else first}:{'' if end is None else end}"

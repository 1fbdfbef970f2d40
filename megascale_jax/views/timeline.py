"""One step of a run as its events tell it: what each device computed and waited for, what its processes did meanwhile. No JAX.

A step with *details* has every phase of every tick, any other the sums of its units (`train/stamps.py`). Of a step that was trained
more than once, after a resume, the newest attempt counts, and in it the newest process of a rank. Times of other hosts are moved to
the clock of the lowest rank's by what `offsets.py` finds in the steps around; processes of one host share a clock as it is.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megascale_jax.errors import UsageError
from megascale_jax.observe.event_segments import Facts
from megascale_jax.observe.event_store import EventStore, read_events
from megascale_jax.observe.offsets import offsets
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.parallel.pipeline.stamps import STEP_NAMES, STEP_SPAN, Pass, pass_of

UNIT_PASSES: tuple[Pass, ...] = ("forward", "backward", "weight")
"""Passes of which a stage computes one unit a tick."""


@dataclass(frozen=True)
class Row:
    """An event. ``begin_ns``: since 1970, by one clock for all; ``duration_ns`` of a sum is less than what it stretches over."""

    name: str
    lane: str
    tick: int
    micro_batch: int
    chunk: int
    begin_ns: int
    duration_ns: int
    text: str | None = None

    @property
    def end_ns(self) -> int:
        """Nanoseconds since 1970."""
        return self.begin_ns + self.duration_ns

    @property
    def of(self) -> Pass:
        """What a computing phase belongs to, by its name."""
        return pass_of(self.name) if "." in self.name else "step"


@dataclass(frozen=True)
class Device:
    """A device in a step; ``place`` are its coordinates pipe, data, tensor. Rows are in the order of time."""

    number: int
    place: tuple[int, int, int]
    rank: int
    host: str
    step: Row | None
    phases: tuple[Row, ...]
    sums: tuple[Row, ...]

    @property
    def stage(self) -> int:
        """Its pipeline stage."""
        return self.place[0]

    @cached_property
    def units(self) -> Mapping[Pass, tuple[Row, ...]]:
        """By pass, one row a tick from the begin of its first to the end of its last computing phase; micro-batch -1: on nothing."""
        found: dict[Pass, dict[int, list[Row]]] = {of: {} for of in UNIT_PASSES}
        for row in self.phases:
            if row.lane == "compute" and row.of in found:
                found[row.of].setdefault(row.tick, []).append(row)
        return {of: tuple(_joined(of, rows) for rows in ticks.values()) for of, ticks in found.items()}


def _joined(of: Pass, rows: Sequence[Row]) -> Row:
    first, end_ns = rows[0], max(row.end_ns for row in rows)
    return Row(of, "compute", first.tick, first.micro_batch, first.chunk, first.begin_ns, end_ns - first.begin_ns)


@dataclass(frozen=True)
class Host:
    """What a rank's processes did in a step, by lane: its sections, its keeper."""

    rank: int
    name: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Timeline:
    """A step of an attempt; ``notes`` say what is missing of it."""

    step: int
    attempt: int
    mesh: tuple[int, int, int]
    devices: tuple[Device, ...]
    hosts: tuple[Host, ...]
    notes: tuple[str, ...]

    @property
    def has_details(self) -> bool:
        """Whether it knows phases and ticks."""
        return any(device.phases for device in self.devices)

    @cached_property
    def schedule(self) -> Schedule | None:
        """The schedule that the step went by, found from its units; ``None``: without details, or they are not of a whole step."""
        computing = [(device, row) for device in self.devices for row in device.phases if row.lane == "compute"]
        busy = [(device, row) for device, row in computing if row.micro_batch >= 0 and row.of in UNIT_PASSES]
        if not busy:
            return None
        pipe = self.mesh[0]
        chunks, micro_batches = (1 + max(getattr(row, name) for _, row in busy) for name in ("chunk", "micro_batch"))
        if micro_batches % pipe:
            return None
        first = min((row.tick + device.stage for device, row in busy if row.of == "backward"), default=-1)
        delay = first - Schedule(pipe, chunks, micro_batches).backward_offset
        return Schedule(pipe, chunks, micro_batches, 1 if delay else 0) if delay in (0, 1) else None


_SPANS = "role = 'trainer' and device >= 0 and step >= 0 and not is_instant"
"""What devices did: pulses of a hang are no step."""


def steps_of(run: Path, ranks: Collection[int]) -> tuple[list[int], list[int]]:
    """Steps of which these ranks' devices have events, and those with details, in order. Raises RunFolderError without events."""
    with read_events(run, ranks=ranks) as store:
        found = store.sql(f"select step, bool_or(tick >= 0) as has_details from events where {_SPANS} group by step").to_pylist()
    return sorted(row["step"] for row in found), sorted(row["step"] for row in found if row["has_details"])


def read_timeline(run: Path, step: int, ranks: Collection[int] | None = None, devices: Collection[int] | None = None) -> Timeline:
    """A step of a run, of some ranks and devices only if given.

    Raises RunFolderError when the run has no events, and UsageError when there are none of that step.
    """
    with read_events(run, ranks=ranks, steps=range(step - _AROUND, step + _AROUND + 1)) as store:
        facts = {file.process: file.facts for file in store.files if file.facts is not None}
        attempt = store.sql(f"select max(attempt) as newest from events where {_SPANS} and step = {step}")
        number = attempt.to_pylist()[0]["newest"]
        if number is None:
            known, _ = steps_of(run, ranks or {min((fact.rank for fact in facts.values()), default=0)})
            where = f"there are steps {known[0]} to {known[-1]}" if known else "there are none of any step: is train.events.stamps on?"
            raise UsageError(f"{run} has no events of devices in step {step}; {where}")
        where = f"attempt = {number} and role in ('trainer', 'keeper') and step = {step}"
        found = store.sql(f"select {', '.join(_COLUMNS)} from events where {where} order by unix_ns").to_pylist()
        later_ns, spread_ns = _clocks(store, facts, found)
        notes = [*store.notes, f"clocks of hosts are aligned to within {spread_ns / 1e3:.0f} us"] if spread_ns else store.notes
    mesh = next((fact.mesh for fact in facts.values() if fact.mesh is not None and fact.attempt == number), None)
    if mesh is None:
        raise UsageError(f"the events of step {step} do not say of which mesh they are: their files are damaged")
    shown: list[Device] = []
    hosts: dict[int, Host] = {}
    for (device, process), rows in sorted(_by_device(_of_newest_processes(found)).items()):
        if device >= 0 and (devices is None or device in devices):
            shown.append(_device(device, mesh, facts[process], rows, later_ns.get(process, 0)))
        elif device < 0:
            rank, before = facts[process].rank, hosts.get(facts[process].rank)
            more = () if before is None else before.rows
            hosts[rank] = Host(rank, facts[process].host, more + tuple(_row(row, later_ns.get(process, 0)) for row in rows))
    return Timeline(step, number, mesh, tuple(shown), tuple(hosts.values()), tuple(notes))


_NUMBERS = ("device", "tick", "microbatch", "chunk", "begin_ns", "unix_ns", "duration_ns")
_COLUMNS = ("name", "lane", *_NUMBERS, "is_instant", "text", "process", "role", "rank")
Found = Mapping[str, Any]
_AROUND = 8
"""Steps before and after, by which clocks are compared."""


def _clocks(store: EventStore, facts: Mapping[str, Facts], rows: Sequence[Found]) -> tuple[Mapping[str, int], float]:
    """By process how much later its host's clock is than that of the lowest rank's host, ns, and how well that is known.

    It is taken at the process's first row of the step: clocks do not drift by a microsecond within one.
    """
    first: dict[str, Found] = {}
    for row in rows:
        first.setdefault(row["process"], row)
    lowest = sorted((facts[process].rank, process) for process in first if process in facts and facts[process].role == "trainer")
    known = offsets(store)
    if not lowest or lowest[0][1] not in known:
        return {}, 0.0
    reference = first[lowest[0][1]]
    to_unix_ns = reference["unix_ns"] - reference["begin_ns"]
    by_boot: dict[str, tuple[int, float]] = {facts[lowest[0][1]].boot_id: (0, 0.0)}
    for _, process in lowest:
        if facts[process].boot_id not in by_boot and process in known:
            row, offset = first[process], known[process]
            mapped_ns = int(offset.to_reference(np.array([row["begin_ns"]]))[0]) + to_unix_ns
            by_boot[facts[process].boot_id] = (row["unix_ns"] - mapped_ns, offset.uncertainty_ns or 0.0)
    later_ns = {process: by_boot[facts[process].boot_id][0] for process in first if process in facts and facts[process].boot_id in by_boot}
    return later_ns, max(spread for _, spread in by_boot.values())


def _of_newest_processes(rows: Sequence[Found]) -> list[Found]:
    newest: dict[tuple[str, int], tuple[int, str]] = {}
    for row in rows:
        key, seen = (row["role"], row["rank"]), (row["unix_ns"], row["process"])
        newest[key] = max(seen, newest.get(key, seen))
    return [row for row in rows if row["process"] == newest[row["role"], row["rank"]][1]]


def _by_device(rows: Sequence[Found]) -> dict[tuple[int, str], list[Found]]:
    found: dict[tuple[int, str], list[Found]] = {}
    for row in rows:
        found.setdefault((row["device"], row["process"]), []).append(row)
    return found


def _device(number: int, mesh: tuple[int, int, int], facts: Facts, rows: Sequence[Found], later_ns: int) -> Device:
    spans = [row for row in rows if not row["is_instant"]]
    step = next((_row(row, later_ns) for row in spans if row["name"] == STEP_SPAN), None)
    phases: dict[tuple[str, int], Row] = {}
    sums: list[Row] = []
    has_details = any("." in row["name"] for row in spans)
    for row in spans:
        if "." in row["name"] or (has_details and row["name"] in STEP_NAMES):
            phases.setdefault((row["name"], row["unix_ns"]), _row(row, later_ns))  # what is outside the ticks is among the sums as well
        elif row["name"] != STEP_SPAN:
            sums.append(_row(row, later_ns))
    pipe, data, tensor = (int(place) for place in np.unravel_index(number, mesh))
    return Device(number, (pipe, data, tensor), facts.rank, facts.host, step, tuple(phases.values()), tuple(sums))


def _row(row: Found, later_ns: int) -> Row:
    numbers = (row["tick"], row["microbatch"], row["chunk"], row["unix_ns"] - later_ns, row["duration_ns"])
    return Row(row["name"], row["lane"], *numbers, row["text"])

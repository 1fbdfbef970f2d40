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
from megascale_jax.observe.offsets import FEWEST, offsets
from megascale_jax.observe.step_sums import STEP_NAMES, STEP_SPAN, Pass
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.parallel.pipeline.stamps import pass_of
from megascale_jax.views.step_processes import SPANS

UNIT_PASSES: tuple[Pass, ...] = ("forward", "backward", "weight")
"""Passes of which a stage computes one unit a tick."""
UNIT_LANES: tuple[Pass, ...] = (*UNIT_PASSES, "head")
"""Passes whose units are drawn; of the head, which all stages share, one micro-batch a tick."""


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
        found: dict[Pass, dict[int, list[Row]]] = {of: {} for of in UNIT_LANES}
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


def read_timeline(run: Path, step: int, ranks: Collection[int] | None = None, devices: Collection[int] | None = None) -> Timeline:
    """A step of a run, of some ranks and devices only if given.

    Raises RunFolderError when the run has no events, and UsageError when there are none of that step and these devices, or more than
    `MOST_ROWS`.
    """
    with read_events(run, ranks=ranks, steps=range(step - _AROUND, step + _AROUND + 1)) as store:
        segments = sorted((file.facts for file in store.files if file.facts is not None), key=lambda facts: facts.segment)
        names = {id(file.facts): file.process for file in store.files}
        facts = {names[id(one)]: one for one in segments}
        attempt = store.sql(f"select max(attempt) as newest from events where {SPANS} and step = {step}")
        number = attempt.to_pylist()[0]["newest"]
        if number is None:
            raise UsageError(f"{run} has no events of devices in step {step} of these ranks")
        drawn = "" if devices is None else f" and (device < 0 or device in ({', '.join(map(str, [-1, *devices]))}))"
        where = f"attempt = {number} and role in ('trainer', 'keeper') and step = {step}{drawn}"
        if (count := store.sql(f"select count(*) as number from events where {where}").to_pylist()[0]["number"]) > MOST_ROWS:
            raise UsageError(
                f"step {step} has {count:,} events of these devices; a trace holds at most {MOST_ROWS:,}: choose by --ranks or --stage"
            )
        found = _of_newest_processes(store.sql(f"select {', '.join(_COLUMNS)} from events where {where} order by unix_ns").to_pylist())
        later_ns, clock_notes = _clocks(store, facts, found)
        notes = [*store.notes, *clock_notes]
    newest = max(((row["unix_ns"], row["process"]) for row in found if row["device"] >= 0 and not row["is_instant"]), default=None)
    if newest is None:
        raise UsageError(f"no chosen device has events of step {step} in attempt {number}, the newest one; choose others or another step")
    mesh = facts[newest[1]].mesh
    if mesh is None:
        raise UsageError(f"the events of step {step} do not say of which mesh they are: their files are damaged")
    other = {process for process in {row["process"] for row in found} if facts[process].mesh not in (mesh, None)}
    if other:
        notes.append(f"{len(other)} older processes had step {step} with another mesh and are not drawn")
    owners = {row["device"]: row["process"] for row in found if row["process"] not in other}  # in the order of time: the newest
    shown: list[Device] = []
    hosts: dict[int, Host] = {}
    for (device, process), rows in sorted(_by_device(found).items()):
        if 0 <= device < np.prod(mesh) and owners.get(device) == process:
            shown.append(_device(device, mesh, facts[process], rows, later_ns.get(process, 0)))
        elif device < 0 and process not in other:
            rank, before = facts[process].rank, hosts.get(facts[process].rank)
            more = () if before is None else before.rows
            hosts[rank] = Host(rank, facts[process].host, more + tuple(_row(row, later_ns.get(process, 0)) for row in rows))
    return Timeline(step, number, mesh, tuple(shown), tuple(hosts.values()), tuple(notes))


_NUMBERS = ("device", "tick", "microbatch", "chunk", "begin_ns", "unix_ns", "duration_ns")
_COLUMNS = ("name", "lane", *_NUMBERS, "is_instant", "text", "process", "role", "rank")
Found = Mapping[str, Any]
_AROUND = 8
"""Steps before and after, by which clocks are compared."""
MOST_ROWS = 3_000_000
"""Of a step: a trace of 600 MB; 64 devices of a 175 B model have a fifth of it."""


def _clocks(store: EventStore, facts: Mapping[str, Facts], rows: Sequence[Found]) -> tuple[Mapping[str, int], list[str]]:
    """By process how much later its host's clock is than that of the lowest rank's host, ns, and what to say of it.

    It is taken at the process's first row of the step: clocks do not drift by a microsecond within one.
    """
    first: dict[str, Found] = {}
    for row in rows:
        first.setdefault(row["process"], row)
    lowest = sorted((facts[process].rank, process) for process in first if facts[process].role == "trainer")
    hosts = {facts[process].boot_id: facts[process].host for _, process in reversed(lowest)}
    if len(hosts) < 2:
        return {}, []
    known = offsets(store)
    base = lowest[0][1]
    by_boot: dict[str, tuple[int, float | None]] = {facts[base].boot_id: (0, 0.0)}
    to_unix_ns = first[base]["unix_ns"] - first[base]["begin_ns"]
    for _, process in lowest if base in known else ():
        if facts[process].boot_id not in by_boot and process in known:
            row, offset = first[process], known[process]
            mapped_ns = int(offset.to_reference(np.array([row["begin_ns"]]))[0]) + to_unix_ns
            by_boot[facts[process].boot_id] = (row["unix_ns"] - mapped_ns, offset.uncertainty_ns)
    later_ns = {process: by_boot[facts[process].boot_id][0] for process in first if facts[process].boot_id in by_boot}
    return later_ns, _clock_notes(hosts, {boot: spread_ns for boot, (_, spread_ns) in by_boot.items()})


def _clock_notes(hosts: Mapping[str, str], spread_ns: Mapping[str, float | None]) -> list[str]:
    """``hosts``: all by boot; ``spread_ns``: of those that are aligned."""
    notes: list[str] = []
    if apart := [hosts[boot] for boot in hosts if boot not in spread_ns]:
        more = f" and {len(apart) - 1} more hosts" if len(apart) > 1 else ""
        notes.append(f"the clock of {apart[0]}{more} is not aligned with the others': no step around ended on both; its own time is drawn")
    stated = [spread for spread in spread_ns.values() if spread is not None]
    if len(stated) < len(spread_ns):
        notes.append(f"how well the clocks of hosts are aligned is not known: fewer than {FEWEST} steps around ended on both")
    elif len(spread_ns) > 1:
        notes.append(f"clocks of hosts are aligned to within {max(stated) / 1e3:.0f} us")
    return notes


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

"""How far every rank of a run has come, by its event files alone: what `why.py` judges. No JAX.

Only the newest attempt counts, of a rank its newest process, and only processes that were there when the newest of them began: events
begin after all ranks have met. On another host that is judged with `SKEW_S` to spare. Of each process the end of its files is read, so
a run of any length takes a few seconds. Hosts' clocks are brought to the middle one (`host_clocks.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import ValidationError

from megascale_jax.errors import RunFolderError
from megascale_jax.observe.event_files import STORED, is_over, read_stream
from megascale_jax.observe.event_paths import OPEN_SUFFIX
from megascale_jax.observe.event_segments import Facts
from megascale_jax.observe.marks import PREPARATION, SECTION_ORDER, SECTIONS, UNTAUGHT_PASSES
from megascale_jax.observe.pulse import ALIVE, PASSED, Alive, Passed
from megascale_jax.views.host_clocks import ahead_ns
from megascale_jax.views.ranks import facts_of, files_of_trainers, newest_facts

_READERS = 16
"""Threads that read files, most of whose time the interpreter is not needed."""
_EVALUATES = ("evaluate", "checkpoint", "end")
"""Sections that belong to the step before, which they need not name."""
SKEW_S = 60.0
"""A process of another host, whose clock may be behind, is of a start before if its events ended so long before the newest began."""
_STEPS = 32
"""Newest passes by whose ends clocks are compared."""
Place = tuple[int, int, int]


@dataclass(frozen=True)
class DevicePosition:
    """Where a device is: the step, how many of its stamps are taken, and what it does or waits for (`pulse.Passed`)."""

    device: int
    step: int
    tick: int
    passed: Passed

    @property
    def order(self) -> tuple[int, int]:
        """More is further. A step that is done is the begin of the next one."""
        is_done = self.passed.stamps >= self.passed.of
        return (self.step + 1, 0) if is_done else (self.step, self.passed.stamps)


@dataclass(frozen=True)
class RankProgress:
    """Where a rank is. Times are nanoseconds since 1970, of all ranks by one clock.

    ``section`` and ``step``: the newest pass that it is known to have entered, at ``since_ns``; with ``is_past`` that pass is over and
    what came then is not known. ``section`` is empty when nothing is known. ``moved_ns``: when it was last seen to come further.
    ``is_gone``: its process has ended, ``has_finished``: as the run did. ``longest_s``, ``passes``: of its finished passes. ``ends_ns``:
    by step the ends of its newest passes of one. ``note``: what is wrong with its files.
    """

    rank: int
    host: str
    places: tuple[Place, ...]
    section: str = ""
    step: int = -1
    since_ns: int = 0
    is_past: bool = False
    completed: int = 0
    devices: tuple[DevicePosition, ...] = ()
    moved_ns: int = 0
    last_ns: int = 0
    is_missing: bool = False
    is_gone: bool = False
    has_finished: bool = False
    longest_s: Mapping[str, float] = field(default_factory=dict)
    passes: Mapping[str, int] = field(default_factory=dict)
    ends_ns: Mapping[int, int] = field(default_factory=dict)
    note: str = ""

    @property
    def host_order(self) -> tuple[int, int, bool]:
        """Where its main thread is; more is further."""
        is_preparing = self.section == "data" and self.step < 0
        name = PREPARATION if is_preparing else self.section
        return self.completed, SECTION_ORDER.index(name) if name in SECTION_ORDER else -1, self.is_past

    @property
    def device_order(self) -> tuple[int, int] | None:
        """Where the last of its devices is; ``None``: that is not known."""
        return min((device.order for device in self.devices), default=None)

    @property
    def slowest(self) -> DevicePosition | None:
        """The last of its devices."""
        return min(self.devices, key=lambda device: device.order, default=None)


@dataclass(frozen=True)
class Progress:
    """All ranks of the newest attempt, by number. ``until_ns``: the newest event of all; ``changed_ns``: when a file last changed."""

    attempt: int
    mesh: Place | None
    ranks: tuple[RankProgress, ...]
    until_ns: int
    changed_ns: int = 0


def read_progress(run: Path) -> Progress:
    """How far a run has come. Raises RunFolderError when it has no event of a training process that can be read."""
    files = files_of_trainers(run)
    known = {process: facts for process, paths in files.items() if (facts := newest_facts(paths)) is not None}
    if not known:
        raise RunFolderError(f"{run} has no events of a training process that can be read; expected some from its first step on")
    attempt = max(facts.attempt for facts in known.values())
    newest: dict[int, str] = {}
    for process, facts in sorted(known.items(), key=lambda item: _began_ns(item[1])):
        if facts.attempt == attempt:
            newest[facts.rank] = process
    with ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(lambda process: _rank_progress(known[process], files[process]), newest.values()))
    began_ns = {one.rank: _first_ns(files[newest[one.rank]]) for one in found}
    clocks = {rank: known[process].boot_id or known[process].host for rank, process in newest.items()}
    found = _together(found, began_ns, clocks)
    ahead = ahead_ns({one.rank: (clocks[one.rank], began_ns[one.rank], one.ends_ns) for one in found})
    found = [_earlier(one, ahead[one.rank]) for one in found]
    facts = [known[newest[one.rank]] for one in found]
    mesh = next((fact.mesh for fact in facts if fact.mesh is not None), None)
    ranks = sorted((*found, *_missing(mesh, facts)), key=lambda one: one.rank)
    changed_ns = max((_changed_ns(files[newest[one.rank]][-1]) for one in found), default=0)
    return Progress(attempt, mesh, tuple(ranks), max((one.last_ns for one in ranks), default=0), changed_ns)


def _together(found: Sequence[RankProgress], began_ns: Mapping[int, int], clocks: Mapping[int, str]) -> list[RankProgress]:
    """Those that still had events when the last of their host, or by `SKEW_S` of any host, began."""
    last_ns, last_of = max(began_ns.values()), dict[str, int]()
    for rank, clock in clocks.items():
        last_of[clock] = max(began_ns[rank], last_of.get(clock, 0))

    def was_there(one: RankProgress) -> bool:
        last_seen_ns, own_ns = max(one.last_ns, began_ns[one.rank]), last_of[clocks[one.rank]]
        return not one.last_ns or (last_seen_ns >= own_ns and last_seen_ns + SKEW_S * 1e9 >= last_ns)

    return [one for one in found if was_there(one)]


def _earlier(one: RankProgress, by_ns: int) -> RankProgress:
    moved = {name: at_ns - by_ns for name in ("since_ns", "moved_ns", "last_ns") if (at_ns := getattr(one, name))}
    return replace(one, **moved) if by_ns else one


def _changed_ns(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _began_ns(facts: Facts) -> int:
    return max((unix_ns for _, unix_ns in facts.anchors), default=0)


def _first_ns(paths: Sequence[Path]) -> int:
    """When a process began to write: what its first readable file says."""
    return next((_began_ns(facts) for path in paths if (facts := facts_of(path)) is not None), 0)


def _missing(mesh: Place | None, facts: Sequence[Facts]) -> Iterable[RankProgress]:
    """Ranks that the mesh asks for and that have no file. Where they are is said if ranks have the devices in their order."""
    present = {fact.rank for fact in facts}
    own = max((len(fact.devices) for fact in facts), default=0)
    count = int(np.prod(mesh)) // own if mesh is not None and own else max(present, default=-1) + 1
    in_order = all(fact.devices == tuple(range(fact.rank * own, (fact.rank + 1) * own)) for fact in facts)
    for rank in sorted(set(range(count)) - present):
        devices = range(rank * own, (rank + 1) * own) if in_order else ()
        yield RankProgress(rank, "", _places(mesh, devices), is_missing=True, note="it has no file of events")


def _places(mesh: Place | None, devices: Iterable[int]) -> tuple[Place, ...]:
    if mesh is None:
        return ()
    size = int(np.prod(mesh))
    pairs = [np.unravel_index(device, mesh) for device in devices if device < size]
    return tuple((int(pipe), int(data), int(tensor)) for pipe, data, tensor in pairs)


def _rank_progress(facts: Facts, paths: Sequence[Path]) -> RankProgress:
    table, note, is_closed = _tail(paths)
    at = {"rank": facts.rank, "host": facts.host, "places": _places(facts.mesh, facts.devices), "note": note}
    at["is_gone"] = is_closed or all(is_over(path) for path in paths[-1:] if path.name.endswith(OPEN_SUFFIX))
    rows = sorted(table.to_pylist(), key=lambda row: row["unix_ns"] + row["duration_ns"])
    if not rows:
        return RankProgress(**at)
    spans = [row for row in rows if row["name"] in SECTIONS]
    lasts = {name: [row["duration_ns"] / 1e9 for row in spans if row["name"] == name] for name in SECTIONS}
    taught = {name: seconds[UNTAUGHT_PASSES.get(name, 0) :] for name, seconds in lasts.items()}
    at["longest_s"] = {name: max(seconds) for name, seconds in taught.items() if seconds}
    at["passes"] = {name: len(seconds) for name, seconds in lasts.items() if seconds}
    at["ends_ns"] = {row["step"]: row["unix_ns"] + row["duration_ns"] for row in spans if row["name"] == "step"}
    at["ends_ns"] = dict(list(at["ends_ns"].items())[-_STEPS:])
    at |= _pass_of(rows, spans)
    devices, moved_ns = _devices_of(rows)
    last = rows[-1]
    at |= {"devices": devices, "last_ns": last["unix_ns"] + last["duration_ns"]}
    at["moved_ns"] = max(moved_ns, at.get("since_ns", 0), max((row["unix_ns"] + row["duration_ns"] for row in spans), default=0))
    at["has_finished"] = at["is_gone"] and bool(spans) and spans[-1]["name"] == "end" and last is spans[-1]
    return RankProgress(**at)


def _pass_of(rows: Sequence[dict], spans: Sequence[dict]) -> dict:
    """The newest pass: that of the last pulse, unless a later one has ended since."""
    pulses: list[tuple[dict, Alive]] = []
    for row in rows:
        if row["name"] == ALIVE:
            with suppress(ValidationError):
                alive = Alive.model_validate_json(row["text"] or "")
                pulses += [(row, alive)] if alive.section in SECTIONS else []
    steps = [row["step"] for row in spans if row["name"] in ("step", "compile")]
    newest = max(steps, default=-1)
    span = spans[-1] if spans else None
    if pulses and (span is None or span["unix_ns"] + span["duration_ns"] <= pulses[-1][0]["unix_ns"]):
        row, alive = pulses[-1]
        since_ns = row["unix_ns"] - (row["begin_ns"] - alive.since_ns)
        found = {"section": alive.section, "step": row["step"], "since_ns": since_ns}
    elif span is not None:
        end_ns = span["unix_ns"] + span["duration_ns"]
        found = {"section": span["name"], "step": span["step"], "since_ns": end_ns, "is_past": True}
    else:
        return {}
    section, step = str(found["section"]), int(found["step"])
    if step < 0 and section == "compile":  # that of the first evaluation
        found["section"] = section = "evaluate"
    done = step if section in _EVALUATES else step - 1
    return {**found, "completed": max(done if step >= 0 else newest, 0)}


def _devices_of(rows: Sequence[dict]) -> tuple[tuple[DevicePosition, ...], int]:
    """Newest position of each device, and when the first pulse was that had the last of them there."""
    found: dict[int, DevicePosition] = {}
    moved: dict[int, int] = {}
    for row in rows:
        if row["name"] == PASSED and row["device"] >= 0:
            with suppress(ValidationError):
                position = DevicePosition(row["device"], row["step"], row["tick"], Passed.model_validate_json(row["text"] or ""))
                before = found.get(row["device"])
                if before is None or before.order != position.order:
                    moved[row["device"]] = row["unix_ns"]
                found[row["device"]] = position
    return tuple(found[device] for device in sorted(found)), max(moved.values(), default=0)


_NAMES = (*SECTIONS, ALIVE, PASSED)
_COLUMNS = ("name", "device", "step", "tick", "begin_ns", "duration_ns", "unix_ns", "is_instant", "text")


def _tail(paths: Sequence[Path]) -> tuple[pa.Table, str, bool]:
    """The rows that matter of the newest files of a process, what is wrong with them, and whether the process has closed the last.

    Files are read from the last one back to the first that has a pass, so mostly one.
    """
    pieces: list[pa.Table] = []
    notes: list[str] = []
    is_closed = bool(paths) and not paths[-1].name.endswith(OPEN_SUFFIX)
    for path in reversed(paths):
        with suppress(OSError, pa.ArrowException):  # it has just become Parquet, or was removed
            if path.name.endswith(OPEN_SUFFIX):
                stream = read_stream(path, names=_NAMES)
                is_closed = is_closed or (path == paths[-1] and stream.is_closed)
                notes += [f"{path.name}: {stream.note}"] if stream.note and is_over(path) else []
                pieces.append(_wanted(stream.table.select(_COLUMNS)))
            else:
                pieces.append(_wanted(pq.read_table(path, columns=list(_COLUMNS), filters=[("name", "in", _NAMES)])))
        if pieces and -1 in pieces[-1]["device"].unique().to_pylist():
            break
    schema = pa.schema([STORED.field(name) for name in _COLUMNS])
    return pa.concat_tables([schema.empty_table(), *pieces]), "; ".join(notes), is_closed


def _wanted(table: pa.Table) -> pa.Table:
    """Passes of the process, and all pulses."""
    is_pass = pc.call_function("and", [_is_among(table, SECTIONS), pc.call_function("equal", [table["device"], pa.scalar(-1)])])
    return table.filter(pc.call_function("or", [is_pass, _is_among(table, (ALIVE, PASSED))]))


def _is_among(table: pa.Table, names: Sequence[str]) -> pa.ChunkedArray:
    return pc.call_function("is_in", [table["name"]], pc.SetLookupOptions(value_set=pa.array(names)))

"""What the main threads of a run did, pass by pass, as arrays: what `goodput.py` books. No JAX.

Of a job of many ranks some are read (`chosen_ranks`): all step together, so each tells the same but for what it alone waits for. Times are
nanoseconds since 1970 by one clock (`host_clocks.py`).

A pass that did not end, because its process hangs, was killed, or is still in it, is known by the last pulse (`observe/pulse.py`). A
process ends at the latest when a newer one of its rank, or one of a newer attempt, begins.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median_low

import numpy as np
from pydantic import ValidationError

from megascale_jax.observe.event_segments import Facts
from megascale_jax.observe.event_store import EventStore, quoted
from megascale_jax.observe.marks import SECTIONS
from megascale_jax.observe.pulse import ALIVE, Alive
from megascale_jax.observe.step_sums import STEP_SPAN
from megascale_jax.views.host_clocks import ahead_ns

MOST_RANKS = 8
SECTION = {name: code for code, name in enumerate(SECTIONS)}
KNOWN = "unix_ns > 0 and unix_ns < 1::bigint << 61 and duration_ns >= 0 and duration_ns < 1::bigint << 61"
"""Times with which one can reckon: a damaged file may have others."""
_STEPS = 32
"""Newest passes of each process by whose ends clocks are compared."""
_NEVER_NS = 1 << 62
_COLUMNS = ("process", "section", "step", "begin_ns", "end_ns", "is_open", "rows_from_ns")


@dataclass(frozen=True)
class Process:
    """A training process. ``begin_ns``, ``end_ns``: of what is known of it; ``first_step``: with which it goes on, if it came so far."""

    name: str
    rank: int
    attempt: int
    clock: str
    begin_ns: int
    end_ns: int
    first_step: int | None


@dataclass(frozen=True)
class Passes:
    """Columns int64[n] of all passes: ``process`` as an index, ``section`` of `SECTION`, ``step`` (-1: none), ``begin_ns``, ``end_ns``.

    ``is_open``: it did not end, as far as is known. ``rows_from_ns``: of a wait for rows, when the process's devices had done all
    steps before and so waited too; else its begin. ``ahead_ns``: by name of a clock, how much it is ahead of the one of all times here.
    """

    processes: tuple[Process, ...]
    process: np.ndarray
    section: np.ndarray
    step: np.ndarray
    begin_ns: np.ndarray
    end_ns: np.ndarray
    is_open: np.ndarray
    rows_from_ns: np.ndarray
    has_stamps: bool
    ahead_ns: Mapping[str, int]

    def of(self, *sections: str) -> np.ndarray:
        """Which passes are of these sections, bool[n]."""
        return np.isin(self.section, [SECTION[name] for name in sections])


def chosen_ranks(ranks: Sequence[int], most: int = MOST_RANKS) -> list[int]:
    """At most so many of the ranks, evenly spread, the lowest and the highest among them."""
    known = sorted(set(ranks))
    return known if len(known) <= most else [known[place] for place in np.linspace(0, len(known) - 1, most).astype(int)]


def read_passes(store: EventStore, ranks: Collection[int]) -> Passes:
    """The passes of the training processes of these ranks; empty if there are none."""
    known = {file.process: file.facts for file in store.files if file.facts is not None and file.facts.role == "trainer"}
    facts = {name: fact for name, fact in known.items() if fact.rank in ranks}
    names = sorted(facts)
    if not names:
        return Passes((), *(np.empty(0, np.int64) for _ in _COLUMNS), has_stamps=False, ahead_ns={})
    numbered = f"p(process, number) as (values {', '.join(f'({quoted(name)}, {number})' for number, name in enumerate(names))})"
    column = _ended(store, numbered)
    opened = _opened(store, names, column)
    column = {name: np.concatenate((column[name], np.array(opened[name], np.int64))) for name in column}
    ends_ns = _device_ends(store, numbered, column)
    column["rows_from_ns"] = np.maximum(column["begin_ns"], ends_ns)
    found = _processes(store, names, facts, column)
    ahead = _ahead(found, column)
    shift = np.array([ahead.get(one.clock, 0) for one in found])[column["process"]]
    for name in ("begin_ns", "end_ns", "rows_from_ns"):
        column[name] = column[name] - shift
    found = [replace(one, begin_ns=one.begin_ns - ahead.get(one.clock, 0), end_ns=one.end_ns - ahead.get(one.clock, 0)) for one in found]
    limits = _limits(found)
    for name in ("begin_ns", "end_ns", "rows_from_ns"):
        column[name] = np.minimum(column[name], limits[column["process"]])
    return Passes(tuple(found), *(column[name] for name in _COLUMNS), has_stamps=bool(ends_ns.any()), ahead_ns=ahead)


def _ended(store: EventStore, numbered: str) -> dict[str, np.ndarray]:
    codes = ", ".join(f"({quoted(name)}, {code})" for name, code in SECTION.items())
    table = store.sql(
        f"with {numbered}, s(name, section) as (values {codes}) "
        "select number as process, section, step, unix_ns as begin_ns, unix_ns + duration_ns as end_ns, 0 as is_open "
        "from events join p using (process) join s using (name) "
        f"where role = 'trainer' and device = -1 and lane = 'host' and not is_instant and {KNOWN}"
    )
    return {name: table[name].to_numpy().astype(np.int64) for name in table.column_names}


def _opened(store: EventStore, names: Sequence[str], column: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    """The last pass of each process, if it was seen in one that did not end."""
    table = store.sql(
        "select process::varchar as process, max(unix_ns) as unix_ns, max_by(begin_ns, unix_ns) as begin_ns, "
        "max_by(step, unix_ns) as step, max_by(text, unix_ns) as text from events "
        f"where role = 'trainer' and device = -1 and is_instant and name = '{ALIVE}' and {KNOWN} group by process"
    )
    found: dict[str, list[int]] = {name: [] for name in column}
    number_of = {name: number for number, name in enumerate(names)}
    last = _extreme(np.maximum, 0, len(names), column["process"], column["end_ns"])
    for row in table.to_pylist():
        with suppress(ValidationError):
            alive = Alive.model_validate_json(row["text"] or "")
            number = number_of.get(row["process"], -1)
            last_ns = last[number]
            since_ns = row["unix_ns"] - max(row["begin_ns"] - alive.since_ns, 0)
            if number < 0 or alive.section not in SECTION or last_ns > row["unix_ns"]:
                continue
            since_ns = max(since_ns, last_ns)
            passes = [(alive.section, since_ns, row["unix_ns"])]
            if alive.section == "checkpoint" and last_ns:  # within a step, of which it is all that is known
                passes.append(("step", last_ns, since_ns))
            for section, begin_ns, end_ns in passes:
                for name, value in zip(found, (number, SECTION[section], row["step"], begin_ns, end_ns, 1), strict=True):
                    found[name].append(value)
    return found


def _device_ends(store: EventStore, numbered: str, column: Mapping[str, np.ndarray]) -> np.ndarray:
    """Of each wait for rows, when the devices of the process had done the step before, int64[n]; 0: not known, or no such wait."""
    ends_ns = np.zeros(column["step"].size, np.int64)
    waits = np.flatnonzero((column["section"] == SECTION["data"]) & (column["step"] > 0))
    if not waits.size:
        return ends_ns
    table = store.sql(
        f"with {numbered} select number as process, step, max(unix_ns + duration_ns) as end_ns from events join p using (process) "
        f"where name = '{STEP_SPAN}' and lane = 'compute' and device >= 0 and not is_instant and step >= 0 and {KNOWN} "
        "group by number, step"
    )
    if not table.num_rows:
        return ends_ns
    keys = _key(table["process"].to_numpy(), table["step"].to_numpy())
    order = np.argsort(keys)
    wanted = _key(column["process"][waits], column["step"][waits] - 1)
    at = np.minimum(np.searchsorted(keys[order], wanted), keys.size - 1)
    seen = keys[order][at] == wanted
    ends_ns[waits[seen]] = np.minimum(table["end_ns"].to_numpy()[order][at[seen]], column["end_ns"][waits[seen]])
    return ends_ns


def _key(process: np.ndarray, step: np.ndarray) -> np.ndarray:
    return process.astype(np.int64) << 32 | step.astype(np.int64)


def _resumed(store: EventStore) -> dict[str, int]:
    table = store.sql(
        "select process::varchar as process, max_by(step, unix_ns) as step from events "
        "where role = 'trainer' and device = -1 and is_instant and name = 'resume' and step >= 0 group by process"
    )
    return {row["process"]: row["step"] for row in table.to_pylist()}


def _processes(store: EventStore, names: Sequence[str], facts: Mapping[str, Facts], column: Mapping[str, np.ndarray]) -> list[Process]:
    trains = np.isin(column["section"], [SECTION["compile"], SECTION["step"]]) & (column["step"] > 0)
    begin_ns = _extreme(np.minimum, _NEVER_NS, len(names), column["process"], column["begin_ns"])
    end_ns = _extreme(np.maximum, 0, len(names), column["process"], column["end_ns"])
    first = _extreme(np.minimum, _NEVER_NS, len(names), column["process"][trains], column["step"][trains])
    resumed = _resumed(store)
    found: list[Process] = []
    for number, name in enumerate(names):
        fact = facts[name]
        own = resumed[name] + 1 if name in resumed else first[number] if first[number] < _NEVER_NS else None
        found.append(Process(name, fact.rank, fact.attempt, fact.boot_id or fact.host, begin_ns[number], end_ns[number], own))
    return found


def _extreme(of: np.ufunc, initial: int, count: int, process: np.ndarray, values: np.ndarray) -> list[int]:
    """Of every process the least or the most of its values; ``initial`` without any."""
    found = np.full(count, initial, np.int64)
    of.at(found, process, values)
    return found.tolist()


def _ahead(processes: Sequence[Process], column: Mapping[str, np.ndarray]) -> dict[str, int]:
    """By clock, the median over the starts of how much it is ahead; empty if all processes share one."""
    if len({one.clock for one in processes}) == 1:
        return {}
    rows = np.flatnonzero(column["section"] == SECTION["step"])
    rows = rows[np.lexsort((column["end_ns"][rows], column["process"][rows]))]
    edges = np.searchsorted(column["process"][rows], np.arange(len(processes) + 1)).tolist()
    starts: dict[tuple[int, int | None], dict[int, tuple[str, int, dict[int, int]]]] = {}
    for number in sorted(range(len(processes)), key=lambda number: processes[number].begin_ns):
        one = processes[number]
        newest = rows[max(edges[number + 1] - _STEPS, edges[number]) : edges[number + 1]]
        ends_ns = dict(zip(column["step"][newest].tolist(), column["end_ns"][newest].tolist(), strict=True))
        if one.end_ns:  # of starts that began with the same step, the newest
            starts.setdefault((one.attempt, one.first_step), {})[one.rank] = (one.clock, one.begin_ns, ends_ns)
    found: dict[str, list[int]] = {}
    for start in starts.values():
        for rank, by_ns in ahead_ns(start).items():
            found.setdefault(start[rank][0], []).append(by_ns)
    return {clock: median_low(values) for clock, values in found.items()}


def _limits(processes: Sequence[Process]) -> np.ndarray:
    """When each process was over at the latest, int64[processes]."""
    limits = np.full(len(processes), _NEVER_NS, np.int64)
    by_begin = sorted(range(len(processes)), key=lambda number: processes[number].begin_ns, reverse=True)
    of_rank: dict[int, int] = {}
    of_attempt: dict[int, int] = {}
    for number in by_begin:  # the newest first
        one = processes[number]
        later = [begin_ns for attempt, begin_ns in of_attempt.items() if attempt > one.attempt]
        limits[number] = min([*later, of_rank.get(one.rank, _NEVER_NS)])
        of_rank[one.rank] = of_attempt[one.attempt] = one.begin_ns
    return limits

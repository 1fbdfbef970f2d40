"""All events of a run as one SQL view ``events``, over its Parquet files and the segments that are still written. No JAX.

Columns: `event_files.STORED`. Queries run in DuckDB in memory, on a part of the machine: they can read these events and nothing else,
no file, no network, and change nothing on disk, wherever the query came from.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from megascale_jax.errors import UsageError
from megascale_jax.observe.event_files import STORED, Summary, Writer, read_facts, read_parquet_facts, read_stream, writer_of
from megascale_jax.observe.event_paths import events_folder, found, process_of, settled
from megascale_jax.observe.event_segments import Facts

VIEW = "events"
MOST_MEMORY, MOST_THREADS = 4_000_000_000, 4
"""Bytes, no more than a quarter of the machine's memory, and processor cores that a query gets: a run may be at work beside it."""
_SETTINGS = {
    "temp_directory": "",  # it would be in the working folder, where queries could read and write then
    "python_enable_replacements": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
}


@dataclass(frozen=True)
class FileReport:
    """One file. ``facts`` is ``None`` when it is none of ours; ``writer``: whether a process still writes to it."""

    path: Path
    facts: Facts | None
    summary: Summary
    num_bytes: int
    writer: Writer

    @property
    def process(self) -> str:
        """Name of the process's files, without segment."""
        return process_of(self.path)


@dataclass(frozen=True)
class EventStore:
    """Events of a run as they were when it was opened; a context manager."""

    connection: duckdb.DuckDBPyConnection
    files: tuple[FileReport, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What is wrong with files, one line each."""
        return tuple(f"{file.path.name}: {file.summary.note}" for file in self.files if file.summary.note)

    def sql(self, query: str) -> pa.Table:
        """The result of a query over the view `VIEW`, empty for a statement without. Raises UsageError for a wrong or a forbidden one."""
        try:
            result = self.connection.sql(query)
            return pa.table({}) if result is None else result.to_arrow_table()
        except (duckdb.Error, pa.ArrowException) as error:
            raise UsageError(f"{error}; the view {VIEW} has the columns {', '.join(STORED.names)}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.connection.close()


def quoted(name: str) -> str:
    """A name as a string of SQL."""
    return "'" + name.replace("'", "''") + "'"


def read_events(run: Path, *, ranks: Collection[int] | None = None, steps: range | None = None) -> EventStore:
    """Open a run's events, of some ranks and steps only if given: what is not yet Parquet is held in memory.

    ``steps`` leaves out what belongs to no step. Raises RunFolderError when the run has no events.
    """
    events_folder(run)
    return settled(lambda: _read(run, ranks, steps))


def _read(run: Path, ranks: Collection[int] | None, steps: range | None) -> EventStore:
    reports, tables, stored = _opened(run, ranks, steps)
    return EventStore(_connected(tables, stored, steps), tuple(reports))


def _opened(run: Path, ranks: Collection[int] | None, steps: range | None) -> tuple[list[FileReport], list[pa.Table], list[Path]]:
    segments, stored = found(run)
    reports: list[FileReport] = []
    tables: list[pa.Table] = []
    usable: list[Path] = []

    def is_wanted(facts: Facts | None) -> bool:
        return facts is None or ranks is None or facts.rank in ranks

    for path in segments:
        if ranks is not None and (known := read_facts(path)) is not None and known.rank not in ranks:
            continue
        writer = writer_of(path)
        stream = read_stream(path, steps)
        if is_wanted(stream.facts):
            # what is behind the last whole batch of a living process is the next one, half written
            summary = stream.summary if writer != "alive" else stream.summary.model_copy(update={"note": ""})
            reports.append(FileReport(path, stream.facts, summary, stream.num_bytes, writer))
            tables.append(stream.table)
    for path in stored:
        size, known = path.stat().st_size, read_parquet_facts(path)
        if isinstance(known, str):
            reports.append(FileReport(path, None, Summary(note=known), size, writer="none"))
        elif is_wanted(known[0]):
            reports.append(FileReport(path, *known, size, writer="none"))
            usable.append(path)
    return reports, tables, usable


def _connected(tables: list[pa.Table], stored: list[Path], steps: range | None) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:", config={**_SETTINGS, **_limits()})
    sources: dict[str, pa.Table | ds.Dataset] = {"growing": pa.concat_tables([STORED.empty_table(), *tables])}
    if stored:
        sources["stored"] = ds.dataset([str(path) for path in stored], schema=STORED, format="parquet")
    names = ", ".join(f'"{name}"' for name in STORED.names)
    where = "" if steps is None else f" where step >= {int(steps.start)} and step < {int(steps.stop)}"
    for name, source in sources.items():
        connection.register(name, source)
    connection.execute(f"create view {VIEW} as {' union all '.join(f'select {names} from {name}{where}' for name in sources)}")
    connection.execute("set enable_external_access = false")  # last but one: no folder can be set after it
    connection.execute("set lock_configuration = true")
    return connection


def _limits() -> dict[str, str]:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"memory_limit": f"{min(MOST_MEMORY, machine // 4)}B", "threads": str(min(MOST_THREADS, len(os.sched_getaffinity(0))))}

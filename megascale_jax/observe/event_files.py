"""Files of events as they are found: streams that grow, were closed or cut, and the Parquet files made of them. No JAX.

Nothing here raises for what a file holds: it may come from a process that was killed, or from a disk that lost a part. Arrow has no
checksums, so a changed number is not seen; whatever is not of the format is.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from megascale_jax.observe.event_paths import OPEN_SUFFIX, PARQUET, process_of, segment_of
from megascale_jax.observe.event_segments import FACTS, SCHEMA, Anchor, Facts, boot_id
from megascale_jax.observe.events import ANCHOR, DROPPED

SUMMARY = b"megascale_events_summary"
STALE_S = 86_400.0
"""A file of another host, whose locks we may not see, belongs to nobody once it has not changed for so long."""

Writer = Literal["alive", "none", "unknown"]
"""Of a segment; ``unknown``: its host's locks do not tell, and it has changed not long ago."""
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of a stream that was closed."""
_IN_ONE_THREAD = pa.ipc.IpcReadOptions(use_threads=False)
"""A batch is a flush, mostly small: handing its columns to threads takes longer than to read them."""
_WORD = pa.string()
STORED = pa.schema(
    [
        *(pa.field(field.name, _WORD if pa.types.is_dictionary(field.type) else field.type) for field in SCHEMA),
        *((name, _WORD) for name in ("process", "role", "host")),
        *((name, pa.int32()) for name in ("rank", "attempt")),
        ("unix_ns", pa.int64()),
    ]
)
"""Columns of the view ``events`` and of the Parquet files. ``process``: name of its files without segment; ``unix_ns``: of the begin."""


class Summary(BaseModel):
    """Of one file. Times are nanoseconds since 1970 of begins; 0 where there is no event. ``note``: what is wrong with it, if anything."""

    rows: int = 0
    dropped: int = 0
    first_unix_ns: int = 0
    last_unix_ns: int = 0
    note: str = ""


@dataclass(frozen=True)
class Stream:
    """What was read of a segment. ``facts`` is ``None``, and the table empty, when it is no segment at all."""

    path: Path
    facts: Facts | None
    table: pa.Table
    num_bytes: int
    is_closed: bool
    """Whether its process ended it."""
    note: str

    @property
    def summary(self) -> Summary:
        """Of this segment."""
        return summary_of(self.table, self.note)


def read_stream(path: Path, steps: range | None = None, names: Collection[str] | None = None) -> Stream:
    """The whole batches of a segment up to the first damaged one, with the columns `STORED`; of ``steps`` and ``names`` only.

    Raises FileNotFoundError when it is gone, since it has become Parquet then, and OSError when it cannot be read.
    """
    content = path.read_bytes()
    source = pa.BufferReader(content)
    try:
        reader = pa.ipc.open_stream(source, options=_IN_ONE_THREAD)
        facts = Facts.model_validate_json((reader.schema.metadata or {}).get(FACTS, b""))
        if not reader.schema.equals(SCHEMA):
            raise ValueError("its columns are others")
    except (pa.ArrowException, OSError, ValueError) as error:
        return Stream(path, None, STORED.empty_table(), len(content), False, f"no events can be read: {first_line(error)}")
    batches: list[pa.RecordBatch] = []
    rows, whole, cut = 0, 0, ""
    while True:
        try:
            batch = reader.read_next_batch()
            batch.validate(full=True)
            chosen = _chosen(batch, steps, names)
        except StopIteration:
            break
        except (pa.ArrowException, OSError, ValueError, IndexError) as error:
            cut = first_line(error)
            break
        rows, whole = rows + batch.num_rows, source.tell()
        batches += [chosen] if chosen.num_rows else []
    is_closed = not cut and content.endswith(_END) and source.tell() == len(content)
    if not cut and not is_closed and whole < len(content):
        cut = "there is something else behind the last batch"
    note = f"{rows} events, then the file is cut at byte {whole} of {len(content)} ({cut})" if cut else ""
    return Stream(path, facts, _complete(batches, facts, process_of(path)), len(content), is_closed, note)


def _chosen(batch: pa.RecordBatch, steps: range | None, names: Collection[str] | None) -> pa.RecordBatch:
    """The rows of these steps and names, and notes of the files themselves."""
    if steps is None and names is None:
        return batch
    column = batch.column("name")
    code, known = column.indices.to_numpy(), column.dictionary.to_pylist()
    is_wanted = np.array([names is None or name in names for name in known], bool)[code]
    if steps is not None:
        step = batch.column("step").to_numpy()
        is_wanted &= (step >= steps.start) & (step < steps.stop)
    is_note = np.array([name in (ANCHOR, DROPPED) for name in known], bool)[code]
    return batch.filter(pa.array(is_wanted | is_note))


def _complete(batches: list[pa.RecordBatch], facts: Facts, process: str) -> pa.Table:
    table = pa.Table.from_batches(batches, SCHEMA).cast(pa.schema(list(STORED)[: len(SCHEMA)]))
    number = table.num_rows
    for name, value in (("process", process), ("role", facts.role), ("host", facts.host), ("rank", facts.rank), ("attempt", facts.attempt)):
        field = STORED.field(name)
        table = table.append_column(field, pa.repeat(pa.scalar(value, field.type), number))
    return table.append_column(STORED.field("unix_ns"), pa.array(_unix_ns(table, facts)))


def _unix_ns(table: pa.Table, facts: Facts) -> np.ndarray:
    """Nanoseconds since 1970 of begins [n]: by the newest anchor before, so that a clock that was set shows where it was."""
    anchors = list(facts.anchors)
    noted = named(table, ANCHOR)
    for begin_ns, text in zip(noted["begin_ns"].to_pylist(), noted["text"].to_pylist(), strict=True):
        with suppress(ValueError, TypeError):
            anchors.append(Anchor.validate_python((begin_ns, int(text))))
    begin = table["begin_ns"].to_numpy()
    if not anchors:
        return np.zeros_like(begin)
    known = np.array(sorted(anchors), np.int64)
    before = np.clip(np.searchsorted(known[:, 0], begin, side="right") - 1, 0, None)
    return begin + (known[:, 1] - known[:, 0])[before]


def named(table: pa.Table, name: str) -> pa.Table:
    """The rows of one name."""
    return table.filter(is_named(table, name))


def is_named(table: pa.Table, name: str) -> pa.ChunkedArray:
    """Which rows have a name."""
    return pc.call_function("equal", [table["name"], pa.scalar(name)])


def summary_of(table: pa.Table, note: str = "") -> Summary:
    """What a file with these rows says of itself."""
    dropped = 0
    for text in named(table, DROPPED)["text"].to_pylist():
        with suppress(ValueError, TypeError, KeyError):
            dropped += int(json.loads(text)["count"])
    if not table.num_rows:
        return Summary(note=note)
    begins = table["unix_ns"].to_numpy()
    return Summary(rows=table.num_rows, dropped=dropped, first_unix_ns=int(begins.min()), last_unix_ns=int(begins.max()), note=note)


def read_parquet_facts(path: Path) -> tuple[Facts, Summary] | str:
    """What a Parquet file says of itself, or why it cannot be used. Raises FileNotFoundError when it is gone."""
    try:
        schema = pq.read_schema(path)
        metadata = schema.metadata or {}
        facts, summary = Facts.model_validate_json(metadata.get(FACTS, b"")), Summary.model_validate_json(metadata.get(SUMMARY, b""))
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        return f"no events can be read: {first_line(error)}"
    return (facts, summary) if schema.equals(STORED) else "no events can be read: its columns are others"


def is_over(path: Path) -> bool:
    """Whether nobody will write to this segment any more, as far as can be told (`writer_of`)."""
    return writer_of(path) == "none"


def writer_of(path: Path) -> Writer:
    """Whether a process still writes to this segment.

    It says that it does not by closing it or beginning another, and the kernel by the lock, which dies with the process. Of another host,
    where locks may not be seen from here, that is unknown, and after `STALE_S` without a change the file counts as given up.
    """
    process, _, number = segment_of(path).rpartition(".")
    following = f"{process}.{int(number) + 1:05d}" if number.isdecimal() else path.name
    if any(path.with_name(following + suffix).exists() for suffix in (OPEN_SUFFIX, PARQUET)):
        return "none"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return "unknown"
    try:
        if os.fstat(descriptor).st_size >= len(_END) and os.pread(descriptor, len(_END), os.fstat(descriptor).st_size - len(_END)) == _END:
            return "none"
        is_stale = time.time() - os.fstat(descriptor).st_mtime > STALE_S
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                return "alive"
            return "none" if is_stale else "unknown"
        return "none" if is_stale or _is_of_this_host(path) else "unknown"
    finally:
        os.close(descriptor)


def read_facts(path: Path) -> Facts | None:
    """What a segment says of its process, its rows unread; ``None`` when it is none, or gone."""
    try:
        with pa.OSFile(str(path)) as source:
            return Facts.model_validate_json((pa.ipc.open_stream(source).schema.metadata or {}).get(FACTS, b""))
    except (pa.ArrowException, OSError, ValidationError):
        return None


def _is_of_this_host(path: Path) -> bool:
    """Whether a segment was written under this kernel, whose locks are seen here."""
    facts = read_facts(path)
    return facts is not None and facts.boot_id != "" and facts.boot_id == boot_id()


def first_line(error: BaseException) -> str:
    """What an error says first, or its kind when it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]

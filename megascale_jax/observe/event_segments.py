"""The files of one process's events: Arrow IPC streams in segments, one record batch a flush. No JAX.

    events/ROLE-RANK-START-PID.SEGMENT.arrows        rank with 5 digits, start in seconds since 1970

A stream only grows, by one write a flush, so whatever kills the process leaves whole batches and perhaps a piece of one. A segment
ends when it is large, when more is known of its process, or when the disk refused a part of it; the next one states all
facts anew. While a segment grows its process holds a lock on it (``flock``), which dies with the process.
"""

import fcntl
import io
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from megascale_jax.observe.event_paths import OPEN_SUFFIX
from megascale_jax.observe.events import NUMBERS, Block

FORMAT = 1
SEGMENT_BYTES = 16 << 20
"""A segment is not continued beyond this; compressed, so 2 million rows or more."""
FACTS = b"megascale_events"
"""Key of the facts, as JSON, in the metadata of the schema."""

_WORDS = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        ("name", _WORDS),
        ("lane", _WORDS),
        *((name, pa.int32()) for name in NUMBERS),
        ("begin_ns", pa.int64()),
        ("duration_ns", pa.int64()),
        ("is_instant", pa.bool_()),
        ("text", pa.string()),
    ]
)
"""Columns of an event. ``begin_ns``: CLOCK_MONOTONIC of its host; numbers are -1, text is null, where there is none."""
_OPTIONS = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True, use_threads=False, compression=pa.Codec("zstd", 1))


_Number = Annotated[int, Field(ge=0, lt=1 << 31)]
_Nanoseconds = Annotated[int, Field(gt=-(1 << 62), lt=1 << 62)]
"""Two of them may be subtracted."""
Anchor: TypeAdapter[tuple[int, int]] = TypeAdapter(tuple[_Nanoseconds, _Nanoseconds])


class Facts(BaseModel):
    """What a segment says of its process. ``rank``: of a keeper, the lowest rank that it serves; of a driver 0."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal[1] = FORMAT
    role: str
    rank: _Number
    attempt: _Number = 0
    run: str = ""
    pid: _Number
    host: str
    boot_id: str
    """Of the kernel: processes with the same one share CLOCK_MONOTONIC."""
    mesh: tuple[_Number, _Number, _Number] | None = None
    """Sizes of pipe, data, tensor, once they are known."""
    devices: tuple[_Number, ...] = ()
    """Indices in the mesh, pipe-major, of the devices that the process owns."""
    segment: _Number
    anchors: tuple[tuple[_Nanoseconds, _Nanoseconds], ...]
    """Pairs of CLOCK_MONOTONIC and nanoseconds since 1970, each read at one moment."""


def boot_id() -> str:
    """The kernel's name for the time since this host was started; empty where there is none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class SegmentWriter:
    """Appends flushes of one process to its segments; for one thread."""

    def __init__(self, folder: Path):
        """Files in ``folder``, whose parent is there; nothing is made yet."""
        self._folder = folder
        self._stem, self._number = "", 0
        self._file: int | None = None
        self._size = 0
        self._sink = io.BytesIO()
        self._stream: Any = None
        self._stated: Mapping[str, Any] = {}

    def write(self, blocks: Sequence[Block], names: Sequence[str], facts: Mapping[str, Any]) -> bool:
        """Append one batch; whether a segment has begun with it.

        ``names`` by code, in the order in which they were made; ``facts``: role, rank and whatever else is known. Raises OSError, and
        none of the batch is there then.
        """
        batch = _batch(blocks, names)
        if self._file is not None and (self._size > SEGMENT_BYTES or facts != self._stated):
            self.close()
        if self._file is None:
            self._begin(batch, facts)
            return True
        try:
            self._stream.write_batch(batch)
            self._append(self._taken())
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            self._leave()  # it believes that what it was given is there, dictionaries too
            raise
        return False

    def close(self) -> None:
        """End the segment, if there is one. Never raises for the disk: a segment without an end is whole up to its last batch."""
        if self._file is not None:
            with suppress(OSError):
                self._stream.close()
                self._append(self._taken())
            self._leave()

    def abandon(self) -> None:
        """In a forked child: let go of its parent's segment, whose lock would otherwise last as long as the child."""
        if self._file is not None:
            self._leave()

    def _begin(self, batch: pa.RecordBatch, facts: Mapping[str, Any]) -> None:
        """A segment is not there under its name before it is locked and has a batch."""
        self._folder.mkdir(mode=0o700, exist_ok=True)  # its parent is not made: a run that was removed does not come back
        self._stem = self._stem or _free_stem(self._folder, str(facts["role"]), int(facts["rank"]))
        path = self._folder / f"{self._stem}.{self._number:05d}{OPEN_SUFFIX}"
        hidden = path.with_name(f".{path.name}")
        anchor = (time.monotonic_ns(), time.time_ns())
        stated = Facts(
            **{"pid": os.getpid(), "host": socket.gethostname(), "boot_id": boot_id(), **facts}, segment=self._number, anchors=(anchor,)
        )
        self._sink = io.BytesIO()
        schema = SCHEMA.with_metadata({FACTS: stated.model_dump_json().encode()})
        self._stream = pa.ipc.new_stream(self._sink, schema, options=_OPTIONS)
        self._stream.write_batch(batch)
        self._file = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            with suppress(OSError):  # not every file system has locks: `event_files.is_over` then goes by age
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size = 0
            self._append(self._taken())
            hidden.rename(path)
        except BaseException:
            self._leave()
            hidden.unlink(missing_ok=True)
            raise
        self._stated = facts

    def _taken(self) -> bytes:
        content = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        return content

    def _append(self, content: bytes) -> None:
        assert self._file is not None
        written = 0
        while written < len(content):
            written += os.write(self._file, memoryview(content)[written:])
        self._size += written

    def _leave(self) -> None:
        assert self._file is not None
        file, self._file, self._number = self._file, None, self._number + 1  # first: a child forked here must not close it again
        with suppress(OSError):
            os.close(file)


def _free_stem(folder: Path, role: str, rank: int) -> str:
    """A name that no file there has; in a container a process has the number of the one before."""
    start = int(time.time())
    while any(folder.glob(f"{role}-{rank:05d}-{start}-{os.getpid()}.*")):
        start += 1
    return f"{role}-{rank:05d}-{start}-{os.getpid()}"


def _batch(blocks: Sequence[Block], names: Sequence[str]) -> pa.RecordBatch:
    rows = np.concatenate([block for block, _ in blocks])
    words = pa.array([_clean(name) for name in names], pa.string())
    columns: list[pa.Array] = [pa.DictionaryArray.from_arrays(np.ascontiguousarray(rows[name]), words) for name in ("name", "lane")]
    columns += [pa.array(np.ascontiguousarray(rows[name])) for name in (*NUMBERS, "begin_ns", "duration_ns")]
    columns += [pa.array(rows["is_instant"] != 0), _texts(blocks, len(rows))]
    return pa.record_batch(columns, schema=SCHEMA)


def _texts(blocks: Sequence[Block], number: int) -> pa.Array:
    if not any(texts for _, texts in blocks):
        return pa.nulls(number, pa.string())
    found: list[str | None] = []
    for rows, texts in blocks:
        match texts:
            case str() | None:
                found += [texts] * len(rows)
            case Mapping():
                found += map(texts.get, range(len(rows)))
            case _:
                found += texts
    return pa.array([text if text is None else _clean(text) for text in found], pa.string())


def _clean(text: str) -> str:
    """Text that UTF-8 can hold: bytes of a log that were none come as single surrogates."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()

"""Segments of events become Parquet, and what is too old or too much goes. No JAX.

    python -m megascale_jax.observe.event_compaction RUN --keep-mb 4096 --keep-days 30

A segment that nobody writes any more becomes two files beside it, rows of devices and all else, each renamed to its name once it is on the
disk, the second one last: from then on the segment does not count, and is removed. So a compaction may be killed at any moment and
begun again. One works on a run at a time; writers are never waited for, nor disturbed.
At its end it completes the file of sums (`event_sums.py`), which only saves others to read rows.

Retention removes whole files, rows of devices first, oldest first, and writes each into ``deletions.jsonl``. What is still written to
counts and stays, and leaves at least half of the limit to the rest.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from megascale_jax.observe.event_files import STORED, SUMMARY, Stream, is_named, is_over, read_parquet_facts, read_stream, summary_of
from megascale_jax.observe.event_paths import DETAIL, OPEN_SUFFIX, PARQUET, SUMS, found, segment_of, sizes
from megascale_jax.observe.event_segments import FACTS
from megascale_jax.observe.event_sums import update_sums
from megascale_jax.observe.events import EVENTS_FOLDER, STEP_END
from megascale_jax.observe.priority import lowest_priority

DELETIONS = "deletions.jsonl"
LOCK = ".compaction.lock"
ROW_GROUP = 1 << 16
"""Rows of a group: some steps, so that a filter on the step reads few of them."""
_TIMES = ("begin_ns", "unix_ns")
"""Sorted, or nearly so: differences take a few bits."""
LEFT_S = 3600.0
"""A segment that never got its name belongs to a process that died in the middle, once it is so old."""
MB = 1_000_000
DAY_NS = 86_400 * 10**9


@dataclass
class Compaction:
    """What was done. ``is_busy``: nothing, since another one is at work."""

    is_busy: bool = False
    segments: int = 0
    rows: int = 0
    deleted: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compact(run: Path, *, keep_mb: float | None = None, keep_days: float | None = None) -> Compaction:
    """Turn a run's finished segments into Parquet, then apply retention; ``None``: no limit of that kind.

    Raises OSError when the disk refuses; what was done so far is done, and nothing is lost.
    """
    folder, done = run / EVENTS_FOLDER, Compaction()
    if not folder.is_dir():
        return done
    lock = FileLock(folder / LOCK, timeout=0, mode=0o600)
    try:
        lock.acquire()
    except Timeout:
        return Compaction(is_busy=True)
    try:
        _tidy(folder)
        for path in found(run)[0]:
            if is_over(path):
                _convert(path, done)
        _retain(run, keep_mb, keep_days, done)
        update_sums(run)
    finally:
        lock.release()
    return done


def _tidy(folder: Path) -> None:
    """Remove what compactions and processes that were killed have left; the lock is held."""
    now = time.time()
    with suppress(OSError):
        for path in (*folder.glob(f".*{PARQUET}"), *folder.glob(f".*{SUMS}")):
            path.unlink()
        for path in folder.glob(f".*{OPEN_SUFFIX}"):
            if now - path.stat().st_mtime > LEFT_S:
                path.unlink()
        for path in folder.glob(f"[!.]*{OPEN_SUFFIX}"):
            if path.with_name(segment_of(path) + PARQUET).exists():
                path.unlink()


def _convert(path: Path, done: Compaction) -> None:
    stream = read_stream(path)
    if stream.facts is None:  # kept as it is, for whoever can make something of it, until retention takes it
        done.notes.append(f"{path.name}: {stream.note}")
        return
    table = stream.table.sort_by("begin_ns")
    is_detail = (table["device"].to_numpy() >= 0) & ~is_named(table, STEP_END).to_numpy()
    name, detail = segment_of(path), table.filter(pa.array(is_detail))
    if detail.num_rows:
        _write(path.with_name(name + DETAIL), detail, stream, "")
    _write(path.with_name(name + PARQUET), table.filter(pa.array(~is_detail)), stream, stream.note)
    path.unlink()
    done.segments, done.rows = done.segments + 1, done.rows + table.num_rows
    if stream.note:
        done.notes.append(f"{path.name}: {stream.note}")


def _write(path: Path, table: pa.Table, stream: Stream, note: str) -> None:
    """A Parquet file, whole or not at all."""
    assert stream.facts is not None
    facts, summary = stream.facts.model_dump_json().encode(), summary_of(table, note).model_dump_json().encode()
    hidden, words = path.with_name(f".{path.name}"), [name for name in STORED.names if name not in _TIMES]
    try:
        descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as sink:
            pq.write_table(
                table.replace_schema_metadata({FACTS: facts, SUMMARY: summary}),
                sink,
                row_group_size=ROW_GROUP,
                compression="zstd",
                use_dictionary=words,  # pyright: ignore[reportArgumentType]  (names of columns too, which its stubs do not know)
                column_encoding=dict.fromkeys(_TIMES, "DELTA_BINARY_PACKED"),
            )
            sink.flush()
            os.fsync(sink.fileno())
        hidden.rename(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Have new names on the disk before an old file goes."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # not every file system can
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _retain(run: Path, keep_mb: float | None, keep_days: float | None, done: Compaction) -> None:
    segments, stored = found(run)
    ages: dict[Path, int] = {}
    for path in stored:
        with suppress(OSError):
            known = read_parquet_facts(path)
            ages[path] = known[1].last_unix_ns if not isinstance(known, str) and known[1].rows else path.stat().st_mtime_ns
    for path in segments:
        with suppress(OSError):
            if is_over(path):  # one that could not be read
                ages[path] = path.stat().st_mtime_ns
    oldest_first = sorted(ages, key=lambda path: (not path.name.endswith(DETAIL), ages[path]))
    bytes_of = dict(sizes([*segments, *stored, *(run / EVENTS_FOLDER).glob(f"[!.]*{SUMS}")]))
    total = sum(bytes_of.values())
    growing = sum(bytes_of.get(path, 0) for path in segments if path not in ages)
    most = None if keep_mb is None else max(keep_mb * MB, growing + keep_mb * MB / 2)
    if keep_mb is not None and growing > keep_mb * MB:
        done.notes.append(
            f"segments that are still written to have {growing / MB:.0f} MB, more than the {keep_mb:g} that all events of the run may "
            f"have; the others are held to {keep_mb / 2:g} MB; raise train.events.keep_mb, or train.events.detail_every"
        )
    for path in oldest_first:
        if keep_days is not None and ages[path] < time.time_ns() - keep_days * DAY_NS:
            why = f"older than {keep_days:g} days"
        elif most is not None and total > most:
            why = f"events of the run were {total / MB:.0f} MB, more than {most / MB:g}"
        else:
            continue
        _delete(path, bytes_of.get(path, 0), why)
        total -= bytes_of.get(path, 0)
        done.deleted.append(path)


def _delete(path: Path, num_bytes: int, why: str) -> None:
    line = json.dumps({"unix_s": time.time(), "file": path.name, "num_bytes": num_bytes, "reason": why}) + "\n"
    with suppress(OSError):  # on a full disk the line is lost, and the room is needed all the more
        descriptor = os.open(path.with_name(DELETIONS), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    path.unlink(missing_ok=True)


def main(say: Callable[[str], None] = print) -> None:
    """Entry point of the process that a trainer starts."""
    parser = argparse.ArgumentParser(description="Turn a run's finished segments of events into Parquet, and apply retention.")
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--keep-mb", type=float, default=None, help="megabytes of events that a run keeps; default: no limit")
    parser.add_argument("--keep-days", type=float, default=None, help="days that events stay; default: no limit")
    options = parser.parse_args()
    lowest_priority()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    done = compact(options.run, keep_mb=options.keep_mb, keep_days=options.keep_days)
    for note in done.notes:
        say(note)


if __name__ == "__main__":
    main()

"""The sums of a run's steps (`step_sums.py`), wherever they are quickest to have. No JAX.

Of rows of devices that are Parquet they lie in files of sums (`sums_file.py`), which each compaction completes. What those lack, also
because they are damaged or gone, is made of the rows, as is what is still written: the answer is the same, it takes longer.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megascale_jax.observe.event_files import first_line, read_parquet_facts, read_stream, writer_of
from megascale_jax.observe.event_paths import DETAIL, SUMS, counting, events_folder, process_of, settled
from megascale_jax.observe.event_segments import Facts
from megascale_jax.observe.step_sums import COLUMNS, FIELDS, joined, sums_of
from megascale_jax.observe.sums_file import StoredSums, frame_of, read_frames, update

STEPS_SUMS = f"steps{SUMS}"
_CODES = {pair: number for number, pair in enumerate(COLUMNS)}
_NAMES = tuple(dict.fromkeys(name for name, _ in COLUMNS))
_WORDS = ["name", "lane"]
_NUMBERS = ["device", "step", "duration_ns", "unix_ns"]


@dataclass(frozen=True)
class Source:
    """A file with rows of devices: its process, what that says of itself, and its newest row, nanoseconds since 1970."""

    process: str
    facts: Facts
    last_unix_ns: int


@dataclass(frozen=True)
class RunSums:
    """``sums`` int64[`FIELDS`, n], one column for each process, step and device; ``process`` [n] indexes ``processes``.

    ``sources``: the files, those without a row of these steps included; ``notes``: what is wrong with them, one line each.
    """

    sums: np.ndarray
    process: np.ndarray
    processes: tuple[str, ...]
    sources: tuple[Source, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Piece:
    """What one file gives: its ``source``, ``None`` when it cannot be used, and sums, ``None`` when none is of the steps asked for."""

    source: Source | None
    sums: np.ndarray | None
    note: str = ""


class _Table:
    """Sums one behind the other, copied at once: pieces are read into memory that is used again and again."""

    def __init__(self, room: int):
        self._all, self._count = np.empty((len(FIELDS), room), np.int64), 0

    @property
    def sums(self) -> np.ndarray:
        return self._all[:, : self._count]

    def add(self, sums: np.ndarray) -> int:
        """Put them behind the others; how many they are."""
        begin, end = self._count, self._count + sums.shape[1]
        if end > self._all.shape[1]:
            self._all = np.concatenate([self.sums, np.empty((len(FIELDS), 2 * end - begin), np.int64)], axis=1)
        self._all[:, begin:end] = sums
        self._count = end
        return end - begin


class SumsReader:
    """Reads a run's sums again and again: what has not changed since is not read from rows again."""

    def __init__(self, run: Path):
        self._run = run
        self._made: dict[str, tuple[int, _Piece]] = {}
        """Pieces made of rows, with the bytes that the file had then; all steps."""

    def read(self, first: int | None = None, end: int | None = None) -> RunSums:
        """The sums of the steps ``first <= step < end``. Raises RunFolderError when the run has no events."""
        folder = events_folder(self._run)
        return settled(lambda: self._read(folder, -1 if first is None else first, np.inf if end is None else end))

    def _read(self, folder: Path, first: float, end: float) -> RunSums:
        segments, details, files = _listed(folder)
        self._made = {name: self._made[name] for name in (*segments, *details) if name in self._made}
        known = (one for name in files for one in read_frames(folder / name)[0])
        frames = {one.frame.source: one for one in known if details.get(one.frame.source) == one.frame.source_bytes}
        table, numbers = _Table(sum(one.frame.rows for one in frames.values())), dict[str, int]()
        sources, process, counts, notes = [], [], [], []
        for name, num_bytes in (*details.items(), *segments.items()):
            piece = _stored(frames[name], first, end) if name in frames else None
            piece = piece or self._of_rows(folder / name, num_bytes)
            notes += [piece.note] if piece.note else []
            if piece.source is not None:
                sources.append(piece.source)
                process.append(numbers.setdefault(piece.source.process, len(numbers)))
                counts.append(0 if piece.sums is None else table.add(_within(piece.sums, first, end)))
        sums, of = joined(table.sums, np.repeat(np.array(process, np.int64), counts))
        return RunSums(sums, of, tuple(numbers), tuple(sources), tuple(notes))

    def _of_rows(self, path: Path, num_bytes: int) -> _Piece:
        known = self._made.get(path.name)
        if known is None or known[0] != num_bytes:
            known = num_bytes, _of_parquet(path) if path.name.endswith(DETAIL) else _of_segment(path)
            self._made[path.name] = known
        return known[1]


def _listed(folder: Path) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Bytes by name of the segments and of the files with rows of devices that count, and the files of sums."""
    with os.scandir(folder) as entries:
        entry_of = {entry.name: entry for entry in entries}
    segments, stored = counting(entry_of)
    details = [name for name in stored if name.endswith(DETAIL)]
    files = sorted(name for name in entry_of if name.endswith(SUMS) and not name.startswith("."))
    return _bytes_of(entry_of, segments), _bytes_of(entry_of, details), files


def _bytes_of(entry_of: Mapping[str, os.DirEntry[str]], names: Iterable[str]) -> dict[str, int]:
    return {name: entry_of[name].stat().st_size for name in names}


def update_sums(run: Path) -> None:
    """Have the run's file of sums hold those of all its rows of devices that are Parquet. Raises OSError when the disk refuses.

    For one process at a time, which nothing that it reads is removed beside.
    """
    folder = events_folder(run)
    details = _listed(folder)[1]

    def made(name: str) -> bytes | None:
        piece = _of_parquet(folder / name)
        if piece.source is None or piece.sums is None:
            return None
        return frame_of(name, details[name], piece.source.facts, piece.source.last_unix_ns, piece.sums)

    update(folder / STEPS_SUMS, details, made)


def _stored(frame: StoredSums, first: float, end: float) -> _Piece | None:
    of = frame.frame
    source = Source(process_of(Path(of.source)), of.facts, of.last_unix_ns)
    if of.last_step < first or of.first_step >= end:
        return _Piece(source, None)
    sums = frame.sums()
    return None if sums is None else _Piece(source, sums)


def _within(sums: np.ndarray, first: float, end: float) -> np.ndarray:
    is_within = (sums[0] >= first) & (sums[0] < end)
    return sums if is_within.all() else sums[:, is_within]


def _of_parquet(path: Path) -> _Piece:
    known = read_parquet_facts(path)
    if isinstance(known, str):
        return _Piece(None, None, f"{path.name}: {known}")
    source = Source(process_of(path), known[0], known[1].last_unix_ns)
    try:
        with pq.ParquetFile(path, read_dictionary=_WORDS) as file:
            return _Piece(source, _sums(file.read(columns=[*_WORDS, *_NUMBERS])))
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        return _Piece(source, None, f"{path.name}: its rows cannot be read: {first_line(error)}")


def _of_segment(path: Path) -> _Piece:
    stream = read_stream(path, names=_NAMES)
    # what is behind the last whole batch of a living process is the next one, half written
    note = f"{path.name}: {stream.note}" if stream.note and writer_of(path) != "alive" else ""
    if stream.facts is None:
        return _Piece(None, None, note)
    sums = _sums(stream.table)
    return _Piece(Source(process_of(path), stream.facts, stream.summary.last_unix_ns), sums if sums.size else None, note)


def _sums(table: pa.Table) -> np.ndarray:
    coded = [table[name].combine_chunks() for name in _WORDS]
    coded = [column if pa.types.is_dictionary(column.type) else column.dictionary_encode() for column in coded]
    names, lanes = (column.dictionary.to_pylist() for column in coded)
    known = np.array([[_CODES.get((name, lane), -1) for lane in lanes] for name in names], np.int64).reshape(len(names), len(lanes))
    codes = known[coded[0].indices.to_numpy(), coded[1].indices.to_numpy()]
    return sums_of(codes, {name: table[name].to_numpy() for name in _NUMBERS})

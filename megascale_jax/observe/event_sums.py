"""The sums of a run's steps (`step_sums.py`), wherever they are quickest to have. No JAX.

Of rows of devices that are Parquet they lie in files of sums (`sums_file.py`), which each compaction completes. What those lack, also
because they are damaged or gone, is made of the rows, as is what is still written: the answer is the same, it takes longer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megascale_jax.observe.event_files import first_line, read_parquet_facts, read_stream, writer_of
from megascale_jax.observe.event_paths import DETAIL, SUMS, events_folder, found, process_of, settled, sizes
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


class SumsReader:
    """Reads a run's sums again and again: what has not changed since is not read from rows again."""

    def __init__(self, run: Path):
        self._run = run
        self._made: dict[Path, tuple[int, _Piece]] = {}
        """Pieces made of rows, with the bytes that the file had then; all steps."""

    def read(self, first: int | None = None, end: int | None = None) -> RunSums:
        """The sums of the steps ``first <= step < end``. Raises RunFolderError when the run has no events."""
        events_folder(self._run)
        pieces = settled(lambda: list(self._pieces(-1 if first is None else first, np.inf if end is None else end)))
        sources = tuple(piece.source for piece in pieces if piece.source is not None)
        processes = tuple(dict.fromkeys(source.process for source in sources))
        numbers = {process: number for number, process in enumerate(processes)}
        of = [(numbers[piece.source.process], piece.sums) for piece in pieces if piece.source is not None and piece.sums is not None]
        sums = np.concatenate([np.empty((len(FIELDS), 0), np.int64), *(sums for _, sums in of)], axis=1)
        process = np.repeat(np.array([number for number, _ in of], np.int64), [sums.shape[1] for _, sums in of])
        return RunSums(*joined(sums, process), processes, sources, tuple(piece.note for piece in pieces if piece.note))

    def _pieces(self, first: float, end: float) -> Iterator[_Piece]:
        segments, stored = found(self._run)
        details = dict(sizes(path for path in stored if path.name.endswith(DETAIL)))
        growing = {path: path.stat().st_size for path in segments}
        self._made = {path: made for path, made in self._made.items() if path in details or path in growing}
        frames = _frames(self._run)
        for path, num_bytes in details.items():
            frame = frames.get(path.name)
            kept = None if frame is None or frame.frame.source_bytes != num_bytes else _stored(frame, first, end)
            yield kept or _within(self._of_rows(path, num_bytes), first, end)
        for path, num_bytes in growing.items():
            yield _within(self._of_rows(path, num_bytes), first, end)

    def _of_rows(self, path: Path, num_bytes: int) -> _Piece:
        known = self._made.get(path)
        if known is None or known[0] != num_bytes:
            known = num_bytes, _of_parquet(path) if path.name.endswith(DETAIL) else _of_segment(path)
            self._made[path] = known
        return known[1]


def update_sums(run: Path) -> None:
    """Have the run's file of sums hold those of all its rows of devices that are Parquet. Raises OSError when the disk refuses.

    For one process at a time, which nothing that it reads is removed beside.
    """
    folder = events_folder(run)
    details = {path.name: num_bytes for path, num_bytes in sizes(found(run)[1]) if path.name.endswith(DETAIL)}

    def made(name: str) -> bytes | None:
        piece = _of_parquet(folder / name)
        if piece.source is None or piece.sums is None:
            return None
        return frame_of(name, details[name], piece.source.facts, piece.source.last_unix_ns, piece.sums)

    update(folder / STEPS_SUMS, details, made)


def _frames(run: Path) -> dict[str, StoredSums]:
    """The newest frame of each file."""
    return {one.frame.source: one for path in sorted(events_folder(run).glob(f"[!.]*{SUMS}")) for one in read_frames(path)[0]}


def _stored(frame: StoredSums, first: float, end: float) -> _Piece | None:
    of = frame.frame
    source = Source(process_of(Path(of.source)), of.facts, of.last_unix_ns)
    if of.last_step < first or of.first_step >= end:
        return _Piece(source, None)
    sums = frame.sums()
    return None if sums is None else _within(_Piece(source, sums), first, end)


def _within(piece: _Piece, first: float, end: float) -> _Piece:
    if piece.sums is None:
        return piece
    is_within = (piece.sums[0] >= first) & (piece.sums[0] < end)
    return piece if is_within.all() else _Piece(piece.source, piece.sums[:, is_within], piece.note)


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

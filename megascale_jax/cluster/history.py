"""What a driver went through, from its journal alone: while it drives, after its end, and of every earlier job in the same folder.

A living driver holds its journal for itself (`journal.py`), so a copy is read: the file first, then its write-ahead log, again if that
was begun anew meanwhile. What is in the log counts, so the copy is the journal as it was at one moment. Not to be called in the driver's
own process: closing any descriptor of the file would let go of the driver's locks on it.

Failure cases: a journal that is damaged or of another version tells what comes before, and a note says so.
"""

import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from megascale_jax.cluster.job import JOURNAL_FILE, terms_of
from megascale_jax.cluster.journal import EVENT
from megascale_jax.cluster.lifecycle import ENDS, Phase
from megascale_jax.cluster.policy import apply, first_state
from megascale_jax.cluster.state import Event, Incident, State
from megascale_jax.cluster.story import told
from megascale_jax.config.cluster import ClusterConfig

MOST_BYTES = 1 << 30
"""Of a journal that is read; one event is some 200 bytes."""
_WAL_HEADER, _TRIES = 32, 5


@dataclass(frozen=True)
class Line:
    """A decision or a fact in words; ``unix_s``: seconds since 1970."""

    unix_s: float
    text: str


@dataclass(frozen=True)
class PhaseSpan:
    """A stay in a phase, seconds since 1970; of the present one ``end_s`` is ``None``."""

    phase: Phase
    begin_s: float
    end_s: float | None


@dataclass(frozen=True)
class PastIncident:
    """An incident, the attempt that it ended, and when it began, seconds since 1970."""

    incident: Incident
    attempt: int
    began_unix_s: float


@dataclass(frozen=True)
class JobHistory:
    """One job: ``state`` after all events (``None``: not known), what was said, phases, incidents.

    ``saved_unix_s``: when its newest checkpoint was known, seconds since 1970; ``note``: what is wrong with the journal.
    """

    state: State | None
    lines: tuple[Line, ...]
    phases: tuple[PhaseSpan, ...]
    incidents: tuple[PastIncident, ...]
    saved_unix_s: float | None
    note: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will follow."""
        return self.state is not None and self.state.phase in ENDS


def read_history(folder: Path) -> tuple[JobHistory, ...]:
    """The jobs of a run's job folder, oldest first; none where no driver ever was. Never raises for what is in the files."""
    earlier = sorted(folder.glob("journal-*.sqlite"), key=_number)
    return tuple(_read_job(path) for path in (*earlier, folder / JOURNAL_FILE) if path.is_file())


def _number(path: Path) -> tuple[int, str]:
    digits = path.stem.rpartition("-")[2]
    return (int(digits) if digits.isdecimal() else 0), path.name


def _read_job(path: Path) -> JobHistory:
    with tempfile.TemporaryDirectory(prefix="journal-") as place:
        try:
            copy = _copied(path, Path(place))
            with closing(sqlite3.connect(copy)) as file:
                facts = dict(file.execute("SELECT name, value FROM facts").fetchall())
                rows = file.execute("SELECT number, at_s, unix_s, event FROM events ORDER BY number").fetchall()
        except (OSError, sqlite3.Error) as error:
            return JobHistory(None, (), (), (), None, f"{path.name} cannot be read: {error}")
    try:
        shapes, config = terms_of(facts["terms"], ClusterConfig())
    except (KeyError, IndexError, ValueError, TypeError):
        return JobHistory(None, (), (), (), None, f"{path.name} does not say with which sizes and settings its job began; nothing is shown")
    events, problem = _events(rows)
    return _replayed(first_state(shapes), config, events, problem and f"{path.name}: {problem}")


def _copied(path: Path, place: Path) -> Path:
    """The journal of one moment in a folder of our own. Raises OSError."""
    wal, copy = path.with_name(f"{path.name}-wal"), place / "journal.sqlite"
    if path.stat().st_size + (wal.stat().st_size if wal.exists() else 0) > MOST_BYTES:
        raise OSError(f"it is larger than {MOST_BYTES:,} bytes, so it is none")
    for _ in range(_TRIES):
        before = _begin(wal)
        copy.write_bytes(path.read_bytes())
        log = wal.read_bytes() if wal.exists() else b""
        if log[:_WAL_HEADER] == before:
            (place / f"{copy.name}-wal").write_bytes(log)
            return copy
    raise OSError("its driver writes faster than it can be read; try again")


def _begin(wal: Path) -> bytes:
    if not wal.exists():
        return b""
    with wal.open("rb") as stream:
        return stream.read(_WAL_HEADER)


def _events(rows: Sequence[tuple[int, float, float, str]]) -> tuple[list[tuple[float, Event]], str]:
    """Events with their time since 1970, up to the first that is not understood; and what is wrong with that one."""
    events: list[tuple[float, Event]] = []
    for number, _, unix_s, text in rows:
        try:
            events.append((float(unix_s), EVENT.validate_json(text)))
        except (ValidationError, TypeError, ValueError):
            return events, f"event {number} of {len(rows)} is damaged, or of another version; what follows is not shown"
    return events, ""


def _replayed(state: State, config: ClusterConfig, events: Sequence[tuple[float, Event]], note: str) -> JobHistory:
    lines: list[Line] = []
    phases = [PhaseSpan(state.phase, events[0][0], None)] if events else []
    attempts: dict[int, tuple[int, float]] = {}
    saved_unix_s: float | None = None
    for number, (unix_s, event) in enumerate(events):
        before = state
        try:
            state = apply(before, event, config)
            said = list(told(before, state, event))
        except Exception as error:  # no event of a sound journal does that: whatever rule a damaged one breaks, what came before is shown
            note = f"event {number + 1} of the journal does not fit the ones before ({error}); what follows is not shown"
            state = before
            break
        lines += (Line(unix_s, text) for text in said)
        if state.phase != before.phase:
            phases[-1:] = [PhaseSpan(before.phase, phases[-1].begin_s, unix_s), PhaseSpan(state.phase, unix_s, None)]
        for incident in state.incidents[len(before.incidents) :]:
            attempts[incident.number] = (before.attempt, unix_s)
        if state.saved_step > before.saved_step:
            saved_unix_s = unix_s
    incidents = tuple(PastIncident(one, *attempts[one.number]) for one in state.incidents)
    return JobHistory(state, tuple(lines), tuple(phases), incidents, saved_unix_s, note)

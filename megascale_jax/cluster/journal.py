"""Every event of a job, on disk before anything is done about it: SQLite, one row an event, committed with a full sync.

A driver that was killed reads its journal and is where it was. The times in it go on from the last one, since a monotonic clock
says nothing across a restart of the machine.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter, ValidationError

from megascale_jax.cluster.state import Event
from megascale_jax.errors import JournalError, RunFolderError

_FORMAT = "1"
_BUSY_S = 10.0
EVENT: TypeAdapter[Event] = TypeAdapter(Event)
"""Reads an event of a journal."""


class Journal:
    """The events of one job, in order."""

    def __init__(self, path: Path):
        """Raises RunFolderError when the file is no journal, or one of another version; JournalError when it cannot be opened now."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = path
        try:
            self._file = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            # one writer alone: then WAL needs no memory shared between processes, which network file systems do not have
            self._file.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=FULL")
            self._file.execute("CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS events "
                "(number INTEGER PRIMARY KEY, at_s REAL NOT NULL, unix_s REAL NOT NULL, event TEXT NOT NULL)"
            )
            found = self.fact("format") or self.keep("format", _FORMAT)
        except sqlite3.OperationalError as error:  # a full or broken disk, a lock: not the journal's fault
            raise JournalError(f"{path} cannot be opened now ({error}); make room on its disk, or look for another driver") from error
        except sqlite3.DatabaseError as error:
            raise RunFolderError(f"{path} is no journal of a job ({error}); move it away, or choose another --run-folder") from error
        if found != _FORMAT:
            raise RunFolderError(f"{path} is a journal of version {found}, this program reads {_FORMAT}; use the release that wrote it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def append(self, event: Event) -> None:
        """On disk when this returns. Raises JournalError when it cannot be: then nothing may be done about the event."""
        row = (event.at_s, time.time(), event.model_dump_json())
        try:
            self._file.execute("INSERT INTO events (at_s, unix_s, event) VALUES (?, ?, ?)", row)
        except sqlite3.Error as error:
            raise JournalError(
                f"{self._path} cannot be written ({error}); nothing is decided until it can: make room on its disk"
            ) from error

    def events(self) -> Iterator[Event]:
        """All of them, oldest first. Raises RunFolderError for one that this program does not understand."""
        for number, text in self._file.execute("SELECT number, event FROM events ORDER BY number"):
            try:
                yield EVENT.validate_json(text)
            except ValidationError as error:
                raise RunFolderError(f"{self._path}: event {number} is of another version: {error.errors()[0]['msg']}") from error

    def fact(self, name: str) -> str | None:
        """Something that was kept by name."""
        row = self._file.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def keep(self, name: str, value: str) -> str:
        """Keep something by name, in place of what was there; returns it. Raises JournalError."""
        try:
            self._file.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))
        except sqlite3.Error as error:
            raise JournalError(f"{self._path} cannot be written ({error}); make room on its disk") from error
        return value

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class JournalClock:
    """Seconds on the journal's axis: they go on where the last event was."""

    def __init__(self, last_s: float, monotonic: Callable[[], float] = time.monotonic):
        self._monotonic = monotonic
        self._offset_s = last_s - monotonic()

    def now(self) -> float:
        """Seconds; never less than before."""
        return self._monotonic() + self._offset_s

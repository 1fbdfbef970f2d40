"""The audit log: who did what, appended and never changed, one JSON line each.

Every line carries the SHA-256 of the line before, so a line that was changed, removed or put in breaks the chain at a line that `verify`
names. What a chain cannot show is that lines are missing at its end, or that all of it was written anew: note the newest hash elsewhere
from time to time, and give it to `verify`. A line that a crash cut short is moved to a file beside the log, and the log says so itself.
"""

import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megascale_jax.errors import StorageError, UsageError

FIRST = "0" * 64
"""What the first line names as the line before."""

LONGEST_LINE = 64 << 10
"""Bytes."""

LOCK_LIMIT_S = 10.0

_START = b'{"index":'
"""How every line begins."""

_log = logging.getLogger(__name__)


class Record(BaseModel):
    """One line. ``index`` counts from 0; ``time``: seconds since 1970; ``previous``: SHA-256 of the line before, in hex."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    index: int = Field(ge=0)
    time: float
    actor: str
    role: str
    action: str
    details: dict[str, Any]
    previous: str = Field(pattern=r"^[0-9a-f]{64}$")


@dataclass(frozen=True)
class Verdict:
    """``lines`` that are good before the first that is not (``problem``; empty: all are), and the hash of the last good one."""

    lines: int
    head: str
    problem: str = ""


class AuditLog:
    """Appends to one file, which other processes may append to as well. Made for its owner only."""

    def __init__(self, path: str | Path):
        """Raises StorageError when the file cannot be written or its last line is none of a log's."""
        self.path = Path(path)
        self._lock = threading.Lock()
        self._size = -1
        self._index, self._head = 0, FIRST
        with self._locked() as stream:
            self._catch_up(stream)

    def append(self, actor: str, role: str, action: str, details: Mapping[str, Any]) -> Record:
        """Write a line, and return when it is on the disk; what is done because of it comes after.

        Raises StorageError when the disk does not take it; the log is then as it was. UsageError for details that are too long, or no JSON.
        """
        with self._locked() as stream:
            self._catch_up(stream)
            return self._write(stream, actor, role, action, dict(details))

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        with self._lock:
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "r+b", buffering=0) as stream:
                    self._wait_for_lock(stream)
                    yield stream
            except OSError as error:
                if isinstance(error, StorageError):
                    raise
                raise StorageError(
                    f"audit log {self.path} cannot be written: {error.strerror or error}; free the disk or mend the path"
                ) from error

    def _wait_for_lock(self, stream: BinaryIO) -> None:
        """The other processes' turn ends in one write; one that was stopped in the middle of it must not stop this one too."""
        limit = time.monotonic() + LOCK_LIMIT_S
        while True:
            try:
                return fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise StorageError(f"audit log {self.path} has been locked by another process for {LOCK_LIMIT_S:g} s") from None
                time.sleep(0.005)

    def _write(self, stream: BinaryIO, actor: str, role: str, action: str, details: dict[str, Any]) -> Record:
        record = Record(index=self._index, time=time.time(), actor=actor, role=role, action=action, details=details, previous=self._head)
        try:
            line = json.dumps(record.model_dump(), separators=(",", ":"), allow_nan=False).encode()
            Record.model_validate_json(line)  # what could not be read again would break the chain: half a surrogate pair, for one
        except (TypeError, ValueError) as error:
            raise UsageError(f"details of {action} are no JSON: {error}") from error
        if len(line) > LONGEST_LINE:
            raise UsageError(f"details of {action} make a line of {len(line)} bytes; expected at most {LONGEST_LINE}")
        start = stream.seek(0, os.SEEK_END)
        try:
            content = line + b"\n"
            while content:
                content = content[stream.write(content) :]
            os.fsync(stream.fileno())
        except OSError:
            os.ftruncate(stream.fileno(), start)
            raise
        self._size, self._index, self._head = start + len(line) + 1, self._index + 1, _sha256(line)
        return record

    def _catch_up(self, stream: BinaryIO) -> None:
        """Read the last line again if someone else has written since."""
        size = os.fstat(stream.fileno()).st_size
        if size == self._size:
            return
        tail = _read_at(stream, max(0, size - 2 * (LONGEST_LINE + 1)))
        whole, _, torn = tail.rpartition(b"\n")
        last = whole.rpartition(b"\n")[2]
        self._index, self._head = 0, FIRST
        if last:
            try:
                self._index, self._head = Record.model_validate_json(last).index + 1, _sha256(last)
            except ValidationError as error:
                raise StorageError(f"the last line of audit log {self.path} is none: see `megascale audit verify {self.path}`") from error
        elif len(tail) > LONGEST_LINE:
            raise StorageError(f"{self.path} is no audit log: it has no line of at most {LONGEST_LINE} bytes at its end; name another file")
        if not _START.startswith(torn.rstrip(b"\0")[: len(_START)]):
            raise StorageError(f"{self.path} ends with what is no line of an audit log; name another file, or move what is there away")
        self._size = size
        if torn:
            self._cut(stream, torn)

    def _cut(self, stream: BinaryIO, torn: bytes) -> None:
        """Move a last line that is not whole to a file of its own: what was appended to it would be lost with it."""
        aside = self.path.with_name(f"{self.path.name}.torn-{self._index}-{_sha256(torn)[:8]}")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as target:
            target.write(torn)
            target.flush()
            os.fsync(target.fileno())
        os.ftruncate(stream.fileno(), os.fstat(stream.fileno()).st_size - len(torn))
        _log.warning(
            "audit log %s ended in the middle of a line: a crash cut it short; its %d bytes are in %s", self.path, len(torn), aside
        )
        self._write(stream, "audit", "", "audit.torn", {"bytes": len(torn), "moved_to": aside.name, "sha256": _sha256(torn)})


def records(path: str | Path) -> Iterator[Record]:
    """All lines, not checked against each other. Raises UsageError when the file cannot be read or a line is none."""
    for number, line in enumerate(_lines(Path(path)), 1):
        try:
            yield Record.model_validate_json(line)
        except ValidationError as error:
            raise UsageError(f"line {number} of {path} is no line of an audit log; see `megascale audit verify {path}`") from error


def verify(path: str | Path, head: str | None = None) -> Verdict:
    """Check the chain, and that the line with the hash ``head`` (if it is given) is in it. Raises UsageError when it cannot be read."""
    previous, number, found = FIRST, 0, head is None
    for number, line in enumerate(_lines(Path(path)), 1):
        if problem := _problem(line, number, previous):
            return Verdict(number - 1, previous, f"line {number}: {problem}")
        previous = _sha256(line.removesuffix(b"\n"))
        found = found or previous == head
    if not found:
        return Verdict(number, previous, f"no line has the hash {head}: lines at the end are missing, or the log was written anew")
    return Verdict(number, previous)


def _problem(line: bytes, number: int, previous: str) -> str:
    if not line.endswith(b"\n"):
        return "the line is cut short"
    try:
        record = Record.model_validate_json(line)
    except ValidationError as error:
        return f"no line of an audit log: {error.errors(include_input=False)[0]['msg']}"
    if record.index != number - 1:
        return f"index {record.index}; expected {number - 1}: a line is missing, or was put in"
    if record.previous != previous:
        return f"the line before was changed or removed, or this one was put in: it names {record.previous[:16]}..., not {previous[:16]}..."
    return ""


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            yield from iter(lambda: stream.readline(LONGEST_LINE + 2), b"")
    except OSError as error:
        raise UsageError(f"audit log {path} cannot be read: {error.strerror}") from error


def _read_at(stream: BinaryIO, start: int) -> bytes:
    stream.seek(start)
    parts = []
    while part := stream.read(1 << 20):
        parts.append(part)
    return b"".join(parts)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

"""Reads the log of a training process while it grows: new lines for the beat, keywords, and a bound on both time and disk.

A process that floods its log costs neither: of what is new at most two pieces of `READ_BYTES` are read, the first and the last, and a
file above `KEEP_BYTES` is emptied, after its first content (where the first cause is) has been put aside once. The process must have
opened it for appending.
"""

import contextlib
import os
import re
from pathlib import Path

from megascale_jax.cluster.keywords import Keyword, keyword_of
from megascale_jax.cluster.reports import LOG_LINE_CHARACTERS, LOG_LINES

READ_BYTES = 128 << 10
KEEP_BYTES = 16 << 20
_SEARCHED_CHARACTERS = 4000
_LINE_ENDS = re.compile(r"[\r\n]+")
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


class LogReader:
    """One log, read from its present end on. ``keywords``: all kinds of lines so far, each once, in order of appearance."""

    def __init__(self, path: Path):
        """Raises OSError when the log is not there."""
        self.keywords: list[Keyword] = []
        self._path = path
        self._file = path.open("rb+", buffering=0)
        self._offset = os.fstat(self._file.fileno()).st_size
        self._rest = b""
        self._is_broken = False

    def read(self, *, is_final: bool = False) -> tuple[str, ...]:
        """The newest lines since the last call, as they go into a report; the first one that tells a new primary cause is among them.

        ``is_final``: no more will come, so a last line without an end counts too. A log that cannot be read says so in place of lines,
        once until it can be read again.
        """
        try:
            lines = self._new_lines(is_final)
            self._is_broken = False
        except OSError as error:  # a disk that fails; the process itself may be well
            lines = [] if self._is_broken else [f"... the log cannot be read: {error.strerror} ..."]
            self._is_broken = True
        cause = None
        for index, line in enumerate(lines):
            keyword = keyword_of(line)
            if keyword is not None and keyword not in self.keywords:
                self.keywords.append(keyword)
                if keyword.is_primary and cause is None:
                    cause = index
        newest = lines[-LOG_LINES:]
        if cause is not None and cause < len(lines) - LOG_LINES:
            newest = [lines[cause], *newest[1:]]
        return tuple(line[:LOG_LINE_CHARACTERS] for line in newest)

    def _new_lines(self, is_final: bool) -> list[str]:
        descriptor = self._file.fileno()
        size = os.fstat(descriptor).st_size
        begin, left_out = min(self._offset, size), 0
        content = os.pread(descriptor, READ_BYTES, begin)
        self._offset = begin + len(content)
        pieces = [self._rest + content]
        if self._offset < size:
            left_out = max(0, size - READ_BYTES - self._offset)
            content = os.pread(descriptor, READ_BYTES, self._offset + left_out)
            self._offset += left_out + len(content)
            pieces = [pieces[0], content] if left_out else [pieces[0] + content]
        lines: list[str] = []
        for number, piece in enumerate(pieces):
            if number:
                lines.append(f"... {left_out:,} bytes of the log are left out ...")
            whole, _, self._rest = piece.rpartition(b"\n")
            lines += clean_lines(whole)
        if is_final or len(self._rest) > READ_BYTES:
            lines += clean_lines(self._rest)
            self._rest = b""
        if size > KEEP_BYTES:
            self._empty()
        return lines

    def _empty(self) -> None:
        first = self._path.with_suffix(".first.log")
        if not first.exists():
            with contextlib.suppress(OSError), first.open("xb") as copy:  # a full disk is a reason more to empty it
                begin = 0  # not to its end, which a process that floods it moves as fast as it is copied
                while begin < KEEP_BYTES and (content := os.pread(self._file.fileno(), min(READ_BYTES, KEEP_BYTES - begin), begin)):
                    begin += copy.write(content)
        os.ftruncate(self._file.fileno(), 0)
        self._offset = 0


def clean_lines(content: bytes) -> list[str]:
    """Lines of a log without escape sequences and control characters, long ones cut, empty ones left out."""
    lines = _LINE_ENDS.split(content.decode(errors="replace"))
    return [line for text in lines if (line := _ESCAPES.sub("", text[:_SEARCHED_CHARACTERS]).rstrip())]

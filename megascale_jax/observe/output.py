"""Words of a process: that it may lose when the disk of its log is full or broken, and that a terminal may show whoever chose them."""

import errno
import sys
from typing import Any, TextIO

_LOST = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""The disk's fault, not the reader's: a closed pipe is still an error."""


class Tolerant:
    """A text stream, without errors of the disk behind it: what cannot be written is lost."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream does, or nothing."""
        try:
            return self._stream.write(text)
        except OSError as error:
            if error.errno not in _LOST:
                raise
            return len(text)

    def flush(self) -> None:
        """As the stream does, or nothing."""
        try:
            self._stream.flush()
        except OSError as error:
            if error.errno not in _LOST:
                raise

    def writelines(self, lines: Any) -> None:
        """Each by itself."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_full_disks() -> None:
    """Have ``sys.stdout`` and ``sys.stderr`` lose what their disk cannot take. For processes that run for weeks with a log."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Tolerant):
            setattr(sys, name, Tolerant(stream))


def printable(text: str) -> str:
    """Text on one line with control characters, which a terminal would obey, as escapes."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)

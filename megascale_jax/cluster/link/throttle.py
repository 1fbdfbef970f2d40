"""A limit on audit lines: an outsider who is refused a thousand times a second must not fill the disk of the log.

The first lines of each kind in a minute are written; the others are counted, and the count is written when the minute is over.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

LINES_A_MINUTE = 20
MINUTE_S = 60.0

_log = logging.getLogger(__name__)


class Throttle:
    """In front of an audit callback, whose exceptions are logged and go no further."""

    def __init__(self, audit: Callable[[str, dict[str, Any]], None]):
        self._audit = audit
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}
        """By action and word: when the current minute began, and lines since."""

    def put(self, action: str, word: str, details: dict[str, Any]) -> None:
        """Write a line, or count it."""
        began, count = self._seen.get((action, word), (time.monotonic(), 0))
        self._seen[action, word] = began, count + 1
        if count < LINES_A_MINUTE:
            self._write(action, {"reason": word} | details)

    def flush(self, now: float | None = None) -> None:
        """Write the counts of the minutes that are over; ``now`` (monotonic, seconds) ``None``: of all."""
        for (action, word), (began, count) in list(self._seen.items()):
            if now is None or now - began >= MINUTE_S:
                del self._seen[action, word]
                if count > LINES_A_MINUTE:
                    self._write(f"{action}.more", {"reason": word, "lines_not_written": count - LINES_A_MINUTE})

    def _write(self, action: str, details: dict[str, Any]) -> None:
        try:
            self._audit(action, details)
        except Exception:
            _log.exception("the audit log took no line about %s", action)

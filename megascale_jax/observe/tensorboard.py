"""Scalars as TensorBoard events, written in the caller's thread.

tensorboardX's `SummaryWriter` hands events to a thread through a short queue; when the disk is full that thread dies, the
queue fills, and the next scalar blocks training for ever. Here its event file is written directly: an OSError reaches the caller.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]  (made at import time)
from tensorboardX.summary import scalar


class TensorBoardMirror:
    """One event file under `folder`. What earlier files hold from `first_step` on is marked as superseded.

    Every method but `close` raises OSError when the disk refuses; the event file is then torn and must not be used again.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The library's file name has a resolution of one second; the suffix keeps a quick restart from overwriting a file.
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}.{time.time_ns()}")
        self._write(Event(step=first_step, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, prefix: str, values: Mapping[str, float]) -> None:
        """Write every value under the tag `prefix/key`, and flush."""
        for name, value in values.items():
            self._write(Event(step=step, wall_time=time.time(), summary=scalar(f"{prefix}/{name}", value)), flush=False)
        self._writer.flush()

    def close(self) -> None:
        """Close the file; never raises for the disk."""
        with suppress(OSError):
            self._writer.close()

    def _write(self, event: Event, *, flush: bool = True) -> None:
        self._writer.write_event(event)
        if flush:
            self._writer.flush()

"""Ctrl-C and SIGTERM ask the loop to end after the step in flight; a second Ctrl-C ends it at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class StopRequest:
    """Context manager that turns both signals into the flag ``asked``; the old handlers come back at the end.

    Off the main thread, where no handler can be set, signals keep their meaning.
    """

    def __init__(self) -> None:
        self.asked = False
        self._old: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

"""Events of a process: what it did when, appended to files of its own that survive its crash. No JAX.

A *span* has a begin and a duration, an *instant* a begin alone; times are nanoseconds of CLOCK_MONOTONIC, which all processes of a host
share. The caller pays less than a microsecond: a record is packed into a buffer, and a thread makes Arrow of it each second
(`event_segments.py`). A killed process loses what was not flushed, at most the last `FLUSH_S` or so.

Nothing here waits for a disk or raises for one. Memory is bounded: what a full or slow disk does not take is dropped and counted, which
is said once, and told in an instant `DROPPED` when events are written again.
"""

import atexit
import json
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from megascale_jax.observe.event_segments import SegmentWriter

EVENTS_FOLDER = "events"
"""In a run's folder."""
LANES = ("host", "compute", "tensor", "pipe", "data", "keeper", "driver")
"""Who was busy: a process's main thread, a device's kernels, its collectives over each mesh axis, the checkpoint keeper, the driver."""
STEP_END = "step end"
"""Of lane ``compute``, one a device and step: the end of what all ranks wait for together, so simultaneous on all (`offsets.py`)."""
DROPPED = "events dropped"
"""Instant with the number of events that were lost before it, as JSON ``{"count": N}``."""
ANCHOR = "clock anchor"
"""Instant whose text is the nanoseconds since 1970 at its begin."""

PULSE_S = 5.0
"""Between two calls of what `Events.each_pulse` was given."""
FLUSH_S = 1.0
ANCHOR_S = 60.0
ROWS = 1 << 16
"""Single records that wait for a flush, at most."""
BULK_ROWS = 1 << 20
"""Rows given in bulk that wait for a flush, at most."""
MOST_TEXT = 1 << 24
"""Characters of texts that wait for a flush, at most."""
TEXT_LENGTH, NAME_LENGTH = 4096, 256
"""Characters after which a text of a single record, and a name, are cut."""
MOST_NAMES = 1 << 12
OTHER_NAME = "(other)"
"""In place of names beyond the first `MOST_NAMES`."""

NUMBERS = ("device", "step", "tick", "microbatch", "chunk")
"""int32 columns; -1: none, for a device the whole process."""
_ROW = struct.Struct("<2q8i")
_INT32 = ("name", "lane", *NUMBERS, "is_instant")
ROW = np.dtype([("begin_ns", "<i8"), ("duration_ns", "<i8"), *((name, "<i4") for name in _INT32)])
"""A record as it waits; ``name`` and ``lane`` are codes."""
Block = tuple[np.ndarray, Any]
"""Rows of `ROW`, and their texts: a string for all, a sequence, those of single rows by number, or ``None``."""

_logger = logging.getLogger(__name__)
_open: "weakref.WeakSet[Events]" = weakref.WeakSet()


class Events:
    """The writer of one process; all methods may be called by any thread, and never raise for a disk."""

    def __init__(
        self,
        folder: Path | None,
        *,
        role: str = "trainer",
        rank: int = 0,
        attempt: int = 0,
        run: str = "",
        begins: bool = True,
        on_segment: Callable[[], None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        """Events of this process go to files in ``folder`` (`EVENTS_FOLDER` of a run); ``None``: every call does nothing.

        ``run``: identity of the run. Without ``begins`` nothing is written, and no file made, before `begin`. ``on_segment``: called by the
        writing thread after each new file; ``on_close``: after the last was closed. ``clock``: nanoseconds of CLOCK_MONOTONIC.
        """
        self.clock = clock
        self.dropped = 0
        """Events lost so far."""
        self._is_on = folder is not None
        self._capacity = ROWS * _ROW.size
        self._lock = threading.Lock()
        self._codes = {name: code for code, name in enumerate((*LANES, DROPPED, ANCHOR, OTHER_NAME))}
        self._at, self._bulk_rows, self._text_length = 0, 0, 0
        self._texts: dict[int, str] = {}
        self._bulk: list[Block] = []
        self._wake, self._changed = threading.Event(), threading.Condition()
        self._asked = self._done = 0
        self._ends, self._is_failing = False, False
        self._told = 0
        """Of the dropped ones, so many are on record."""
        self._anchored_ns = self._pulsed_ns = -(1 << 62)
        self._pulses: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._writer: SegmentWriter | None = None
        if folder is None:
            return
        self._folder, self._on_segment, self._on_close = folder, on_segment, on_close
        self._facts: dict[str, Any] = {"role": role, "rank": rank, "attempt": attempt, "run": run}
        self._buffer, self._spare = bytearray(self._capacity), bytearray(self._capacity)
        _open.add(self)
        if begins:
            self.begin()

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded."""
        return self._is_on

    def begin(self) -> None:
        """Write from now on, what was recorded before included."""
        if self._is_on and self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="events", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def describe(self, **facts: Any) -> None:
        """Fields of `event_segments.Facts` that are known by now, as ``mesh`` and ``devices``: all segments from here on state them."""
        if self._is_on:
            with self._lock:
                self._facts = {**self._facts, **facts}

    def each_pulse(self, tell: Callable[[], None]) -> None:
        """Have the writing thread call ``tell`` every `PULSE_S` seconds, to record what the threads that it looks at cannot.

        It must not wait for anything.
        """
        self._pulses.append(tell)

    def record(
        self,
        name: str,
        begin_ns: int,
        duration_ns: int,
        *,
        lane: str = "host",
        device: int = -1,
        step: int = -1,
        tick: int = -1,
        microbatch: int = -1,
        chunk: int = -1,
        text: str | None = None,
        is_instant: bool = False,
    ) -> None:
        """Something that lasted ``duration_ns`` from ``begin_ns`` on (CLOCK_MONOTONIC). ``text``: details, JSON if there are several."""
        if not self._is_on:
            return
        with self._lock:
            at = self._at
            if at == self._capacity:
                self._drop(1)
                return
            try:
                try:
                    codes = self._codes
                    name_code, lane_code = codes[name], codes[lane]
                except KeyError:
                    name_code, lane_code = self._code(name), self._code(lane)
                _ROW.pack_into(
                    self._buffer, at, begin_ns, duration_ns, name_code, lane_code, device, step, tick, microbatch, chunk, is_instant
                )
            except struct.error:  # a number that is none, or too large: no reason to end a training
                self._drop(1)
                return
            if text is not None and not self._keep_text(at, text):
                self._drop(1)
                return
            self._at = at + _ROW.size
        if at == self._capacity >> 1:
            self._wake.set()

    def instant(self, name: str, *, begin_ns: int | None = None, **columns: Any) -> None:
        """Something that happened now, or at ``begin_ns``; ``columns`` as in `record`."""
        if self._is_on:
            self.record(name, self.clock() if begin_ns is None else begin_ns, 0, is_instant=True, **columns)

    @contextmanager
    def span(self, name: str, **columns: Any) -> Iterator[None]:
        """What happens inside, also when it ends with an exception; ``columns`` as in `record`."""
        if not self._is_on:
            yield
            return
        begin_ns = self.clock()
        try:
            yield
        finally:
            self.record(name, begin_ns, self.clock() - begin_ns, **columns)

    def many(self, *, name: Any, begin_ns: Any, duration_ns: Any = 0, lane: Any = "host", **columns: Any) -> None:
        """Many events at once, some nanoseconds each: arrays of one length [n], which are copied, and scalars for all.

        ``name`` and ``lane``: a string for all, or ``(codes, values)``: integers [n] that index a tuple of strings. ``columns``: `NUMBERS`,
        ``is_instant`` (default False), ``text`` (``None``, a string, or a sequence [n] of both). Raises ValueError when lengths differ.
        """
        if not self._is_on:
            return
        given: dict[str, Any] = {
            "begin_ns": begin_ns,
            "duration_ns": duration_ns,
            "is_instant": False,
            **dict.fromkeys(NUMBERS, -1),
            **columns,
        }
        text = given.pop("text", None)
        coded = [column[0] for column in (name, lane) if not isinstance(column, str)]
        lengths = {
            len(value) for value in (*given.values(), *coded, text) if value is not None and not isinstance(value, str) and np.ndim(value)
        }
        if len(lengths) != 1:
            raise ValueError(f"columns of lengths {sorted(lengths)}; expected arrays of one length, and scalars")
        (number,) = lengths
        block = np.empty(number, ROW)
        for column, value in given.items():
            block[column] = value
        with self._lock:
            for column, value in (("name", name), ("lane", lane)):
                block[column] = self._code(value) if isinstance(value, str) else np.array([*map(self._code, value[1])])[value[0]]
            if self._bulk_rows + number > BULK_ROWS:
                self._drop(number)
                return
            self._bulk.append((block, text if text is None or isinstance(text, str) else list(text)))
            self._bulk_rows += number
        if self._bulk_rows > BULK_ROWS >> 2:
            self._wake.set()

    def flush(self, limit_s: float = 5.0) -> bool:
        """Have everything so far written; whether that was done within ``limit_s`` seconds, though the disk may have refused it."""
        if self._thread is None:
            return not self._is_on
        with self._changed:
            self._asked += 1
            wanted = self._asked
            self._wake.set()
            return self._changed.wait_for(lambda: self._done >= wanted, limit_s)

    def close(self, limit_s: float = 5.0) -> None:
        """Flush, and record nothing any more. A disk that hangs is left alone after ``limit_s`` seconds."""
        thread, self._is_on = self._thread, False
        if thread is None or self._ends:
            return
        self._ends = True
        self._wake.set()
        thread.join(limit_s)
        atexit.unregister(self.close)

    def _keep_text(self, at: int, text: str) -> bool:
        if len(text) > TEXT_LENGTH:
            text = text[:TEXT_LENGTH]
        if self._text_length + len(text) > MOST_TEXT:
            return False
        self._text_length += len(text)
        self._texts[at // _ROW.size] = text
        return True

    def _code(self, value: str) -> int:
        """The code of a string, also of a new one. A caller that makes names up without end gets `OTHER_NAME` for them."""
        value = value[:NAME_LENGTH]
        if value not in self._codes and len(self._codes) >= MOST_NAMES:
            value = OTHER_NAME
        return self._codes.setdefault(value, len(self._codes))

    def _drop(self, number: int) -> None:
        self.dropped += number
        self._wake.set()

    def _serve(self) -> None:
        while True:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            ends, asked = self._ends, self._asked
            try:
                self._writer = self._writer or _new_writer(self._folder)
                self._pulse()
                self._write(self._writer)
            except Exception as error:  # of the disk, of memory, of pyarrow: the process goes on, and so does this thread
                if not self._is_failing:
                    _logger.warning("events cannot be written (%s: %s); training goes on without", type(error).__name__, error)
                self._is_failing = True
            with self._changed:
                self._done = asked
                self._changed.notify_all()
            if ends:
                if self._writer is not None:
                    self._writer.close()
                    self._on_close()
                return

    def _pulse(self) -> None:
        now_ns = self.clock()
        if self._is_on and now_ns - self._pulsed_ns >= PULSE_S * 1e9:
            self._pulsed_ns = now_ns
            for tell in self._pulses:
                tell()

    def _write(self, writer: "SegmentWriter") -> None:
        """Take what is there and write it. Raises what disk, memory and pyarrow do; it is dropped then."""
        with self._lock:
            rows, number = self._at // _ROW.size, self._at // _ROW.size + self._bulk_rows
            dropped, now_ns = self.dropped, self.clock()
            tells, anchors = dropped != self._told, now_ns - self._anchored_ns > ANCHOR_S * 1e9
            if not number and not (tells and self._ends):
                return
            notes = [self._note(DROPPED, json.dumps({"count": dropped - self._told}), now_ns)] if tells else []
            notes += [self._note(ANCHOR, str(time.time_ns()), now_ns)] if anchors else []
            blocks = [(np.frombuffer(self._buffer, ROW, rows), self._texts), *self._bulk, *notes]
            self._buffer, self._spare = self._spare, self._buffer
            self._at, self._texts, self._text_length, self._bulk, self._bulk_rows = 0, {}, 0, [], 0
            names, facts = list(self._codes), self._facts
        try:
            is_new = writer.write(blocks, names, facts)
        except BaseException:
            with self._lock:
                self.dropped += number
            raise
        self._told = dropped
        self._anchored_ns = now_ns if anchors else self._anchored_ns
        if self._is_failing:
            self._is_failing = False
            _logger.warning("events are written again; %d were lost", dropped)
        if is_new:
            self._on_segment()

    def _note(self, name: str, text: str, begin_ns: int) -> Block:
        """What the files themselves should tell: how the clocks stand, how much is missing."""
        row = (begin_ns, 0, self._code(name), self._code(LANES[0]), *[-1] * len(NUMBERS), 1)
        return np.array([row], ROW), text


def _new_writer(folder: Path) -> "SegmentWriter":
    from megascale_jax.observe.event_segments import SegmentWriter  # brings pyarrow: not where training waits for it

    return SegmentWriter(folder)


def _turn_off_in_child() -> None:
    # The thread is not in a forked child, and the files are its parent's.
    for events in _open:
        events._is_on, events._thread = False, None
        if events._writer is not None:
            events._writer.abandon()


os.register_at_fork(after_in_child=_turn_off_in_child)

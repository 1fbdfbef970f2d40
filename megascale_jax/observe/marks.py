"""Where a training process is, readable from outside at any moment: while it runs, hangs, is stopped, or after it was killed. No JAX.

The process writes a small memory-mapped file, named by ``MEGASCALE_MARKS``; a supervisor of the host reads it. Nothing has to run in
the process for that, so one that waits for ever in a collective is seen as well as any other: the same *section* with a growing time.
A thread puts the time in each second, the *pulse*: one that waits has it, one that is frozen has not, though nothing else tells them
apart. Without the variable there is no file.

Whatever marks are told is an event too (`events.py`): each pass a span of its section's name once it is over, the rest instants,
`INSTANTS`. A pass that is not over is in the events' own pulse (`pulse.py`).

A *section* is what the process does now, a *pass* one stay in it. ``compile`` is the first step of a process with its compilation, and
its first held-out batch likewise. ``data`` is the preparation of data and then each wait for a batch.

The file has two slots that are written in turn, each whole with a counter and a checksum, so the older one can be read even
if the process is stopped or dies in the middle of a write, and on processors that let writes overtake each other. Times are of
CLOCK_MONOTONIC, which all processes of a host share.
"""

import json
import math
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from megascale_jax.errors import UsageError
from megascale_jax.observe.events import Events
from megascale_jax.observe.pulse import ALIVE, Alive
from megascale_jax.observe.spike import Spike

MARKS = "MEGASCALE_MARKS"
ATTEMPT = "MEGASCALE_ATTEMPT"
DRILL = "MEGASCALE_DRILL"
"""Environment variable of a process that may be asked to hurt itself (`train/flip.py`)."""
FLIP = ".flip"
"""Suffix of the file beside the marks that asks for it."""
SECTIONS = ("start", "join", "data", "restore", "compile", "step", "evaluate", "checkpoint", "end")
INSTANTS = ("resume", "skip", "spike", "corrupt", "saved", "published", "stop", "rewind", "profile")
PREPARATION = "preparation"
"""The first pass of ``data``, before there is a state."""
SECTION_ORDER = ("start", PREPARATION, "join", "restore", "evaluate", "checkpoint", "data", "compile", "step", "end")
"""Sections as a process meets them with one count of completed steps: evaluation and save belong to the step before."""
DEAF = ("start", "compile")
"""Sections in which a library may hold the interpreter, and so the pulse, for long."""
UNTAUGHT_PASSES = {"step": 1}
"""First passes of a process that say nothing of the later ones, so ``longest_s`` leaves them out: JAX may compile the second step anew."""
STEP_TIME_WEIGHT = 0.1
"""Weight of the newest step in the moving average of step times."""

_MAGIC = b"MEGAMRK1"
_HEADER = struct.Struct("<8sI")
MOST_ODD_RANKS = 4
"""Of a comparison that failed, as many ranks are shown."""
_ODD_RANKS = tuple(f"odd_rank_{number}" for number in range(MOST_ODD_RANKS))
_SCALARS = (
    *("sequence", "pid", "rank", "attempt", "step", "section", "entered_ns", "non_finite_in_a_row", "non_finite", "saved", "durable"),
    *("corruption", *_ODD_RANKS),
    *("spike_first", "spike_last", "spike_rewind_step", "spike_begin", "spike_end"),
)
_BODY = struct.Struct(f"<{len(_SCALARS)}q2d{3 * len(SECTIONS)}q")
_LOSS = len(_SCALARS)
_STEP_S = _LOSS + 1
_PASSES = _STEP_S + 1
_SLOT_BYTES = _BODY.size + 4
_PULSE = struct.Struct("<q")
_PULSE_AT = _HEADER.size + 2 * _SLOT_BYTES
_FILE_BYTES = _PULSE_AT + _PULSE.size
PULSE_S = 1.0
_INDEX = {name: index for index, name in enumerate(_SCALARS)}
_SECTION_INDEX = {name: index for index, name in enumerate(SECTIONS)}
_PID, _STEP, _SECTION, _ENTERED = _INDEX["pid"], _INDEX["step"], _INDEX["section"], _INDEX["entered_ns"]
_IN_A_ROW, _NON_FINITE, _SAVED, _DURABLE = _INDEX["non_finite_in_a_row"], _INDEX["non_finite"], _INDEX["saved"], _INDEX["durable"]
_CORRUPTION, _SPIKE = _INDEX["corruption"], _INDEX["spike_first"]
_NONE = -1
_SUSPECTED, _NAMED = 1, 2
_READS = 5


@dataclass(frozen=True)
class MarksReading:
    """What a process has written. Seconds; ``entered_ns``, and ``pulse_ns`` of the last pulse, on this host's CLOCK_MONOTONIC.

    ``step``: completed steps. ``passes``, ``longest_s``, ``last_s``: completed passes by section, only sections that were completed
    (``longest_s`` without `UNTAUGHT_PASSES`). ``loss``: of the newest step, may be NaN. ``non_finite``: steps that were skipped.
    ``saved_step``: newest state in host memory; ``durable_step``: newest on storage. ``step_s``: moving average of step times.
    """

    pid: int
    rank: int
    attempt: int
    step: int
    section: str
    entered_ns: int
    pulse_ns: int | None
    passes: Mapping[str, int]
    longest_s: Mapping[str, float]
    last_s: Mapping[str, float]
    loss: float | None
    non_finite_in_a_row: int
    non_finite: int
    saved_step: int | None
    durable_step: int | None
    step_s: float | None
    odd_ranks: tuple[int, ...] | None
    """Ranks whose copy of the state is not the others' (the first few), ``None``: no comparison has failed."""
    is_odd_certain: bool
    """Whether it is they; else one of them."""
    spike: Spike | None
    """The newest loss spike of this process."""


class Marks:
    """The writer; one per process, called by one thread. Starts in the section ``start``. ``clock`` returns monotonic nanoseconds."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        rank: int = 0,
        attempt: int = 0,
        events: Events | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        """Make the file, in place of an earlier one; ``None``: no file. Without ``events`` nothing is told to them.

        Raises UsageError when it cannot be made.
        """
        self.events = events or Events(None)
        self._clock, self._is_on = clock, path is not None or self.events.is_on
        self._pass = (SECTIONS[0], _NONE, clock())
        """Section, step and begin of the present pass, in one piece because another thread reads it."""
        if self.events.is_on:
            self.events.each_pulse(self._alive)
        self._map: mmap.mmap | None = None
        scalars = dict.fromkeys(_SCALARS, 0) | dict.fromkeys(("saved", "durable", *_ODD_RANKS), _NONE)
        scalars |= {"pid": os.getpid(), "rank": rank, "attempt": attempt}
        self._values: list[float] = [*scalars.values(), math.nan, math.nan, *[0] * (3 * len(SECTIONS))]
        if path is not None:
            try:
                self._map = _make_file(path)
            except OSError as error:
                raise UsageError(f"{path}: {error.strerror}; {MARKS} must name a file in a folder that this process can write") from error
            self._values[_ENTERED] = self._pass[2]
            self._write()
            self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, _FILE_BYTES)

    @classmethod
    def from_environment(cls, rank: int, environment: Mapping[str, str] = os.environ, events: Events | None = None) -> "Marks":
        """Marks in the file that ``MEGASCALE_MARKS`` names, of the attempt ``MEGASCALE_ATTEMPT``.

        Raises UsageError when the file cannot be made or the attempt is no number.
        """
        attempt = environment.get(ATTEMPT, "0")
        if not attempt.isdecimal():
            raise UsageError(f"{ATTEMPT}={attempt!r}; expected the number of this start, 0 or more")
        path = environment.get(MARKS)
        marks = cls(Path(path) if path else None, rank=rank, attempt=int(attempt), events=events)
        marks.events.describe(attempt=int(attempt))
        if path:
            threading.Thread(target=marks._pulse, name="pulse", daemon=True).start()
        return marks

    def _pulse(self) -> None:
        assert self._map is not None, "only a file has a pulse"
        while True:
            self._map[_PULSE_AT:] = _PULSE.pack(self._clock())
            time.sleep(PULSE_S)

    def enter(self, section: str, step: int = _NONE) -> None:
        """The pass of the section so far is complete, and one of ``section`` begins; ``step``: the one that it is a part of, if any."""
        if not self._is_on:
            return
        now = self._clock()
        self._complete(now)
        self._pass = (section, step, now)
        self._values[_SECTION] = _SECTION_INDEX[section]
        self._values[_ENTERED] = now
        self._write()

    @contextmanager
    def section(self, section: str, step: int = _NONE) -> Iterator[None]:
        """A pass inside the present one, which goes on afterwards and does not count the time; an exception leaves it uncounted."""
        if not self._is_on:
            yield
            return
        outer, outer_pass, began = self._values[_SECTION], self._pass, self._clock()
        outer_ns = began - self._values[_ENTERED]
        self._values[_SECTION] = _SECTION_INDEX[section]
        self._values[_ENTERED] = began
        self._pass = (section, step, began)
        self._write()
        try:
            yield
            self._complete(self._clock())
        finally:
            self._values[_SECTION] = outer
            self._pass = outer_pass
            self._values[_ENTERED] = self._clock() - outer_ns
            self._write()

    def step_done(self, step: int, loss: float, *, is_skipped: bool = False, step_s: float | None = None) -> None:
        """``step`` steps are complete; the newest had ``loss`` and took ``step_s`` seconds (``None``: not measured)."""
        if not self._is_on:
            return
        if is_skipped:
            self.told("skip", step, f"loss {loss}")
        values = self._values
        values[_STEP], values[_LOSS] = step, loss
        values[_IN_A_ROW] = values[_IN_A_ROW] + 1 if is_skipped else 0
        values[_NON_FINITE] += is_skipped
        if step_s is not None:
            mean = values[_STEP_S]
            values[_STEP_S] = step_s if math.isnan(mean) else mean + STEP_TIME_WEIGHT * (step_s - mean)
        self._write()

    def corrupt(self, ranks: Sequence[int], *, is_certain: bool) -> None:
        """Copies of the state differ: those of ``ranks`` are wrong, or one of them is."""
        if self._is_on:
            self.told("corrupt", int(self._values[_STEP]), f"{'' if is_certain else 'one of '}ranks {', '.join(map(str, ranks))}")
            self._values[_CORRUPTION] = _NAMED if is_certain else _SUSPECTED
            for number, rank in enumerate(ranks[:MOST_ODD_RANKS]):
                self._values[_CORRUPTION + 1 + number] = rank
            self._write()

    def spiked(self, spike: Spike) -> None:
        """The loss spikes."""
        if self._is_on:
            if spike.first != self._values[_SPIKE]:
                self.told("spike", spike.last, json.dumps(asdict(spike)))
            rewind_step = _NONE if spike.rewind_step is None else spike.rewind_step
            self._values[_SPIKE : _SPIKE + 5] = [spike.first, spike.last, rewind_step, spike.begin, spike.end]
            self._write()

    def resumed(self, step: int, *, is_durable: bool) -> None:
        """The run goes on from the state after ``step`` steps, which came from storage (``is_durable``) or from memory."""
        self.told("resume", step, "from storage" if is_durable else "from memory")
        self._set(_STEP, step)
        self._set(_DURABLE if is_durable else _SAVED, step)

    def saved(self, step: int) -> None:
        """The state after ``step`` is in host memory: it survives the process."""
        if self._set(_SAVED, step):
            self.told("saved", step)

    def durable(self, step: int) -> None:
        """The state after ``step`` is on storage: it survives the host."""
        if self._set(_DURABLE, step):
            self.told("published", step)

    def told(self, name: str, step: int = _NONE, text: str | None = None) -> None:
        """One of `INSTANTS`, for the events alone."""
        self.events.instant(name, step=step, text=text)

    def close(self) -> None:
        """The process ends, and its last pass with it: all events are written."""
        self._tell(self._clock())
        self.events.close()

    def _set(self, index: int, value: int) -> bool:
        if not self._is_on or self._values[index] == value:
            return False
        self._values[index] = value
        self._write()
        return True

    def _tell(self, now: int) -> None:
        section, step, began_ns = self._pass
        self.events.record(section, began_ns, now - began_ns, step=step)

    def _alive(self) -> None:
        section, step, began_ns = self._pass
        self.events.instant(ALIVE, step=step, text=Alive(section=section, since_ns=began_ns).model_dump_json())

    def _complete(self, now: int) -> None:
        values = self._values
        section = int(values[_SECTION])
        place, lasted = _PASSES + 3 * section, now - values[_ENTERED]
        values[place] += 1
        values[place + 2] = lasted
        if lasted > values[place + 1] and values[place] > UNTAUGHT_PASSES.get(SECTIONS[section], 0):
            values[place + 1] = lasted
        self._tell(now)

    def _write(self) -> None:
        if self._map is None:
            return
        self._values[0] += 1
        body = _BODY.pack(*self._values)
        begin = _HEADER.size + (int(self._values[0]) & 1) * _SLOT_BYTES
        self._map[begin : begin + _SLOT_BYTES] = body + zlib.crc32(body).to_bytes(4, "little")


def _make_file(path: Path) -> mmap.mmap:
    # never the old file made shorter: a process that still has it mapped would get a SIGBUS
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _FILE_BYTES)  # a full disk is an error here, and no SIGBUS later
        return mmap.mmap(descriptor, _FILE_BYTES)
    finally:
        os.close(descriptor)


def read_marks(path: Path) -> MarksReading | None:
    """The newest whole content of a file of marks; ``None`` when there is none, or it is no such file. Never raises."""
    for _ in range(_READS):
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if len(content) != _FILE_BYTES or content[: _HEADER.size] != _HEADER.pack(_MAGIC, _FILE_BYTES):
            return None
        slots = [_slot(content, _HEADER.size + number * _SLOT_BYTES) for number in (0, 1)]
        if whole := [slot for slot in slots if slot is not None]:
            (pulse_ns,) = _PULSE.unpack_from(content, _PULSE_AT)
            return _reading(max(whole, key=lambda values: values[0]), pulse_ns or None)
    return None


def _slot(content: bytes, begin: int) -> tuple[float, ...] | None:
    body = content[begin : begin + _BODY.size]
    if zlib.crc32(body).to_bytes(4, "little") != content[begin + _BODY.size : begin + _SLOT_BYTES]:
        return None
    values = _BODY.unpack(body)
    return values if values[0] > 0 and 0 <= values[_SECTION] < len(SECTIONS) else None


def _reading(values: tuple[float, ...], pulse_ns: int | None) -> MarksReading:
    scalars = {name: int(value) for name, value in zip(_SCALARS, values, strict=False)}
    passes = {name: int(values[_PASSES + 3 * index]) for name, index in _SECTION_INDEX.items()}

    def seconds(place: int, untaught: Mapping[str, int]) -> dict[str, float]:
        known = [name for name in SECTIONS if passes[name] > untaught.get(name, 0)]
        return {name: values[_PASSES + 3 * _SECTION_INDEX[name] + place] / 1e9 for name in known}

    return MarksReading(
        pid=scalars["pid"],
        rank=scalars["rank"],
        attempt=scalars["attempt"],
        step=scalars["step"],
        section=SECTIONS[scalars["section"]],
        entered_ns=scalars["entered_ns"],
        pulse_ns=pulse_ns,
        passes={name: count for name, count in passes.items() if count},
        longest_s=seconds(1, UNTAUGHT_PASSES),
        last_s=seconds(2, {}),
        loss=None if math.isnan(values[_LOSS]) and not scalars["non_finite_in_a_row"] else values[_LOSS],
        non_finite_in_a_row=scalars["non_finite_in_a_row"],
        non_finite=scalars["non_finite"],
        saved_step=None if scalars["saved"] == _NONE else scalars["saved"],
        durable_step=None if scalars["durable"] == _NONE else scalars["durable"],
        step_s=None if math.isnan(values[_STEP_S]) else values[_STEP_S],
        odd_ranks=tuple(rank for name in _ODD_RANKS if (rank := scalars[name]) != _NONE) if scalars["corruption"] else None,
        is_odd_certain=scalars["corruption"] == _NAMED,
        spike=_spike(scalars) if scalars["spike_first"] else None,
    )


def _spike(scalars: Mapping[str, int]) -> Spike:
    first, last, rewind_step, begin, end = (scalars[f"spike_{name}"] for name in ("first", "last", "rewind_step", "begin", "end"))
    return Spike(first, last, None if rewind_step == _NONE else rewind_step, begin, end)

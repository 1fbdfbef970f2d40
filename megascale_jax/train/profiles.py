"""Profiles of a live run, on request (`observe/profile_request.py`): XLA's profiler is on between two steps of this rank.

A thread looks for requests, answers, and writes profiles; the loop has two comparisons a step, and no file. It begins a profile itself,
so that the first step is whole; the thread collects and writes it, behind the loop's back. Each rank goes by its own count of steps, and
agrees with nobody.

Failure cases: a request for steps that are past is refused with where the run is; a disk that is full, or would be, or hangs, loses the
profile and nothing else; a step that never ends leaves a profile of `MOST_S` seconds; a run that ends early one of the steps so far.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import jax
from jax._src.lib import _profiler  # pyright: ignore[reportAttributeAccessIssue]

from megascale_jax.observe.marks import Marks
from megascale_jax.observe.profile_request import AT_WORK, NEWS_S, PROFILE, Answer, Place, Request, State, look_s, requests_of, told
from megascale_jax.observe.report import replace_file

MOST_S = 600.0
"""Of one profile."""
RESERVE_BYTES = 2 << 30
"""Of the run's disk that profiles leave free: checkpoints need it more."""
GAP = 2
"""Steps between two profiles: a step is dispatched before the one before it is read."""
END_S = 60.0
"""Longest that the end of a run waits for a profile to be written."""
STEP = "train"
"""Name under which profilers know a step."""
_NEVER = 1 << 62
_NO_STEP = nullcontext()
_logger = logging.getLogger(__name__)


class Session(Protocol):
    """A profiler that is on."""

    def stop(self) -> bytes:
        """Turn it off: an XSpace, serialized."""
        ...


def new_session() -> Session:
    """XLA's profiler without Python's own calls, which would be most of the file and slow the host. Raises RuntimeError if one is on.

    JAX's public functions write the files themselves, and begin no profile any more once a disk was full.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.raise_error_on_start_failure = True
    return _profiler.ProfilerSession(options)


@dataclass(frozen=True)
class _Work:
    """A request that this rank has accepted; ``session`` and ``began`` (monotonic seconds) once it is on."""

    place: Place
    request: Request
    session: Session | None = None
    began: float = 0.0


class Profiles:
    """Of one process; `step` and `close` are called by the loop's thread. Use as a context manager around the loop."""

    def __init__(self, run: Path, steps: int, rank: int, ranks: int, marks: Marks, begin: Callable[[], Session] = new_session):
        """Profiles in a run's folder, which trains to step ``steps``; ``begin`` turns the profiler on."""
        self._run, self._steps, self._rank, self._marks, self._begin = run, steps, rank, marks, begin
        self._look_s = look_s(ranks)
        self._step = 0
        self._due, self._over = _NEVER, _NEVER
        """Steps at which the loop has something to do: one to be run, one that was read."""
        self._waiting: list[_Work] = []
        self._running: _Work | None = None
        self._finished: list[tuple[_Work, str, int]] = []
        """What the loop is done with: no session, or one to be collected; a note; the step of then."""
        self._seen: dict[Place, Request | str] = {}
        self._told: dict[Place, float] = {}
        self._lock, self._wake, self._ends = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._serve, name="profiles", daemon=True)

    def __enter__(self) -> "Profiles":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end("the run ended")
        self._ends = True
        self._wake.set()
        self._thread.join(END_S)

    def step(self, step: int) -> AbstractContextManager[object]:
        """Around the dispatch of ``step``: begins what is due."""
        self._step = step
        if step < self._due:
            return _NO_STEP
        if self._running is None:
            self._start(step)
        return _NO_STEP if self._running is None else jax.profiler.StepTraceAnnotation(STEP, step_num=step)

    def read(self, step: int) -> None:
        """The devices are through with ``step``: ends what is over."""
        if step >= self._over:
            self._end("")

    def _start(self, step: int) -> None:
        with self._lock:
            work = next((one for one in self._waiting if one.request.first <= step), None)
            if work is None:
                self._plan()
                return
            self._waiting.remove(work)
            session, problem = None, ""
            if work.request.first < step:
                problem = _past(work.request, step)
            else:
                try:
                    session = self._begin()
                except Exception as error:  # whatever a profiler does, training goes on
                    problem = f"the profiler cannot begin: {error}"
            if session is None:
                self._finished.append((work, problem, step))
            else:
                self._running = replace(work, session=session, began=time.monotonic())
            self._plan()
        self._wake.set()

    def _end(self, note: str) -> None:
        with self._lock:
            if self._running is not None:
                self._finished.append((self._running, note, self._step))
                self._running = None
            self._plan()
        self._wake.set()

    def _plan(self) -> None:
        if self._running is not None:
            self._due, self._over = 0, self._running.request.end - 1
        else:
            self._due, self._over = min((one.request.first for one in self._waiting), default=_NEVER), _NEVER

    def _serve(self) -> None:
        is_failing = False
        while True:
            ends = self._ends
            try:
                self._finish()
                self._look(ends)
                is_failing = False
            except Exception as error:  # of the disk: training goes on, and so does this thread
                if not is_failing:
                    _logger.warning("profiles cannot be served (%s: %s); training goes on without", type(error).__name__, error)
                is_failing = True
            if ends and not self._finished:
                return
            self._wake.wait(self._look_s)
            self._wake.clear()

    def _look(self, ends: bool) -> None:
        asked = dict(requests_of(self._run)) if not ends else {}
        with self._lock:
            gone = [one for one in self._waiting if asked.get(one.place) != one.request]
            self._waiting = [one for one in self._waiting if one not in gone]
            self._plan()
        for one in gone:
            self._tell(one.place, "failed", f"the run ended after step {self._step}" if ends else "withdrawn, or its time is over")
        before, self._seen = self._seen, asked
        for place, request in asked.items():
            if before.get(place) != request:  # of one name may be a second, after the first was withdrawn
                self._judge(place, request)
        with self._lock:
            waiting, running = tuple(self._waiting), self._running
        if running is not None and time.monotonic() - running.began > MOST_S:
            self._end(f"cut after {MOST_S:.0f} s")
            self._finish()
        elif running is not None:
            self._news(running.place, "running")
        for one in waiting:
            self._news(one.place, "waiting")

    def _news(self, place: Place, state: State) -> None:
        if time.monotonic() - self._told.get(place, -NEWS_S) >= NEWS_S:
            self._told[place] = time.monotonic()
            self._tell(place, state)

    def _judge(self, place: Place, request: Request | str) -> None:
        """Accept what is asked of this rank, or say why not."""
        if isinstance(request, str):
            if self._rank == 0:
                _logger.warning("%s", request)
            return
        answer = place.answer(self._rank)
        if self._rank not in request.ranks or (answer is not None and answer.state not in AT_WORK):
            return
        problem = ""
        with self._lock:
            others = [*self._waiting, *([self._running] if self._running else [])]
            clash = next((it for it in others if request.first < it.request.end + GAP and it.request.first < request.end + GAP), None)
            if request.end - 1 > self._steps:
                problem = f"the run ends with step {self._steps}"
            elif request.first <= self._step:
                problem = _past(request, self._step)
            elif clash is not None:
                taken = f"steps {clash.request.first} to {clash.request.end - 1} are asked for already ({clash.place.name})"
                problem = f"{taken}; leave {GAP} steps between two profiles"
            else:
                self._waiting.append(_Work(place, request))
                self._told.pop(place, None)
                self._plan()
        if problem:
            self._tell(place, "refused", problem, is_new=True)

    def _finish(self) -> None:
        """Collect and write what the loop has ended, or say why there is nothing."""
        while self._finished:
            work, note, step = self._finished[0]
            try:
                if work.session is None:
                    self._tell(work.place, "failed", note, is_new=True)
                else:
                    self._write(work.place, work.session, note and f"{note}: it has the steps {work.request.first} to {step}")
            finally:
                self._finished.pop(0)

    def _write(self, place: Place, session: Session, note: str) -> None:
        path = place.profile(self._rank)
        try:
            content = session.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(path.parent).free
            if free < len(content) + RESERVE_BYTES:
                raise OSError(
                    f"the disk has {free >> 20} MiB, the profile {len(content) >> 20} MiB, and {RESERVE_BYTES >> 20} MiB are to stay free"
                )
            replace_file(path, content)
        except Exception as error:  # of the disk, of the profiler: only the profile is lost
            self._tell(place, "failed", f"the profile is lost: {error}", is_new=True)
            return
        self._tell(place, "done", note, num_bytes=len(content), is_new=True)

    def _tell(self, place: Place, state: State, text: str = "", *, num_bytes: int = 0, is_new: bool = False) -> None:
        """Answer a request; what ``is_new`` is an event too."""
        answer = Answer(rank=self._rank, state=state, step=self._step, at_unix_s=time.time(), text=text[:2000], num_bytes=num_bytes)
        if is_new:
            self._marks.told(PROFILE, self._step, told(place.name, answer))
        if place.request.exists() or state == "done":  # nobody asks any more, and an answer would only lie about
            place.say(answer)


def _past(request: Request, step: int) -> str:
    return f"step {request.first} is past: the run is in step {step}; ask for steps further ahead"

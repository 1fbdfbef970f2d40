"""What a keeper does behind the backs of the ranks: four threads that carry filled slots on, each by its own line of jobs.

    copying       checksums, then a copy on the next host
    writing       the rank's part of the checkpoint
    publication   beside rank 0: steps whose parts are all there
    upload        beside rank 0: a further copy

Storage is slow, so a state does not wait for the one before it to be written until it is verified and on two hosts; and one
whose next host is gone does not wait for that to be written. A slot is busy until both are done with it. Each line keeps the order
in which slots were filled. What each thread does when is an event of the run (`observe/events.py`), lane ``keeper``.
"""

import contextlib
import json
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megascale_jax.checkpoint.holdings import Job, Work
from megascale_jax.checkpoint.manifest import Manifest
from megascale_jax.checkpoint.peers import send_copy
from megascale_jax.checkpoint.publications import Publications
from megascale_jax.checkpoint.slot import checksums
from megascale_jax.checkpoint.stage_two import discard, is_published, tell_failure, tidy, write_part
from megascale_jax.checkpoint.upload import upload_waiting
from megascale_jax.observe.events import Events

COPYING, WRITING, PUBLICATION, UPLOAD = "copying", "writing", "publication", "upload"
_READERS = (COPYING, WRITING)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_TELL_AGAIN_S = 1.0
_GIVEN_UP = 8
"""Newest steps that were given up, in which parts may still arrive."""

_logger = logging.getLogger(__name__)


@dataclass
class Carriers:
    """The lines and their threads. ``changed`` guards, and tells of, everything that the threads and the keeper share."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    in_hand: list[Work] = field(default_factory=list)
    durable: dict[str, Any] | None = None
    """The newest checkpoint that was published here for the launch at work."""
    peer: tuple[str, int, str] | None = None
    """Host, port and secret of the keeper that gets our copies."""

    def __post_init__(self) -> None:
        self.events = Events(None)
        """In the folder that the newest job names."""
        self._events_folder: str | None = None
        self._launch = ""
        self._given_up: deque[tuple[int, str]] = deque(maxlen=_GIVEN_UP)
        self._untold: list[tuple[Job, str]] = []
        """Parts that failed, and rank 0 does not know."""
        self._pending = Publications()
        self._lines: dict[str, queue.SimpleQueue[Job]] = {what: queue.SimpleQueue() for what in (COPYING, WRITING, PUBLICATION, UPLOAD)}

    def start(self) -> None:
        """Begin to work."""
        for work in (self._copy, self._write, self._publish, self._upload):
            threading.Thread(target=self._in_idle_class, args=(work,), daemon=True).start()

    @staticmethod
    def _in_idle_class(work: Callable[[], None]) -> None:
        """The kernel's idle class: such a thread, and those it starts, leaves a core at once when a step's thread wakes up.

        The keeper's other threads are not in it, since training waits for their answers.
        """
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        while True:
            try:
                work()
            except Exception:  # a rank would wait for ever for a thread that has ended
                _logger.exception("a thread of the keeper begins anew")

    def take(self, job: Job) -> None:
        """A slot is complete: carry it on."""
        with self.changed:
            self._open_events(job)
            if self._launch != job.index.launch:
                self._launch, self.durable = job.index.launch, None
            self._pass_on(COPYING, job)
            if job.index.rank == 0 and job.target is not None:
                self._pass_on(PUBLICATION, job)

    def _open_events(self, job: Job) -> None:
        folder = job.target.events if job.target is not None else None
        if folder is not None and folder != self._events_folder:
            self.events.close(limit_s=0.0)  # of a run folder that was moved
            self._events_folder = folder
            self.events = Events(Path(folder), role="keeper", rank=job.index.rank, run=job.target.run if job.target is not None else "")

    def status(self) -> dict[str, Any]:
        """What is published, and what is in hand."""
        with self.changed:
            return {"durable": self.durable, "working": [asdict(work) for work in self.in_hand]}

    def _pass_on(self, what: str, job: Job) -> None:
        with self.changed:
            self.in_hand.append(Work(what, job.index.step))
            job.held.readers += what in _READERS
            self._lines[what].put(job)

    @contextlib.contextmanager
    def _ended(self, what: str, job: Job) -> Iterator[None]:
        """Work that `_pass_on` counted ends with this."""
        details = json.dumps({"rank": job.index.rank, "bytes": job.held.slot.num_bytes})
        try:
            with self.events.span(what, lane="keeper", step=job.index.step, text=details):
                yield
        finally:
            with self.changed:
                self.in_hand.remove(Work(what, job.index.step))
                job.held.readers -= what in _READERS
                self.changed.notify_all()

    @contextlib.contextmanager
    def _reported(self, job: Job, what: str, *, is_loss: bool = True) -> Iterator[None]:
        """Failures inside become something that the rank is told; ``is_loss``: without this the state is not safe."""
        try:
            yield
        except Exception as error:
            with self.changed:
                job.rank.failures.append({"step": job.index.step, "what": what, "error": str(error), "is_loss": is_loss})
            self.events.instant(what, lane="keeper", step=job.index.step, text=str(error))
            _logger.exception("step %d is %s", job.index.step, what)  # never raises, also where the log's disk is full

    def _copy(self) -> None:
        while True:
            job = self._lines[COPYING].get()
            with self._ended(COPYING, job), self._reported(job, "not written"):
                try:
                    sums = checksums(job.held.slot, job.index)
                finally:  # also when it fails: rank 0 waits for this part, or for the word that there is none
                    if job.target is not None:
                        self._pass_on(WRITING, job)
                with self.changed:
                    job.held.sums = sums
                if self.peer is not None:
                    with self._reported(job, "no copy on the next host", is_loss=False):
                        send_copy(*self.peer, job.held.slot, job.index, sums)

    def _write(self) -> None:
        while True:
            try:
                job = self._lines[WRITING].get(timeout=_TELL_AGAIN_S if self._untold else None)
            except queue.Empty:
                self._untold = [one for one in self._untold if one[0].index.launch == self._launch and not _tell(*one)]
                continue
            assert job.target is not None, "only what goes to storage is written"
            with self._ended(WRITING, job), self._reported(job, "not written"):
                try:
                    write_part(job.target.storage(), job.target, job.held.slot, job.index)
                except Exception as error:  # whatever it was: rank 0 must not wait for this part
                    if not _tell(job, str(error)):
                        self._untold.append((job, str(error)))
                    raise

    def _publish(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                self._pending.add(self._lines[PUBLICATION].get(timeout=pause if self._pending else None))
                pause = _FIRST_PAUSE_S
            except queue.Empty:
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            for job, outcome in self._pending.settle(lambda: self._launch):
                with self._ended(PUBLICATION, job), self._reported(job, "not published"):
                    self._conclude(job, outcome)

    def _conclude(self, job: Job, outcome: Manifest | Exception) -> None:
        """What follows a publication, or a failed one. Raises what that raised."""
        target, index = job.target, job.index
        assert target is not None, "only what goes to storage is published"
        storage = target.storage()
        for step, launch in self._given_up:  # hosts write in order: a part that came after its step was given up is there by now
            discard(storage, step, launch, "a part came late")
        if isinstance(outcome, Exception):
            if isinstance(outcome, OSError) and not is_published(storage, index):
                discard(storage, index.step, index.launch, str(outcome))
                self._given_up.append((index.step, index.launch))
            raise outcome
        self._given_up.clear()
        with self.changed:
            newest = self.durable
            if newest is None or newest["launch"] != outcome.launch or newest["step"] < outcome.step:
                shown = ("step", "launch", "created_unix_s", "num_bytes")
                self.durable = {name: getattr(outcome, name) for name in shown}
        with self._reported(job, "old ones not removed", is_loss=False):
            tidy(storage, target, outcome)
        if target.upload is not None:
            self._pass_on(UPLOAD, replace(job, manifest=outcome))

    def _upload(self) -> None:
        while True:
            job = self._lines[UPLOAD].get()
            target, manifest = job.target, job.manifest
            assert target is not None and target.upload is not None and manifest is not None, "only what is published is uploaded"
            with self._ended(UPLOAD, job), self._reported(job, f"not uploaded to {target.upload}", is_loss=False):
                storage = target.storage()
                try:
                    upload_waiting(storage, target.upload)
                finally:
                    tidy(storage, target, manifest)


def _tell(job: Job, error: str) -> bool:
    assert job.target is not None, "only what goes to storage is written"
    return tell_failure(job.target.storage(), job.index, error)

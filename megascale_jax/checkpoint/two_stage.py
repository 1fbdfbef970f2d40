"""Checkpoints of a run, as its ranks see them (paper section 4.4).

**Stage 1**: the state's shards are copied into a slot of host memory; that is all a step waits for, the arrays may be donated at once.
**Stage 2** is the keeper's (`keeper.py`): checksums, a copy on the next host, the rank's part on storage, one publication.
Two slots take turns, so a save waits only when stage 2 is a whole save behind.

**Restore** takes the newest state that every rank can get: from this host's memory, a peer's, or storage, where each block is read by
one rank of its data-parallel group (`broadcast.py`). What turns out to be damaged is marked, said, and passed over.

A save never ends a training: what fails is counted and said, and the checkpoints before stay. All ranks call every method in the
same order; a rank whose keeper died starts a new one and hands its slots over again.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from megascale_jax.checkpoint.carriers import UPLOAD
from megascale_jax.checkpoint.cipher import Cipher
from megascale_jax.checkpoint.host_memory import HostMemory
from megascale_jax.checkpoint.keeper_client import keeper_folder
from megascale_jax.checkpoint.line import REWINDS, Rewind
from megascale_jax.checkpoint.recovery import Recovery, Restored
from megascale_jax.checkpoint.restore import fingerprint, grid_of
from megascale_jax.checkpoint.retention import Retention
from megascale_jax.checkpoint.slot import SlotIndex
from megascale_jax.checkpoint.stage_one import SlotLayout
from megascale_jax.checkpoint.stage_two import Target
from megascale_jax.comm.agree import all_results
from megascale_jax.comm.storage import Storage
from megascale_jax.config.schema import CheckpointConfig
from megascale_jax.errors import CheckpointError
from megascale_jax.parallel.plan import Plan

Named = Mapping[str, jax.Array]
"""A state by the names of its stored arrays: ``params.q``, ``first_moment.q``, ..., ``step``, ``updates``, ``rng``."""

WATCH_S = 1.0
"""Time between two questions to the keeper."""
SAY_S = 30.0
"""Time between two words about what is waited for."""


class CheckpointStore:
    """Both stages and the restore of one run, for one rank."""

    def __init__(
        self,
        url: str | Path,
        run_identity: str,
        plan: Plan,
        settings: CheckpointConfig,
        say: Callable[[str], None] = print,
        rewinds: Sequence[Rewind] = (),
        events: Path | None = None,
    ):
        """Meet the keeper and the other ranks. ``run_identity``: one for all starts of a run, and for no other run; rank 0's counts.

        ``rewinds``: all that the run has known (`line.py`); what they gave up is neither gone on from nor kept. ``events``: folder where
        the keeper is to write what it does when.

        Raises CheckpointError or StorageError, on all ranks, when the storage or a keeper cannot be used on one of them.
        """
        self.errors = 0
        self.blocked_s = 0.0
        """How long the newest save held up the training, seconds."""
        self._settings, self._say, self._rewinds = settings, say, tuple(rewinds)

        opened: list[Storage] = []

        def introduce() -> dict[str, str]:
            opened.append(Storage(url, settings.key_file))
            if settings.key_file is not None:
                Cipher(settings.key_file)
            return {"launch": secrets.token_hex(8), "secret": secrets.token_hex(32), "run": run_identity}

        shared = all_results(introduce, CheckpointError)[0]
        self._storage = opened[0]
        self._grid, self._fingerprint = grid_of(plan), fingerprint(plan, rewinds)
        self._launch, self._run = shared["launch"], shared["run"]
        self._layout = SlotLayout(plan, self._grid)
        folder = keeper_folder(f"{self._run} {self._storage.url}")  # a copied run folder is another run's
        self._memory = HostMemory(folder, self._layout, self._fingerprint, shared["secret"], settings.limit_s)
        # one node reads as fast without: its page cache holds what another rank has read
        broadcasts = self._memory.num_hosts > 1 if settings.restore == "auto" else settings.restore == "broadcast"
        self._recovery = Recovery(self._memory, self._storage, plan, self._grid, self._run, broadcasts, say, rewinds)
        self._lost: set[int] = set()
        self._newest_step = 0
        self._waiting_since: float | None = None
        self._durable: dict[str, Any] | None = None
        self._failures: list[dict[str, Any]] = []
        self._turn, self._news, self._closed = threading.RLock(), threading.Lock(), threading.Event()
        self._target = Target(
            url=self._storage.url,
            ranks=jax.process_count(),
            compression=settings.compression,
            retention=Retention(settings.keep, settings.keep_every, settings.keep_hours, rewinds),
            publish_limit_s=settings.limit_s,
            run=self._run,
            key_file=settings.key_file,
            upload=settings.upload,
            events=None if events is None else str(events.absolute()),
        )
        threading.Thread(target=self._watch, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """After an error nothing is waited for: the keeper goes on by itself, and the states stay for whoever goes on from them."""
        self.close(waits=kind is None)

    @property
    def keeper_pid(self) -> int:
        """Process of this host's keeper."""
        return self._memory.keeper_pid

    @property
    def slot_bytes(self) -> int:
        """Host memory of one of this rank's two slots."""
        return self._layout.num_bytes

    def save(self, step: int, state: Named, description: Mapping[str, Any]) -> None:
        """Stage 1 of a checkpoint; stage 2 goes on by itself. Never raises for memory, disk or keeper."""
        began, self._newest_step, self._waiting_since = time.monotonic(), step, None
        said = {**description, REWINDS: self._rewinds} if self._rewinds else description
        index = SlotIndex(step, self._launch, jax.process_index(), self._grid.stored, self._layout.blocks, self._fingerprint, said)
        try:
            self._with_keeper(lambda: self._memory.fill(state, index, self._target))
        except Exception as error:  # of memory, of a device's transfer, of the keeper: a training never ends for it
            self._failed(step, f"{type(error).__name__}: {error}")
        self.blocked_s = time.monotonic() - began

    def wait(self) -> None:
        """Until every save is published, and uploaded, or has failed; says what it waits for. Never raises for memory, disk or keeper.

        What is not published within the limit counts as failed. An upload goes on in the keeper then, and is no loss. To wait again
        without another save does not take longer.
        """
        limit_s, began = self._settings.limit_s, self._waiting_since or time.monotonic()
        self._waiting_since = began
        try:
            while working := self._finish(began + limit_s - time.monotonic()):
                waited_s = time.monotonic() - began
                if waited_s >= limit_s:
                    self._give_up(working)
                    break
                keeper = f"the keeper, process {self.keeper_pid}"
                self._say(f"waiting for the {_named(working)} in {keeper}: {waited_s:.0f} s of at most {limit_s} s")
        except (OSError, CheckpointError) as error:
            self._failed(self._newest_step, str(error))
        self.durable()

    def _finish(self, left_s: float) -> list[dict[str, Any]]:
        """What the keeper still has in hand after `SAY_S`, or the time left."""
        with self._turn:
            status = self._with_keeper(lambda: self._memory.finish(max(0.0, min(SAY_S, left_s))))
            self._heed(status)
        return status["working"]

    def _give_up(self, working: Sequence[Mapping[str, Any]]) -> None:
        uploads = [work for work in working if work["what"] == UPLOAD]
        for step in sorted({work["step"] for work in working if work["what"] != UPLOAD}):
            self._failed(step, f"stage 2 did not end within {self._settings.limit_s} s")
        if uploads:
            self._say(f"the {_named(uploads)} goes on in the keeper, process {self.keeper_pid}, which ends after it: let that live")

    def durable(self) -> dict[str, Any] | None:
        """The newest checkpoint this launch published (``step``, ``created_unix_s``), and what failed is said; ``None``: none yet.

        Costs nothing: a thread asks the keeper.
        """
        with self._news:
            failures, self._failures = self._failures, []
        for failure in failures:
            if failure["is_loss"]:
                self._failed(failure["step"], f"{failure['what']}: {failure['error']}")
            else:
                self._say(f"checkpoint of step {failure['step']}: {failure['what']}: {failure['error']}")
        return self._durable

    def prepare(self) -> None:
        """Take the memory for the slots now instead of at the first save. Never raises."""
        try:
            self._with_keeper(self._memory.prepare)
        except (OSError, CheckpointError) as error:
            self._say(f"no memory for checkpoints yet: {error}")

    def close(self, *, is_over: bool = False, waits: bool = True) -> None:
        """Finish stage 2, unless ``waits`` is off. ``is_over``: the states need not stay in memory; those that are not safe do.

        Never raises.
        """
        if not self._closed.is_set():
            if waits:
                self.wait()
            is_over = is_over and self._newest_step not in self._lost
            self._closed.set()
            with self._turn:
                self._memory.close(is_over=is_over)

    def restore(self, step: int | None = None) -> Restored | None:
        """The newest good state, on every rank the same; ``None`` when there is no checkpoint at all. ``step``: that one, from storage.

        Raises CheckpointError when there are some and none can be used: starting from nothing would hide that.
        """
        if step is None:
            return self._recovery.newest()
        if (found := self._recovery.from_storage(step)) is None:
            raise CheckpointError(f"checkpoint {self._storage.url}/{step} is damaged; choose another step")
        return found

    def _with_keeper(self, action: Callable[[], Any]) -> Any:
        """An action; with another keeper once more, when the one there is turns out to be dead."""
        with self._turn:
            try:
                return action()
            except ConnectionError:
                self._memory.replace_keeper()
                return action()

    def _watch(self) -> None:
        """Hear what the keeper did; a keeper that died is replaced at once, so that what it had in hand is finished."""
        while not self._closed.wait(WATCH_S):
            try:
                with self._turn:
                    if not self._closed.is_set():
                        self._heed(self._with_keeper(self._memory.status))
            except (OSError, CheckpointError):
                continue  # the next save says so

    def _heed(self, status: Mapping[str, Any]) -> None:
        with self._news:
            self._failures += status["failures"]
            self._durable = status["durable"] or self._durable
        if not status["working"]:
            self._memory.settle()

    def _failed(self, step: int, problem: str) -> None:
        if step not in self._lost:
            self._lost.add(step)
            self.errors += 1
            self._say(f"checkpoint of step {step} was not saved: {problem}; training goes on, older checkpoints stay")


def _named(working: Sequence[Mapping[str, Any]]) -> str:
    """``upload of step 5, publication of step 6``."""
    return ", ".join(dict.fromkeys(f"{work['what']} of step {work['step']}" for work in working))

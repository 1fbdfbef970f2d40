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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from megascale_jax.checkpoint.arrays import BlockReader
from megascale_jax.checkpoint.broadcast import read_broadcast
from megascale_jax.checkpoint.cipher import Cipher
from megascale_jax.checkpoint.host_memory import HostMemory
from megascale_jax.checkpoint.keeper_client import keeper_folder
from megascale_jax.checkpoint.manifest import Manifest, mark_damaged, read_manifest, scan
from megascale_jax.checkpoint.restore import Shards, fingerprint, grid_of, read_plain
from megascale_jax.checkpoint.retention import Retention
from megascale_jax.checkpoint.slot import SlotIndex
from megascale_jax.checkpoint.stage_one import SlotLayout
from megascale_jax.checkpoint.stage_two import Target
from megascale_jax.checkpoint.tiers import MemoryState, memory_states
from megascale_jax.comm.agree import all_gather_json
from megascale_jax.comm.storage import Storage
from megascale_jax.config.schema import CheckpointConfig
from megascale_jax.errors import CheckpointError, DamagedCheckpointError, MegascaleError
from megascale_jax.parallel.plan import Plan

Named = Mapping[str, jax.Array]
"""A state by the names of its stored arrays: ``params.q``, ``first_moment.q``, ..., ``step``, ``updates``, ``rng``."""

WATCH_S = 1.0
"""Time between two questions to the keeper."""


@dataclass(frozen=True)
class Restored:
    """A state on the plan's mesh, and the tier it came from: ``local``, ``peer`` or ``durable``.

    ``bytes_read``: what this rank read from storage.
    """

    step: int
    arrays: Named
    description: Mapping[str, Any]
    tier: str
    bytes_read: int = 0


class CheckpointStore:
    """Both stages and the restore of one run, for one rank."""

    def __init__(self, url: str | Path, run_identity: str, plan: Plan, settings: CheckpointConfig, say: Callable[[str], None] = print):
        """Meet the keeper and the other ranks. ``run_identity``: one for all starts of a run, and for no other run; rank 0's counts.

        Raises CheckpointError when no keeper can be started.
        """
        self.errors = 0
        self.blocked_s = 0.0
        """How long the newest save held up the training, seconds."""
        self._storage, self._plan, self._settings, self._say = Storage(url, settings.key_file), plan, settings, say
        self._grid = grid_of(plan)
        shared = all_gather_json({"launch": secrets.token_hex(8), "secret": secrets.token_hex(32), "run": run_identity})[0]
        self._launch, self._run, self._fingerprint = shared["launch"], shared["run"], fingerprint(plan)
        self._layout = SlotLayout(plan, self._grid)
        folder = keeper_folder(f"{self._run} {self._storage.url}")  # a copied run folder is another run's
        self._memory = HostMemory(folder, self._layout, self._fingerprint, shared["secret"], settings.limit_s)
        self._lost: set[int] = set()
        self._newest_step = 0
        self._durable: dict[str, Any] | None = None
        self._failures: list[dict[str, Any]] = []
        self._turn, self._news, self._closed = threading.RLock(), threading.Lock(), threading.Event()
        self._target = Target(
            url=self._storage.url,
            ranks=jax.process_count(),
            compression=settings.compression,
            retention=Retention(settings.keep, settings.keep_every, settings.keep_hours),
            publish_limit_s=settings.limit_s,
            run=self._run,
            key_file=settings.key_file,
            upload=settings.upload,
        )
        if settings.key_file is not None:
            self._all_can(lambda: Cipher(settings.key_file or ""))
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
        began, self._newest_step = time.monotonic(), step
        index = SlotIndex(step, self._launch, jax.process_index(), self._grid.stored, self._layout.blocks, self._fingerprint, description)
        try:
            self._with_keeper(lambda: self._memory.fill(state, index, self._target))
        except Exception as error:  # of memory, of a device's transfer, of the keeper: a training never ends for it
            self._failed(step, f"{type(error).__name__}: {error}")
        self.blocked_s = time.monotonic() - began

    def wait(self) -> None:
        """Until every save is published or has failed. Never raises for memory, disk or keeper."""
        try:
            with self._turn:
                self._heed(self._with_keeper(lambda: self._memory.finish(self._settings.limit_s)))
        except (OSError, CheckpointError) as error:
            self._failed(self._newest_step, str(error))
        self.durable()

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
        if step is not None:
            if (found := self._from_storage(step)) is None:
                raise CheckpointError(f"checkpoint {self._storage.url}/{step} is damaged; choose another step")
            return found
        states: list[MemoryState | int] = [*memory_states(self._memory.reports), *self._published()]
        states.sort(key=lambda state: (state.step, 1) if isinstance(state, MemoryState) else (state, 0), reverse=True)
        for state in states:
            found = self._from_memory(state) if isinstance(state, MemoryState) else self._from_storage(state)
            if found is not None:
                return found
        if states:
            raise CheckpointError(
                f"none of the {len(states)} checkpoints of {self._storage.url} can be used (see above); bring back a copy of one, "
                "or start anew with --fresh"
            )
        return None

    def _from_memory(self, state: MemoryState) -> Restored | None:
        problem, shards, description = None, None, {}
        try:
            reader = self._memory.load(state)
            shards = Shards(self._plan, self._grid, self._grid.stored, self._grid.stored)
            read_plain(shards, reader)
            description = reader.description
        except Exception as error:  # whatever it was, the other ranks wait for our word
            problem = f"{type(error).__name__}: {error}"
        problems = [problem for problem in all_gather_json(problem) if problem is not None]
        if problems or shards is None:
            self._say(f"step {state.step} in memory is passed over: {problems[0]}")
            self._memory.forget(state)
            return None
        return Restored(state.step, shards.arrays(), description, state.tier)

    def _from_storage(self, step: int) -> Restored | None:
        opened: list[tuple[Manifest, BlockReader, Shards]] = []

        def open_all() -> None:
            manifest = read_manifest(self._storage, step)
            shards = Shards(self._plan, self._grid, manifest.arrays, self._grid.stored)
            opened.append((manifest, BlockReader(self._storage, manifest), shards))

        if not self._all_can(open_all, step=step):
            return None
        manifest, reader, shards = opened[0]
        read = read_broadcast if self._broadcasts else read_plain
        if not self._all_can(lambda: read(shards, reader), step=step):
            return None
        return Restored(step, shards.arrays(), manifest.description, "durable", reader.bytes_read)

    @property
    def _broadcasts(self) -> bool:
        """One node reads as fast by itself: its page cache holds what another rank has read."""
        chosen = self._settings.restore
        return self._memory.num_hosts > 1 if chosen == "auto" else chosen == "broadcast"

    def _all_can(self, action: Callable[[], Any], *, step: int = 0) -> bool:
        """Whether an action, on a published checkpoint, succeeds on all ranks; damage is marked and said.

        Raises CheckpointError on all ranks when it fails on one for another reason: an older step must not be taken for that.
        Whatever an action raises, every rank comes here to say so, since the others wait.
        """
        outcome = ("fine", "")
        try:
            action()
        except DamagedCheckpointError as error:
            outcome = ("damaged", str(error))
        except MegascaleError as error:
            outcome = ("other", str(error))
        except Exception as error:
            outcome = ("other", f"{type(error).__name__}: {error}")
        failures = [(kind, text) for kind, text in all_gather_json(outcome) if kind != "fine"]
        for kind, text in failures:
            if kind == "other":
                raise CheckpointError(text)
        if failures:
            self._say(f"step {step} is damaged and passed over: {failures[0][1]}")
            if jax.process_index() == 0:
                try:
                    mark_damaged(self._storage, step, failures[0][1])
                except OSError as error:
                    self._say(f"step {step} could not be marked, so the next start will meet it again: {error}")
        return not failures

    def _published(self) -> list[int]:
        """Steps that rank 0 finds: this run's, and those whose manifest cannot be read."""
        steps: list[int] = []

        def look() -> None:
            if jax.process_index() == 0:
                found = scan(self._storage)
                steps.extend(one.step for one in found if one.manifest is None or one.manifest.is_of(self._run))

        self._all_can(look)
        return all_gather_json(steps)[0]

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

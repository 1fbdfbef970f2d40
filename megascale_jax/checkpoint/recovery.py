"""Which state a run goes on from, decided by all ranks together: the newest good one in memory or on storage.

Whatever an action on one rank raises, the rank goes to the next gather to say so, and all pass the same place over together: a
rank's own memory, then the copies on other hosts, then storage, then the next older state. What is damaged is marked, so the next start
does not meet it again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from megascale_jax.checkpoint.arrays import BlockReader
from megascale_jax.checkpoint.broadcast import read_broadcast
from megascale_jax.checkpoint.grid import StateGrid
from megascale_jax.checkpoint.host_memory import HostMemory
from megascale_jax.checkpoint.line import given_up
from megascale_jax.checkpoint.manifest import Manifest, mark_damaged, read_manifest, scan
from megascale_jax.checkpoint.restore import Shards, read_plain
from megascale_jax.checkpoint.retention import Deletion, delete
from megascale_jax.checkpoint.tiers import MemoryState, memory_states
from megascale_jax.comm.agree import all_outcomes, all_results
from megascale_jax.comm.storage import Storage
from megascale_jax.errors import CheckpointError, DamagedCheckpointError, MegascaleError
from megascale_jax.parallel.plan import Plan


@dataclass(frozen=True)
class Restored:
    """A state on the plan's mesh, and the tier it came from: ``local``, ``peer`` or ``durable``.

    ``bytes_read``: what this rank read from storage.
    """

    step: int
    arrays: Mapping[str, jax.Array]
    description: Mapping[str, Any]
    tier: str
    bytes_read: int = 0


@dataclass(frozen=True)
class Recovery:
    """Where states of a run may be found. ``broadcasts``: blocks that several ranks need are read once and sent on."""

    memory: HostMemory
    storage: Storage
    plan: Plan
    grid: StateGrid
    run: str
    broadcasts: bool
    say: Callable[[str], None]
    rewinds: Sequence[Sequence[int]] = ()
    """What was given up is not gone on from (`line.py`); in memory, only states of the present line are known at all."""

    def newest(self) -> Restored | None:
        """The newest good state, on every rank the same; ``None`` when there is no checkpoint at all.

        Raises CheckpointError when there are some and none can be used: starting from nothing would hide that.
        """
        published, left = self._published()
        states: list[MemoryState | int] = [*memory_states(self.memory.reports), *published]
        states.sort(key=lambda state: (state.step, 1) if isinstance(state, MemoryState) else (state, 0), reverse=True)
        for state in states:
            found = self._from_memory(state) if isinstance(state, MemoryState) else self.from_storage(state)
            if found is not None:
                self._remove(left)
                return found
        if left and not states:
            limit = min(step for step, _, _ in self.rewinds)
            raise CheckpointError(
                f"the run was rewound to step {limit}, and {self.storage.url} has no checkpoint of that step or before, only "
                f"{', '.join(left)}; bring one back, or start anew with --fresh"
            )
        if states:
            raise CheckpointError(
                f"none of the {len(states)} checkpoints of {self.storage.url} can be used (see above); bring back a copy of one, "
                "or start anew with --fresh"
            )
        return None

    def from_storage(self, step: int) -> Restored | None:
        """One published checkpoint; ``None`` when it is damaged, which is marked. Raises CheckpointError when it cannot be read now."""
        opened: list[tuple[Manifest, BlockReader, Shards]] = []

        def open_all() -> None:
            manifest = read_manifest(self.storage, step)
            if (reason := given_up(manifest.step, manifest.description, self.rewinds)) is not None:  # it could not be read before
                raise CheckpointError(f"checkpoint {self.storage.url}/{step} is not of this run's line: {reason}")
            shards = Shards(self.plan, self.grid, manifest.arrays, self.grid.stored)
            opened.append((manifest, BlockReader(self.storage, manifest), shards))

        if not self._all_can(open_all, step):
            return None
        manifest, reader, shards = opened[0]
        read = read_broadcast if self.broadcasts else read_plain
        if not self._all_can(lambda: read(shards, reader), step):
            return None
        return Restored(step, shards.arrays(), manifest.description, "durable", reader.bytes_read)

    def _from_memory(self, state: MemoryState) -> Restored | None:
        """A state in memory; ranks whose own copy is no good try those on other hosts, while the others keep what they have."""
        loaded: list[tuple[Shards, Mapping[str, Any]]] = []

        def load() -> None:
            if not loaded:
                reader = self.memory.load(state)
                shards = Shards(self.plan, self.grid, self.grid.stored, self.grid.stored)
                read_plain(shards, reader)
                loaded.append((shards, reader.description))

        while True:
            outcomes = all_outcomes(load, CheckpointError)
            failures = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, MegascaleError)}
            if not failures:
                shards, description = loaded[0]
                return Restored(state.step, shards.arrays(), description, state.tier)
            left = state.without(failures)
            shown, problem = ", ".join(map(str, failures)), next(iter(failures.values()))
            if left is None or jax.process_index() in failures:
                self.memory.forget(state)
            if left is None:
                self.say(f"step {state.step} in memory is passed over: {problem}")
                return None
            self.say(f"step {state.step} in memory is no good on rank {shown}, trying copies on other hosts: {problem}")
            state = left

    def _published(self) -> tuple[list[int], dict[str, str]]:
        """Steps that rank 0 finds: this run's, and those whose manifest cannot be read; apart, those that were given up, and why."""

        def look() -> tuple[list[int], dict[str, str]]:
            found = scan(self.storage) if jax.process_index() == 0 else []
            own = [one for one in found if one.manifest is None or one.manifest.is_of(self.run)]
            left = {str(one.step): given_up(one.step, one.manifest.description, self.rewinds) for one in own if one.manifest is not None}
            reasons = {step: reason for step, reason in left.items() if reason is not None}
            return [one.step for one in own if str(one.step) not in reasons], reasons

        steps, reasons = all_results(look, CheckpointError)[0]
        return steps, reasons

    def _remove(self, left: Mapping[str, str]) -> None:
        """Checkpoints that were given up go, now that one from before has been read; retention finds those that come late. Never raises."""
        for step, reason in left.items() if jax.process_index() == 0 else ():
            try:
                delete(self.storage, Deletion(step, reason), by="restore")
                self.say(f"step {step} is removed: {reason}")
            except OSError as error:
                self.say(f"step {step}, {reason}, could not be removed: {error}")

    def _all_can(self, action: Callable[[], None], step: int) -> bool:
        """Whether an action, on a published checkpoint, succeeds on all ranks; damage is marked and said.

        Raises CheckpointError on all ranks when it fails on one for another reason: an older step must not be taken for that.
        """
        failures = [outcome for outcome in all_outcomes(action, CheckpointError) if isinstance(outcome, MegascaleError)]
        for failure in failures:
            if not isinstance(failure, DamagedCheckpointError):
                raise CheckpointError(str(failure)) from failure
        if failures:
            self.say(f"step {step} is damaged and passed over: {failures[0]}")
            if jax.process_index() == 0:
                try:
                    mark_damaged(self.storage, step, str(failures[0]))
                except OSError as error:
                    self.say(f"step {step} could not be marked, so the next start will meet it again: {error}")
        return not failures

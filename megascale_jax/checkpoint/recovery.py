"""Which state a run goes on from, decided by all ranks together: the newest good one in memory or on storage.

Whatever an action on one rank raises, the rank goes to the next gather to say so, and all pass the same place over together: a
rank's own memory, then the copies on other hosts, then storage, then the next older state. What is damaged is marked, so the next start
does not meet it again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from megascale_jax.checkpoint.arrays import BlockReader
from megascale_jax.checkpoint.broadcast import read_broadcast
from megascale_jax.checkpoint.grid import StateGrid
from megascale_jax.checkpoint.host_memory import HostMemory
from megascale_jax.checkpoint.manifest import Manifest, mark_damaged, read_manifest, scan
from megascale_jax.checkpoint.restore import Shards, read_plain
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

    def newest(self) -> Restored | None:
        """The newest good state, on every rank the same; ``None`` when there is no checkpoint at all.

        Raises CheckpointError when there are some and none can be used: starting from nothing would hide that.
        """
        states: list[MemoryState | int] = [*memory_states(self.memory.reports), *self._published()]
        states.sort(key=lambda state: (state.step, 1) if isinstance(state, MemoryState) else (state, 0), reverse=True)
        for state in states:
            found = self._from_memory(state) if isinstance(state, MemoryState) else self.from_storage(state)
            if found is not None:
                return found
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

    def _published(self) -> list[int]:
        """Steps that rank 0 finds: this run's, and those whose manifest cannot be read."""

        def look() -> list[int]:
            found = scan(self.storage) if jax.process_index() == 0 else []
            return [one.step for one in found if one.manifest is None or one.manifest.is_of(self.run)]

        return all_results(look, CheckpointError)[0]

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

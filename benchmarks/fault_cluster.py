"""Four ranks on four hosts without a device: the real keepers, slots and storage, a state whose every bit is known.

A host is a keeper process. A rank is this process's part of a run: two slots and a connection. The state of step s is a function of
s alone, so whatever is found later can be compared bit by bit, which for a deterministic step is the same as a loss that
goes on bit-equal.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from megascale_jax.checkpoint.arrays import BlockReader
from megascale_jax.checkpoint.grid import StateGrid
from megascale_jax.checkpoint.inspect import chunk_region
from megascale_jax.checkpoint.keeper_client import KeeperClient, keeper_folder
from megascale_jax.checkpoint.manifest import mark_damaged, published_steps, read_manifest
from megascale_jax.checkpoint.retention import Retention
from megascale_jax.checkpoint.slot import SLOTS, Slot, SlotBlock, SlotIndex
from megascale_jax.checkpoint.stage_two import Target
from megascale_jax.comm.storage import Storage
from megascale_jax.config.layout import Layout, round_up
from megascale_jax.config.schema import ModelConfig, ParallelConfig
from megascale_jax.errors import CheckpointError, DamagedCheckpointError
from megascale_jax.model.parameters import parameter_specs

RANKS = 4
KEEP = 3
LIMIT_S = 30.0
"""Longest that anything may take; what takes longer is counted as hung."""
MODEL = ModelConfig(
    num_layers=4, hidden_size=66, num_heads=4, mlp_size=96, vocab_size=211, sequence_length=16, attention_bias=True, head_size=16
)
GRID = StateGrid(parameter_specs(MODEL), Layout.of(MODEL, ParallelConfig(data=RANKS, virtual_stages=2)), MODEL.num_layers)


def state(step: int) -> dict[str, np.ndarray]:
    """The logical state of a step."""
    made = {}
    for number, (name, array) in enumerate(GRID.stored.items()):
        bits = np.random.default_rng([step, number]).integers(0, 1 << 30, array.shape, dtype=np.uint32)
        made[name] = bits.view(array.dtype) if array.shape else np.asarray(bits).astype(array.dtype)
    return made


class Rank:
    """One rank of a run and its host's keeper."""

    def __init__(self, number: int, folder: Path, identity: str):
        self.number, self._folder = number, keeper_folder(identity, {"MEGASCALE_KEEPER": str(folder / f"host-{number}")})
        self._layout = list(_slot_layout(number))
        last = self._layout[-1]
        self.num_bytes = round_up(last.offset + last.num_bytes, 64)
        self.slots = [Slot(self.num_bytes) for _ in range(SLOTS)]
        self._next, self._last = 0, None
        self.client = self._meet()

    def _meet(self) -> KeeperClient:
        client = KeeperClient(self._folder, self.number)
        for number, slot in enumerate(self.slots):
            client.give_slot(number, slot)
        return client

    def save(self, step: int, launch: str, target: Target) -> None:
        """Stage 1: fill the older slot and hand it over."""
        number, values = self._next, state(step)
        identity = self.slots[number].identity
        self.client.ask("acquire", slot=number, identity=identity, limit_s=LIMIT_S)
        for block in self._layout:
            array = GRID.stored[block.array]
            whole = np.zeros(array.chunk, array.dtype)
            region = chunk_region(array, block.index)
            part = values[block.array][tuple(map(slice, region.start, region.stop))]
            whole[tuple(map(slice, part.shape))] = part
            self.slots[number].block(block)[:] = whole.reshape(-1).view(np.uint8)
        index = SlotIndex(step, launch, self.number, GRID.stored, self._layout, "drill", {"step": step})
        self._last = {"slot": number, "identity": identity, "index": index.to_json(), "target": asdict(target)}
        self._next = (number + 1) % SLOTS
        self.client.ask("filled", **self._last)

    def kill_keeper(self) -> None:
        """As a crash or the kernel would."""
        os.kill(self.client.pid, signal.SIGKILL)

    def recover(self, *, memory_is_lost: bool = False) -> None:
        """Another keeper; what the old one had in hand goes on, unless the host went with its memory."""
        self.client.close()
        if memory_is_lost:
            self._last = None
            for slot in self.slots:
                slot.data[:] = 0
        self.client = self._meet()
        if self._last is not None:
            self.client.ask("filled", **self._last)

    def finish(self) -> list[dict]:
        """Until the keeper has nothing left to do; failures it tells of. Raises TimeoutError at the limit."""
        status = self.client.ask("wait", limit_s=LIMIT_S)
        if status["working"]:
            raise TimeoutError(f"stage 2 did not end within {LIMIT_S:.0f} s: {status['working']}")
        return status["failures"]

    def close(self) -> None:
        """Let the keeper go."""
        with suppress(OSError):
            self.client.ask("release")
        self.client.close()


def _slot_layout(rank: int) -> Iterator[SlotBlock]:
    offset = 0
    for name in GRID.stored:
        for block in GRID.blocks(name, rank):
            yield SlotBlock(name, block.index, offset, block.num_bytes, block.is_owned)
            offset = round_up(offset + block.num_bytes, 64)


class Cluster:
    """The ranks of one run and its storage."""

    def __init__(self, folder: Path, identity: str):
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.target = Target(str(self.checkpoints), RANKS, "none", Retention(KEEP), publish_limit_s=LIMIT_S / 2)
        self.ranks = [Rank(number, folder, identity) for number in range(RANKS)]
        self.launch, self._launches = "launch-0", 0
        self.failures: list[str] = []

    def save(self, step: int) -> None:
        """Stage 1 on all ranks."""
        for rank in self.ranks:
            rank.save(step, self.launch, self.target)

    def start_again(self) -> None:
        """As after a crash of the trainers: another launch, the same hosts."""
        self._launches += 1
        self.launch = f"launch-{self._launches}"

    def impatient(self) -> None:
        """Do not wait long for parts of which we know that they will not come."""
        self.target = replace(self.target, publish_limit_s=1.0)

    def patient(self) -> None:
        """The inverse."""
        self.target = replace(self.target, publish_limit_s=LIMIT_S / 2)

    def finish(self) -> None:
        """Until all keepers are done; what failed is added to `failures`."""
        self.failures += [f"{failure['what']}: {failure['error'][:300]}" for rank in self.ranks for failure in rank.finish()]

    def newest(self) -> int | None:
        """Step of the newest checkpoint that can be read whole, found as a run finds it; its bits are compared."""
        storage = Storage(self.checkpoints)
        for step in reversed(published_steps(storage)):
            try:
                check(storage, step)
                return step
            except DamagedCheckpointError as error:
                mark_damaged(storage, step, str(error))
        return None

    def close(self) -> None:
        """End all keepers."""
        for rank in self.ranks:
            rank.close()


def check(storage: Storage, step: int) -> None:
    """Read a checkpoint whole and compare it. Raises CheckpointError for damage, AssertionError for other bits: that must never be."""
    manifest = read_manifest(storage, step)
    reader, expected = BlockReader(storage, manifest), state(step)
    for name, array in manifest.arrays.items():
        for index in array.indices():
            region = chunk_region(array, index)
            wanted = expected[name][tuple(map(slice, region.start, region.stop))]
            assert reader.read(name, index).tobytes() == wanted.tobytes(), f"step {step}: other bits in {name} {index}"


def is_good(storage: Storage, step: int) -> bool:
    """Whether a checkpoint can be read whole."""
    try:
        check(storage, step)
    except CheckpointError:
        return False
    return True


def pause(seconds: float) -> None:
    """Let the others get somewhere."""
    time.sleep(seconds)

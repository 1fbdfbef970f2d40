"""Stage 2: from a slot in memory to a published checkpoint, behind the back of the training. No JAX.

Every rank's keeper writes the rank's part and reports it on the storage itself, so agreement needs no connection between hosts
and no living trainer. The keeper of rank 0 waits for all reports, joins the parts, and publishes by one small key. Until
then the checkpoint does not exist; whatever dies before leaves the older ones as they are. A part that cannot be written is
reported too, so that nobody waits for it.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megascale_jax.checkpoint.arrays import merge, rank_folder, write_blocks
from megascale_jax.checkpoint.cipher import Cipher
from megascale_jax.checkpoint.manifest import DAMAGED, DELETIONS, MANIFEST, Manifest, Part, read_manifest
from megascale_jax.checkpoint.retention import Deletion, Retention, apply, delete, record
from megascale_jax.checkpoint.slot import Slot, SlotIndex, owned_blocks
from megascale_jax.checkpoint.upload import waiting
from megascale_jax.comm.storage import Storage
from megascale_jax.errors import CheckpointError


@dataclass(frozen=True)
class Target:
    """Where checkpoints go, and how."""

    url: str
    ranks: int
    compression: str
    retention: Retention
    publish_limit_s: float
    run: str = ""
    key_file: str | None = None
    upload: str | None = None
    events: str | None = None
    """Folder of the run's events, if the keeper is to write its own there."""

    def storage(self) -> Storage:
        """The storage that this names."""
        return Storage(self.url, self.key_file)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Target":
        """The inverse of `dataclasses.asdict`."""
        fields: dict[str, Any] = {**document, "retention": Retention(**document["retention"])}
        return cls(**fields)


def write_part(storage: Storage, target: Target, slot: Slot, index: SlotIndex) -> Part:
    """Write what a rank owns of a step, then its report; a part that a keeper which died had finished stays as it is.

    Raises OSError, with nothing left of the part: the caller is to `tell_failure`.
    """
    data = f"{index.step}/{index.launch}"
    folder = rank_folder(data, index.rank)
    if (part := _finished(storage, index)) is not None:
        return part
    try:
        storage.delete_folder(folder)  # of a keeper that died in the middle
        number, size = write_blocks(storage, folder, index.arrays, owned_blocks(slot, index), target.compression)
        part = Part(index.rank, number, size)
        storage.write(_report(data, index.rank), part.to_bytes())
        return part
    except Exception:  # on a full disk what there is of it would be in the way, also of the word that it failed
        with suppress(OSError):
            storage.delete_folder(folder)
        raise


def tell_failure(storage: Storage, index: SlotIndex, error: str) -> bool:
    """Report to rank 0 that a part will not come; whether that could be done, else try again: rank 0 waits for it."""
    try:
        storage.write(_report(f"{index.step}/{index.launch}", index.rank), Part(index.rank, error=error).to_bytes())
    except OSError:
        return False
    return True


def _finished(storage: Storage, index: SlotIndex) -> Part | None:
    """The rank's report of an earlier try, or one made up where the step is published already; it must not be written again then."""
    content = storage.read(_report(f"{index.step}/{index.launch}", index.rank))
    part = Part.from_bytes(content) if content is not None else None
    if part is not None and part.error is None:
        return part
    # the reports go after publication, so one that is missing says nothing before this is looked at
    return Part(index.rank) if _published(storage, index) is not None else None


def is_published(storage: Storage, index: SlotIndex) -> bool:
    """Whether this very step and launch is published, or may be: a storage that cannot be asked does not say no."""
    try:
        return _published(storage, index) is not None
    except OSError:
        return True


def _published(storage: Storage, index: SlotIndex) -> Manifest | None:
    """The manifest of this very step and launch, if it is there."""
    try:
        manifest = read_manifest(storage, index.step)
    except CheckpointError:
        return None
    return manifest if manifest.launch == index.launch else None


class Publication:
    """A step on its way to being published: the reports that are there, and those that are missing."""

    def __init__(self, target: Target, index: SlotIndex):
        self.target, self.index = target, index
        self._parts: dict[int, Part] = {}
        self._looked = False

    @cached_property
    def _storage(self) -> Storage:
        return self.target.storage()

    def attempt(self, given_up: str | None = None) -> Manifest | None:
        """Join the parts and publish, if all are there; ``None``: not yet.

        ``given_up``: why no longer is waited for what is missing now. Raises OSError then, and when a part could not be written.
        """
        if not self._looked and (manifest := _published(self._storage, self.index)) is not None:
            return manifest
        self._looked = True
        self._collect()
        missing = [rank for rank in range(self.target.ranks) if rank not in self._parts]
        if not missing:
            return self._publish()
        if given_up is not None:
            raise OSError(f"no report of rank {missing[:5]} ({len(missing)} of {self.target.ranks}) {given_up}")
        return None

    @property
    def _data(self) -> str:
        return f"{self.index.step}/{self.index.launch}"

    def _collect(self) -> None:
        for key in self._storage.names(f"{self._data}.parts/"):
            rank = int(key.rpartition("/")[2].partition(".")[0])
            if rank not in self._parts and (content := self._storage.read(key)) is not None:
                self._parts[rank] = Part.from_bytes(content)
        failed = [part for part in self._parts.values() if part.error is not None]
        if failed:
            raise OSError(f"rank {failed[0].rank}: {failed[0].error}")

    def _publish(self) -> Manifest:
        storage, target, index = self._storage, self.target, self.index
        merge(storage, self._data, index.arrays, target.ranks, target.compression)
        storage.sync(self._data)
        manifest = Manifest(
            step=index.step,
            launch=index.launch,
            arrays=index.arrays,
            ranks=target.ranks,
            num_bytes=sum(part.num_bytes for part in self._parts.values()),
            compression=target.compression,
            created_unix_s=time.time(),
            description=index.description,
            run=target.run,
            key_id=Cipher(target.key_file).key_id if target.key_file else "",
        )
        if storage.has(f"{index.step}/{DAMAGED}"):  # an earlier launch's, which this one replaces: first what is damaged, then its mark
            storage.delete(f"{index.step}/{MANIFEST}")
            storage.delete(f"{index.step}/{DAMAGED}")
        storage.write(f"{index.step}/{MANIFEST}", manifest.to_bytes())
        storage.sync(str(index.step))
        return manifest


def discard(storage: Storage, step: int, launch: str, reason: str) -> None:
    """Remove what a launch has written of a step that will not be published: on a full disk it would be in the way. Never raises."""
    data = f"{step}/{launch}"
    with suppress(OSError):
        if not _has_written(storage, str(step), launch):
            return
    for folder in (data, f"{data}.parts"):
        with suppress(OSError):
            storage.delete_folder(folder)
    storage.prune(str(step))
    with suppress(OSError):
        storage.append(DELETIONS, record(Deletion(data, f"not published: {reason}"), by="publication"))


def _has_written(storage: Storage, folder: str, launch: str) -> bool:
    return any(storage.names(f"{folder}/{name}/") for name in (launch, f"{launch}.parts"))


def tidy(storage: Storage, target: Target, manifest: Manifest) -> None:
    """Once published: remove the reports, what earlier starts left of the same step, and what retention lets go. Raises OSError.

    Hosts write in order, so older steps of this launch that are not published will not be: parts that came late are removed.
    Comes late after an upload: a later start may have published the same step meanwhile, and then its data is not ours to remove.
    """
    storage.delete_folder(f"{manifest.data}.parts")
    if read_manifest(storage, manifest.step).launch != manifest.launch:
        return
    for folder in storage.folders():
        if folder.isdecimal() and int(folder) < manifest.step and not storage.has(f"{folder}/{MANIFEST}"):
            discard(storage, int(folder), manifest.launch, f"step {manifest.step} was published meanwhile")
    inside = {key.split("/")[1] for key in storage.names(f"{manifest.step}/") if key.count("/") > 1}
    for name in inside - {manifest.launch}:
        delete(storage, Deletion(f"{manifest.step}/{name}", "left by an earlier start of the run"), by=f"publication of {manifest.data}")
    bound = {manifest.step, *(waiting(storage) if target.upload is not None else ())}
    apply(storage, target.retention, f"retention at step {manifest.step}", launch=manifest.launch, run=target.run, bound=bound)


def _report(data: str, rank: int) -> str:
    return f"{data}.parts/{rank}.json"

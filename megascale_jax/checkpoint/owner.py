"""Whose checkpoints a place holds: one key at its root, written by the run that uses it first. No JAX.

    run.json    run: identity (`.identity` of its folder), run_folder: where it was started, created_unix_s

Two runs on one place would remove and replace each other's checkpoints. A lock tells of a run that is alive, on a file system;
object stores have none, so the record is what tells, and it stays when the run is over.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from megascale_jax.comm.storage import Storage
from megascale_jax.errors import CheckpointError

OWNER = "run.json"


@dataclass(frozen=True)
class Owner:
    """A run, as the places of its checkpoints know it."""

    run: str
    run_folder: str
    created_unix_s: float


def read_owner(storage: Storage) -> Owner | None:
    """Whose place this is; ``None``: nobody's. Raises CheckpointError for a damaged record, OSError when it cannot be read."""
    return _parse(storage, storage.read(OWNER))


def claim(storage: Storage, owner: Owner, refuse: Callable[[Owner | None], None]) -> None:
    """Make a place the owner's. ``refuse`` looks at whose it is and raises where it may not be taken.

    Raises StorageError also when another process writes the record at the same time.
    """

    def change(content: bytes | None) -> bytes | None:
        before = _parse(storage, content)
        refuse(before)
        is_same = before is not None and (before.run, before.run_folder) == (owner.run, owner.run_folder)
        return None if is_same else json.dumps(asdict(owner)).encode()

    storage.change(OWNER, change)
    refuse(read_owner(storage))  # a storage that ignores conditions let the last one win


def _parse(storage: Storage, content: bytes | None) -> Owner | None:
    try:
        return Owner(**json.loads(content)) if content is not None else None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{storage.url}/{OWNER}, which says whose checkpoints these are, is damaged: {error}; remove it") from error

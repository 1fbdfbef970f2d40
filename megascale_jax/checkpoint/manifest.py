"""What a complete checkpoint is, and which of them there are. No JAX.

    STEP/manifest.json            written last: with it the checkpoint is published, without it there is none
    STEP/LAUNCH/                  the arrays, an OCDBT database of zarr3 arrays
    STEP/LAUNCH/ocdbt.process_N/  what rank N wrote into it
    STEP/LAUNCH.parts/            ranks' reports until then
    STEP/uploaded.json            a copy is where `upload.py` put it, verified
    STEP/damaged.json             a reader found a wrong checksum; kept for a look, never used again
    deletions.jsonl               what was removed, when, and why
    run.json                      which run these are of (`owner.py`)

``LAUNCH`` names one start of a run, so what a killed start left half written is never mixed with what the next one writes.
A manifest carries a checksum of itself; the arrays carry one for every block and every node of the database. Which
checkpoints there are is found by scanning, no pointer is trusted.
"""

import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megascale_jax.checkpoint.stored import StoredArray
from megascale_jax.comm.storage import Storage, StorageError
from megascale_jax.errors import CheckpointError, DamagedCheckpointError

CHECKPOINTS = "checkpoints"
"""Where they lie in a run's folder, unless the run names another place."""
FORMAT = 1
"""Version of the format. A reader knows this one and all before it."""
MANIFEST, DAMAGED, UPLOADED, DELETIONS = "manifest.json", "damaged.json", "uploaded.json", "deletions.jsonl"


@dataclass(frozen=True)
class Manifest:
    """One published checkpoint. ``description`` is the run's: config, position in the data, tokenizer, software."""

    step: int
    launch: str
    arrays: Mapping[str, StoredArray]
    ranks: int
    num_bytes: int
    """Of all blocks, each once."""
    compression: str
    created_unix_s: float
    description: Mapping[str, Any]
    run: str = ""
    """Identity of the run that wrote it; empty: of any."""
    key_id: str = ""
    """Fingerprint of the key that the arrays are sealed with; empty: they are not."""
    format: int = FORMAT

    @property
    def data(self) -> str:
        """Folder of the arrays below the storage's root."""
        return f"{self.step}/{self.launch}"

    def is_of(self, run: str | None) -> bool:
        """Whether a run may go on from it; ``None``: any run."""
        return not run or not self.run or self.run == run

    def to_bytes(self) -> bytes:
        """The file's content."""
        document = asdict(self)
        document["arrays"] = {name: {"shape": a.shape, "chunk": a.chunk, "dtype": a.dtype} for name, a in self.arrays.items()}
        text = json.dumps(document, separators=(",", ":"))
        return json.dumps({"crc32": zlib.crc32(text.encode()), "manifest": text}).encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> "Manifest":
        """The inverse of `to_bytes`. Raises DamagedCheckpointError, or CheckpointError for a format newer than this release."""
        try:
            outer = json.loads(content)
            text = outer["manifest"]
            if zlib.crc32(text.encode()) != outer["crc32"]:
                raise ValueError("wrong checksum")
            document = json.loads(text)
            if document["format"] > FORMAT:
                raise CheckpointError(
                    f"{where} has format {document['format']}, this release reads up to {FORMAT}; use the release that wrote it"
                )
            document["arrays"] = {
                name: StoredArray(name, tuple(a["shape"]), tuple(a["chunk"]), a["dtype"]) for name, a in document["arrays"].items()
            }
            return cls(**document)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"{where} is damaged: {error}") from error


@dataclass(frozen=True)
class Part:
    """One rank's report: its blocks are written, or why they are not."""

    rank: int
    num_blocks: int = 0
    num_bytes: int = 0
    error: str | None = None

    def to_bytes(self) -> bytes:
        """The file's content."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Part":
        """The inverse of `to_bytes`. Raises ValueError."""
        return cls(**json.loads(content))


@dataclass(frozen=True)
class Found:
    """A published checkpoint as a scan meets it: its manifest, or what is wrong with it."""

    step: int
    manifest: Manifest | None
    problem: str | None = field(default=None)


def published_steps(folder: Path | Storage) -> list[int]:
    """Steps of the published checkpoints that nobody found damaged, ascending; their content is not looked at."""
    storage = folder if isinstance(folder, Storage) else Storage(folder)
    steps = [name for name in storage.folders() if name.isdecimal()]
    return sorted(int(step) for step in steps if storage.has(f"{step}/{MANIFEST}") and not storage.has(f"{step}/{DAMAGED}"))


def read_manifest(storage: Storage, step: int) -> Manifest:
    """The manifest of one checkpoint. Raises CheckpointError when it is missing or damaged, OSError when it cannot be read."""
    where = f"checkpoint {storage.url}/{step}"
    content = storage.read(f"{step}/{MANIFEST}")
    if content is None:
        raise CheckpointError(f"{where} is not complete: it has no {MANIFEST}; choose another of {published_steps(storage)}")
    manifest = Manifest.from_bytes(content, f"{where}/{MANIFEST}")
    if manifest.step != step:
        raise CheckpointError(f"{where}/{MANIFEST} is of step {manifest.step}: the folder was renamed; give it its own name back")
    return manifest


def scan(storage: Storage) -> list[Found]:
    """Every published checkpoint, ascending, with its manifest or its problem."""
    found = []
    for step in published_steps(storage):
        try:
            found.append(Found(step, read_manifest(storage, step)))
        except (CheckpointError, StorageError) as error:
            found.append(Found(step, None, str(error)))
    return found


def newest_good(storage: Storage, run: str | None = None) -> Manifest | None:
    """The newest checkpoint whose manifest can be read, of one run if it is given; its arrays are not looked at."""
    good = [one.manifest for one in scan(storage) if one.manifest is not None and one.manifest.is_of(run)]
    return good[-1] if good else None


def mark_damaged(storage: Storage, step: int, reason: str) -> None:
    """Take a checkpoint out of the published ones, and keep it for a look."""
    document = {"reason": reason, "found_unix_s": time.time()}
    storage.write(f"{step}/{DAMAGED}", json.dumps(document).encode())

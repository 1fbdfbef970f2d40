"""A further copy of each published checkpoint where TensorStore cannot write: HDFS and whatever else fsspec knows.

The keeper of rank 0 uploads behind the publications, file by file, the manifest last, so the copy is published as the original
was. Every file is read back and compared before the checkpoint counts as uploaded; until then retention leaves the local one
alone. An upload that fails is said and tried again after the next publication.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import xxhash

from megascale_jax.checkpoint.manifest import MANIFEST, UPLOADED, read_manifest, scan
from megascale_jax.comm.storage import Storage

_PIECE = 8 << 20


def waiting(storage: Storage) -> list[int]:
    """Steps of a local folder that have been published and not uploaded, ascending."""
    found = {one.step: one.manifest for one in scan(storage) if one.manifest is not None}
    return [step for step, manifest in found.items() if _uploaded_launch(storage, step) != manifest.launch]


def _uploaded_launch(storage: Storage, step: int) -> str | None:
    """Which start's checkpoint of this step was uploaded: an earlier one's says nothing about what replaced it."""
    content = storage.read(f"{step}/{UPLOADED}")
    try:
        return str(json.loads(content)["launch"]) if content is not None else None
    except (ValueError, KeyError, TypeError):  # damaged: uploading again is safe
        return None


def upload(storage: Storage, step: int, url: str) -> int:
    """Copy a published step of a local folder to ``url``/step and mark it; bytes copied.

    Raises OSError when it cannot be written, or when a byte is not the same there.
    """
    assert storage.folder is not None, "only a folder of this machine is uploaded"
    root, total, launch = f"{url.rstrip('/')}/{step}", 0, read_manifest(storage, step).launch
    try:
        files, target = fsspec.core.url_to_fs(root)
        for file in _in_order(storage.folder / str(step)):
            there = f"{target}/{file.relative_to(storage.folder / str(step)).as_posix()}"
            files.makedirs(there.rpartition("/")[0], exist_ok=True)
            with file.open("rb") as source, files.open(there, "wb") as copy:
                digest = xxhash.xxh3_64()
                while piece := source.read(_PIECE):
                    digest.update(piece)
                    copy.write(piece)
                    total += len(piece)
            if _digest(files, there) != digest.intdigest():
                raise OSError(f"{there} is not what was written")
    except OSError:
        raise
    except Exception as error:  # file systems of fsspec raise what their libraries raise
        raise OSError(f"{root}: {type(error).__name__}: {error}") from error
    document = {"url": root, "launch": launch, "num_bytes": total, "at_unix_s": time.time()}
    storage.write(f"{step}/{UPLOADED}", json.dumps(document).encode())
    return total


def upload_waiting(storage: Storage, url: str) -> None:
    """Upload every step that waits for it; one that fails does not hold up the next. Raises the last OSError."""
    problem: OSError | None = None
    for step in waiting(storage):
        try:
            upload(storage, step, url)
        except OSError as error:
            problem = error
    if problem is not None:
        raise problem


def _in_order(folder: Path) -> Iterator[Path]:
    """All files of a checkpoint, its manifest last."""
    yield from sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    yield folder / MANIFEST


def _digest(files: fsspec.AbstractFileSystem, path: str) -> int:
    digest = xxhash.xxh3_64()
    with files.open(path, "rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(memoryview(piece))  # pyright: ignore[reportArgumentType]
    return digest.intdigest()

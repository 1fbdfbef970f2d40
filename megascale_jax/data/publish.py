"""Where prepared data goes: a folder that gets its name by one rename, or an object store, where the manifest is written last.

An existing output is left alone unless it was made from an equal request (then there is nothing to do) or may be replaced. In an object
store new rows and their tokenizer lie beside the old ones until the new manifest takes the place of the old one, in one step; whoever still
reads the old rows then finds them missing, never others in their place. What a killed upload left behind has no manifest, and is
written over.
"""

import secrets
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from megascale_jax.comm.address import READ_ONLY, is_remote
from megascale_jax.data.files import Folder, open_storage
from megascale_jax.data.manifest import MANIFEST_FILE, SPLITS, Manifest, Request, read_manifest
from megascale_jax.data.prepared import stored_rows
from megascale_jax.errors import DataError, StorageError

_FILES_AT_ONCE = 4
"""Files that are in memory to be uploaded, at most."""

_UPLOAD_LIMIT_S = 900.0
"""Longest wait for one of them: a megabyte a second suffices."""


class Output(Protocol):
    """A place for prepared data."""

    def existing(self, request: Request, force: bool) -> Manifest | None:
        """The finished manifest of an equal request, or None when the place may be written. Raises ``DataError`` otherwise."""
        ...

    def staging(self) -> AbstractContextManager[Path]:
        """A context manager: a new local folder to fill; it is gone afterwards."""
        ...

    def publish(self, staging: Path, manifest: Manifest, force: bool) -> Manifest:
        """Make the filled folder the output; the manifest that is there then, another process's if it was faster with an equal one."""
        ...


def open_output(folder: Folder) -> Output:
    """The place that ``folder`` names. Raises ``DataError`` for an address that cannot be written."""
    if not is_remote(folder):
        return LocalOutput(Path(folder).expanduser().absolute())
    if str(folder).startswith(READ_ONLY):
        raise DataError(f"{folder} can be read only. Give a folder, s3://BUCKET/PATH or gs://BUCKET/PATH.")
    return RemoteOutput(str(folder))


class LocalOutput:
    """A folder on a disk."""

    def __init__(self, folder: Path):
        self._folder = folder

    def existing(self, request: Request, force: bool) -> Manifest | None:
        """See `Output`."""
        if not self._folder.exists() or (self._folder.is_dir() and not any(self._folder.iterdir())):
            return None
        if not (self._folder / MANIFEST_FILE).is_file():
            raise DataError(f"{self._folder} exists and is no prepared data, so it is not overwritten. Give a new folder.")
        return _usable(self._folder, request, force)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A new hidden folder on the output's file system; nothing else is created before the corpus has proved good."""
        staging = self._hidden_name(next(folder for folder in self._folder.parents if folder.exists()), "partial")
        staging.mkdir()
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def publish(self, staging: Path, manifest: Manifest, force: bool) -> Manifest:
        """See `Output`."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        replaced = self._hidden_name(self._folder.parent, "replaced")
        if force and (self._folder / MANIFEST_FILE).is_file():
            self._folder.rename(replaced)
        try:
            staging.rename(self._folder)
        except OSError:
            if replaced.exists():
                replaced.rename(self._folder)
            finished = self.existing(manifest.request, force=False)
            if finished is None:
                raise
            return finished
        shutil.rmtree(replaced, ignore_errors=True)
        return manifest

    def _hidden_name(self, parent: Path, purpose: str) -> Path:
        return parent / f".{self._folder.name}.{purpose}-{secrets.token_hex(4)}"


class RemoteOutput:
    """A folder in an object store."""

    def __init__(self, url: str):
        self._url = url
        self._storage = open_storage(url, _UPLOAD_LIMIT_S)

    def existing(self, request: Request, force: bool) -> Manifest | None:
        """See `Output`."""
        try:
            names = self._storage.names()
        except StorageError as error:
            raise self._error("listed", error) from error
        if MANIFEST_FILE in names:
            return _usable(self._url, request, force)
        if strange := [name for name in names if not name.startswith("rows-")]:
            raise DataError(
                f"{self._url} holds {strange[0]} and is no prepared data, so it is not overwritten. Give a new folder; its name is "
                "what follows the bucket."
            )
        return None

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A folder for temporary files (``TMPDIR``), which must hold the tokens twice."""
        with tempfile.TemporaryDirectory(prefix="megascale-prepare-") as name:
            yield Path(name)

    def publish(self, staging: Path, manifest: Manifest, force: bool) -> Manifest:
        """See `Output`. Uploads everything, the manifest last; then remove the rows that a replaced manifest named."""
        from megascale_jax.comm.storage import wait

        replaced = self._replaced_rows()
        files = sorted(path for path in staging.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
        try:
            under_way: deque[Any] = deque()
            for path in [*files, None]:
                while len(under_way) >= (_FILES_AT_ONCE if path is not None else 1):
                    wait(under_way.popleft(), self._storage.limit_s)
                if path is not None:
                    under_way.append(self._storage.begin_write(path.relative_to(staging).as_posix(), path.read_bytes()))
            self._storage.write(MANIFEST_FILE, (staging / MANIFEST_FILE).read_bytes())
            if replaced is not None and replaced != manifest.rows_folder:
                self._storage.delete_folder(replaced)
        except StorageError as error:
            raise self._error("written", error) from error
        return manifest

    def _replaced_rows(self) -> str | None:
        """Folder of the rows that the manifest names which is there now."""
        try:
            return read_manifest(self._url).rows_folder
        except DataError:
            return None

    def _error(self, done: str, error: StorageError) -> DataError:
        return DataError(f"{self._url} cannot be {done} ({error}). Look at the address, the network and your credentials.")


def _usable(folder: Folder, request: Request, force: bool) -> Manifest | None:
    """The manifest of an existing folder if it answers ``request``; None if it may be replaced. Raises ``DataError`` otherwise."""
    try:
        manifest = read_manifest(folder)
    except DataError:
        if force:
            return None
        raise
    if manifest.request != request:
        if force:
            return None
        made, asked = manifest.request.model_dump(), request.model_dump()
        different = ", ".join(f"{key} {made[key]} (now {asked[key]})" for key in asked if made[key] != asked[key])
        raise DataError(f"{folder} was prepared from another request: {different}. Give a new folder, or replace it with --force.")
    try:
        for split in SPLITS:
            stored_rows(folder, manifest, split)
    except DataError:
        if force:
            return None
        raise
    return manifest

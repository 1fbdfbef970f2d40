"""Where checkpoints and training data lie: a local folder, ``gs://`` or ``s3://``, through TensorStore's key-value stores.

Keys are paths below the storage's root. A key is written whole or not at all, on every kind of storage; nothing here renames
folders, so a checkpoint, or prepared data, is published by one small key that is written last. Every wait has a limit. What fails raises
OSError (`StorageError` for what TensorStore says), so a full disk and a lost network look alike to callers.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tensorstore as ts

from megascale_jax.comm.address import is_remote
from megascale_jax.errors import StorageError

WAIT_S = 600
"""Longest wait for one operation; a store that is silent for so long has failed."""
S3_ENDPOINT = "AWS_ENDPOINT_URL"
"""Environment variable with the address of an S3 that is not Amazon's."""


class Storage:
    """Keys below one root."""

    def __init__(self, url: str | Path, key_file: str | None = None, context: Mapping[str, Any] | None = None, limit_s: float = WAIT_S):
        """``url``: a local path, or ``gs://bucket/path``, ``s3://bucket/path``; ``http(s)://`` for reading only.

        Credentials are found as Google's and Amazon's own tools find them. ``key_file``: what seals the arrays; see `cipher.py` of
        checkpoints. ``context``: TensorStore's settings, such as retries and requests at once. ``limit_s``: longest wait for one operation.
        """
        self.key_file = key_file
        self.url = str(url)
        self.folder = None if is_remote(self.url) else Path(self.url).absolute()
        self.limit_s = limit_s
        self._context = ts.Context(dict(context or {}))
        try:
            self._base = ts.KvStore.Spec(_spec(self.url, self.folder))
        except ValueError as error:
            raise StorageError(first_line(error)) from error
        self._store = self._wait(ts.KvStore.open(self._base, context=self._context))

    def read(self, key: str) -> bytes | None:
        """A key's value, ``None`` when it is not there."""
        result = self._wait(self._store.read(key))
        return None if result.state == "missing" else result.value

    def begin_read(self, key: str, begin: int, end: int) -> Any:
        """A future (for `wait`) of bytes ``begin`` to ``end`` of a key's value; its result's ``state`` is ``missing`` without the key."""
        return self._store.read(key, byte_range=slice(begin, end))

    def begin_write(self, key: str, value: bytes) -> Any:
        """`write` as a future for `wait`."""
        return self._store.write(key, value)

    def has(self, key: str) -> bool:
        """Whether there is such a key."""
        if self.folder is not None:
            return (self.folder / key).is_file()
        return self.read(key) is not None

    def write(self, key: str, value: bytes) -> None:
        """Make ``value`` the key's value in one step; on the disk when this returns."""
        self._wait(self.begin_write(key, value))

    def change(self, key: str, by: Callable[[bytes | None], bytes | None]) -> None:
        """Make a key's value what ``by`` makes of it (``None``: not there, or as it is), if nobody else writes it meanwhile.

        Raises StorageError when somebody does, and whatever ``by`` raises.
        """
        found = self._wait(self._store.read(key))
        value = by(None if found.state == "missing" else found.value)
        if value is not None and not self._wait(self._store.write(key, value, if_equal=found.stamp.generation)).generation:
            raise StorageError(f"{self.url}/{key} was written by another process at the same time; try again")

    def append(self, key: str, line: str) -> None:
        """Add a line to a text that one process at a time writes."""
        if self.folder is None:
            self.write(key, (self.read(key) or b"") + line.encode() + b"\n")
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / key).open("a") as stream:
            stream.write(line + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def names(self, prefix: str = "") -> list[str]:
        """Keys that begin with ``prefix``, which is a folder's name with a slash, or nothing."""
        if self.folder is not None and not (self.folder / prefix).is_dir():
            return []
        upper = prefix[:-1] + "0" if prefix else ""  # "0" follows "/"
        return sorted(key.decode() for key in self._wait(self._store.list(ts.KvStore.KeyRange(prefix, upper))))

    def folders(self) -> list[str]:
        """Names of the folders right below the root."""
        if self.folder is None:
            return sorted({key.partition("/")[0] for key in self.names() if "/" in key})
        return sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir()) if self.folder.is_dir() else []

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        self._wait(self._store.write(key, None))

    def delete_folder(self, name: str) -> None:
        """Remove a folder and all below it, if it is there."""
        if self.folder is not None:
            if (self.folder / name).is_dir():
                shutil.rmtree(self.folder / name)
        else:
            self._wait(self._store.delete_range(ts.KvStore.KeyRange(f"{name}/", f"{name}0")))

    def prune(self, name: str) -> None:
        """Remove a folder if nothing is in it; object stores have no empty ones. Never raises."""
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / name).rmdir()

    def sync(self, prefix: str) -> None:
        """Have a local folder's names on the disk too: after a power loss a published checkpoint still is one."""
        if self.folder is None:
            return
        for path in (self.folder / prefix, *(self.folder / prefix).parents):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if path == self.folder:
                break

    def database(self, path: str, **options: Any) -> ts.KvStore:
        """The OCDBT database in a folder below the root, made when it is not there and written to."""
        base = self._base.to_json()
        base["path"] = f"{base.get('path', '')}{path}/"
        spec = {"driver": "ocdbt", "base": base, "assume_config": True, **options}
        return self._wait(ts.KvStore.open(spec, context=self._context))

    def _wait(self, future: Any) -> Any:
        return wait(future, self.limit_s)


def _spec(url: str, folder: Path | None) -> Any:
    if folder is not None:
        return {"driver": "file", "path": f"{folder}/"}
    base = f"{url.rstrip('/')}/"
    endpoint = os.environ.get(S3_ENDPOINT)
    if not (url.startswith("s3://") and endpoint):
        return base
    bucket, _, path = base.removeprefix("s3://").partition("/")
    return {"driver": "s3", "bucket": bucket, "path": path, "endpoint": endpoint, "aws_region": os.environ.get("AWS_REGION", "us-east-1")}


def wait(future: Any, limit_s: float = WAIT_S) -> Any:
    """The result of a TensorStore future. Raises StorageError, also when it takes longer than ``limit_s``."""
    try:
        return future.result(timeout=limit_s)
    except TimeoutError as error:
        raise StorageError(f"DEADLINE_EXCEEDED: no answer within {limit_s:.0f} s") from error
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise StorageError(first_line(error)) from error


def wait_all(futures: Iterable[Any]) -> None:
    """`wait` for each."""
    for future in list(futures):
        wait(future)


def first_line(error: BaseException) -> str:
    """What went wrong, without the library's dump of its own settings."""
    text = next(iter(str(error).strip().splitlines()), "").partition(" [tensorstore_spec")[0].partition(" [source locations")[0]
    return text or type(error).__name__

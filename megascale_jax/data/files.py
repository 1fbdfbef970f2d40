"""The files of a prepared folder, on a disk or in an object store, as bytes.

A folder is named by a path or by ``gs://bucket/path``, ``s3://bucket/path``; ``http(s)://`` for reading. Reading a range is begun
and waited for apart, so that many requests to an object store, each of which takes 30 to 100 ms, are under way at once. A store that does
not answer is asked again for about a quarter of a minute, one that is silent is given up after ``WAIT_S``. Whatever fails is a
``DataError`` with the file's name.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megascale_jax.comm.address import is_remote
from megascale_jax.errors import DataError, StorageError

if TYPE_CHECKING:
    from megascale_jax.comm.storage import Storage

Folder = str | Path
"""A path, or the address of a folder in an object store."""

Range = tuple[str, int, int]
"""A file's name, and the first byte and the one after the last."""

WAIT_S = 60.0
"""Longest wait for one answer of an object store."""

REQUESTS_AT_ONCE = 128
"""Requests to an object store that are under way at once, at most; at 50 ms each, 2,500 rows a second."""

CONTEXT: Mapping[str, Any] = {
    f"{kind}_{setting}": value
    for kind in ("s3", "gcs", "http")
    for setting, value in (
        ("request_retries", {"max_retries": 7, "initial_delay": "250ms", "max_delay": "4s"}),
        ("request_concurrency", {"limit": REQUESTS_AT_ONCE}),
    )
}
"""TensorStore's settings; its own retries go on for many minutes."""

_OPEN_FILES = 128


class Files(Protocol):
    """Files of one folder, by name (with ``/`` below it). Safe to use from several threads."""

    def exists(self) -> bool:
        """Whether there is such a folder, as far as that can be known without asking for a file."""
        ...

    def read(self, name: str) -> bytes | None:
        """A whole file; None when there is none. Raises ``DataError`` when it cannot be read."""
        ...

    def begin(self, ranges: Sequence[Range]) -> Callable[[], list[bytes]]:
        """Ask for parts of files, all at once; the call waits for them.

        The call raises ``DataError`` when a file is missing, too short, or cannot be read.
        """
        ...

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raise ``DataError`` unless there are files of these names, all in one folder, and, where that costs nothing, of these sizes."""
        ...

    def address(self, name: str) -> str:
        """Where a file lies, for messages."""
        ...


def open_files(folder: Folder) -> Files:
    """The files of ``folder``, which need not exist. Raises ``DataError`` for an address that means nothing."""
    return RemoteFiles(str(folder)) if is_remote(folder) else LocalFiles(Path(folder))


def full_name(folder: Folder) -> str:
    """The folder's name for another process."""
    return str(folder) if is_remote(folder) else str(Path(folder).absolute())


class LocalFiles:
    """Files on a disk. What is begun is read when it is waited for: a thread of its own would cost more than the read."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._opened = lru_cache(_OPEN_FILES)(lambda name: _OpenFile(folder / name))

    def exists(self) -> bool:
        """Whether there is such a folder."""
        return self._folder.is_dir()

    def read(self, name: str) -> bytes | None:
        """A whole file; None when there is none. Raises ``DataError`` when it cannot be read."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{self.address(name)} cannot be read ({error}). Look at the disk.") from error

    def begin(self, ranges: Sequence[Range]) -> Callable[[], list[bytes]]:
        """See `Files`."""
        return lambda: [self._read(name, begin, end) for name, begin, end in ranges]

    def _read(self, name: str, begin: int, end: int) -> bytes:
        try:
            content = self._opened(name).read(begin, end)
        except FileNotFoundError:
            raise missing(self.address(name)) from None
        except OSError as error:
            raise DataError(f"{self.address(name)} cannot be read ({error}). Look at the disk.") from error
        if len(content) != end - begin:
            raise _too_short(self.address(name), end)
        return content

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raise ``DataError`` unless there are files of these names and sizes."""
        for name, size in sizes.items():
            path = self._folder / name
            if not path.is_file():
                raise missing(str(path))
            if (found := path.stat().st_size) != size:
                raise DataError(f"{path} has {found:,} bytes, expected {size:,}: it is damaged. Prepare the data again with --force.")

    def address(self, name: str) -> str:
        """The path of a file."""
        return str(self._folder / name)


class _OpenFile:
    """A file descriptor that is closed with its last user: a thread may still read what the cache has let go of."""

    def __init__(self, path: Path):
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, begin: int, end: int) -> bytes:
        return os.pread(self._descriptor, end - begin, begin)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class RemoteFiles:
    """Files in an object store."""

    def __init__(self, url: str):
        self._url = url.rstrip("/")
        self.storage = open_storage(url)

    def exists(self) -> bool:
        """True: object stores have no folders."""
        return True

    def read(self, name: str) -> bytes | None:
        """A whole file; None when there is none. Raises ``DataError`` when it cannot be read."""
        try:
            return self.storage.read(name)
        except StorageError as error:
            raise cannot_be_read(self.address(name), error) from error

    def begin(self, ranges: Sequence[Range]) -> Callable[[], list[bytes]]:
        """See `Files`."""
        futures = [self.storage.begin_read(*one) for one in ranges]
        return lambda: [self._result(future, *one) for future, one in zip(futures, ranges, strict=True)]

    def _result(self, future: Any, name: str, begin: int, end: int) -> bytes:
        from megascale_jax.comm.storage import wait

        try:
            result = wait(future, self.storage.limit_s)
        except StorageError as error:
            raise cannot_be_read(self.address(name), error) from error
        if result.state == "missing":
            raise missing(self.address(name))
        if len(result.value) != end - begin:
            raise _too_short(self.address(name), end)
        return result.value

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raise ``DataError`` unless there are files of these names (in one folder); a store that may not be listed is believed."""
        if not sizes:
            return
        try:
            found = set(self.storage.names(next(iter(sizes)).rpartition("/")[0] + "/"))
        except StorageError:
            return
        for name in sizes:
            if name not in found:
                raise missing(self.address(name))

    def address(self, name: str) -> str:
        """The address of a file."""
        return f"{self._url}/{name}"


def open_storage(url: str, limit_s: float | None = None) -> "Storage":
    """An object store with the patience of this module; ``limit_s`` if one request needs longer.

    Raises ``DataError`` for an address that means nothing.
    """
    from megascale_jax.comm.storage import Storage

    try:
        return Storage(url, context=CONTEXT, limit_s=WAIT_S if limit_s is None else limit_s)
    except StorageError as error:
        raise DataError(f"{url} is no address of data ({error}). Expected s3://BUCKET/PATH or gs://BUCKET/PATH.") from error


def cannot_be_read(address: str, error: StorageError) -> DataError:
    """What to say of a store that refused or was not there."""
    return DataError(f"{address} cannot be read ({error}). Look at the address, the network and your credentials.")


def missing(address: str) -> DataError:
    """What to say of a file that the manifest promises."""
    return DataError(f"{address} is missing. Copy the folder again, or prepare the data again with --force.")


def _too_short(address: str, end: int) -> DataError:
    return DataError(f"{address} ends before byte {end:,}: it is damaged. Copy the folder again, or prepare it again with --force.")

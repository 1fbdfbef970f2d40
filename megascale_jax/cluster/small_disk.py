"""A disk of its own for what a drill fills: a tmpfs of a given size, where this user may mount one."""

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DETACH = 2
_NO_SPECIAL_FILES = 2 | 4
"""MS_NOSUID and MS_NODEV."""
_TRIES = 100


def mount_small_disk(folder: Path, num_bytes: int) -> bool:
    """Mount a tmpfs of that size on an empty folder; False where that is not allowed."""
    library = ctypes.CDLL(None, use_errno=True)
    return library.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", _NO_SPECIAL_FILES, f"size={num_bytes},mode=0700".encode()) == 0


def unmount(folder: Path) -> None:
    """The contrary of `mount_small_disk`; what still has files there keeps them."""
    ctypes.CDLL(None).umount2(os.fsencode(folder), _DETACH)


@contextmanager
def filled(folder: Path, room: int = 0) -> Iterator[None]:
    """The folder's disk has ``room`` bytes left in here. Raises OSError when it cannot be filled."""
    filler = folder / "filler.bin"
    with filler.open("wb") as stream:
        try:
            _use_up(stream.fileno(), folder, room)
            yield
        finally:
            filler.unlink()


def _use_up(descriptor: int, folder: Path, room: int) -> None:
    used = 0
    for _ in range(_TRIES):  # others write at the same time
        size = shutil.disk_usage(folder).free - room
        if size <= 0:
            return
        try:
            os.posix_fallocate(descriptor, used, size)
            used += size
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise

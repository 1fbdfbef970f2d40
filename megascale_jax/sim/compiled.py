"""Functions compiled by numba, their machine code kept for the next process.

Only modules with the inner loops of a simulation import this one, since numba takes a third of a second to import. The code lies in the
user's own cache folder, by a digest of the simulator's sources: numba itself looks at the file of a function alone, not at those it calls.
Its index is a pickle, so a folder that others may write to is not read: then everything is compiled anew.
"""

import hashlib
import os
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

import numba
from numba.core import config

from megascale_jax.comm.cache import cache_folder

_SOURCES = Path(__file__).parent / "congestion"


def compiled[F: Callable[..., object]](function: F) -> F:
    """The function as machine code, compiled at its first call in this cache's life; division by zero gives infinity, as in NumPy."""
    folder = _folder()
    if folder is not None:
        config.CACHE_DIR = str(folder)  # pyright: ignore[reportAttributeAccessIssue]
    return cast(F, numba.njit(cache=folder is not None, error_model="numpy", nogil=True)(function))


@cache
def _folder() -> Path | None:
    """Where machine code is kept; None where no folder is this user's alone."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(_SOURCES.glob("*.py")))).hexdigest()[:16]
    folder = cache_folder() / "numba" / digest
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
    except OSError:
        return None
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if is_ours else None

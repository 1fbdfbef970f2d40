"""The folders of a node's attempts, ``attempt-NUMBER``: a new one is empty, and only the newest stay.

A job that is begun anew counts from 1 again, so a number says nothing about age, and a folder of the same number may be there: it stays,
as ``attempt-NUMBER-EARLIER``, until it is old.
"""

import re
import shutil
from itertools import count
from pathlib import Path

_NAME = re.compile(r"attempt-\d+(-\d+)?")


def attempt_folder(node: Path, attempt: int) -> Path:
    """Where a node keeps logs and marks of an attempt."""
    return node / f"attempt-{attempt:04}"


def begin_folder(node: Path, attempt: int, kept: int) -> Path:
    """An empty folder for an attempt's logs and marks; of the earlier ones, those that changed last stay, ``kept`` with the new one.

    Raises OSError when it cannot be made; an old one that cannot be removed is left.
    """
    folder = attempt_folder(node, attempt)
    if folder.exists():
        folder.rename(next(aside for number in count(1) if not (aside := node / f"{folder.name}-{number}").exists()))
    folder.mkdir(parents=True)
    earlier = [(_changed_ns(path), path) for path in node.iterdir() if _NAME.fullmatch(path.name) and path != folder]
    for _, path in sorted(earlier, reverse=True)[max(0, kept - 1) :]:
        shutil.rmtree(path, ignore_errors=True)
    return folder


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0

"""Names of the files of a run's events, and which of them count. No JAX, and no pyarrow.

events/PROCESS.SEGMENT.arrows               a segment; PROCESS: ROLE-RANK-START-PID
events/PROCESS.SEGMENT.detail.parquet       its rows of devices, once nobody writes it any more
events/PROCESS.SEGMENT.parquet              its other rows; there only once both are whole, and the segment does not count from then on
events/steps.sums                           sums of all rows of devices that are Parquet (`sums_file.py`), which can be made again
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from megascale_jax.errors import RunFolderError
from megascale_jax.observe.events import EVENTS_FOLDER

OPEN_SUFFIX = ".arrows"
PARQUET, DETAIL = ".parquet", ".detail.parquet"
SUMS = ".sums"
_TRIES, _PAUSE_S = 3, 0.1


def events_folder(run: Path) -> Path:
    """The folder of a run's events. Raises RunFolderError when the run has none."""
    folder = run / EVENTS_FOLDER
    if not folder.is_dir():
        raise RunFolderError(
            f"{run} has no folder {EVENTS_FOLDER}; expected the folder of a run with train.events.enabled, such as runs/quickstart"
        )
    return folder


def settled[Read](read: Callable[[], Read]) -> Read:
    """What ``read`` makes of a run's files, again if one became Parquet, or retention took it, between two looks (FileNotFoundError)."""
    for _ in range(_TRIES - 1):
        with suppress(FileNotFoundError):
            return read()
        time.sleep(_PAUSE_S)
    return read()


def process_of(path: Path) -> str:
    """``trainer-00003-1796072103-77`` of any file of that process."""
    return path.name.partition(".")[0]


def segment_of(path: Path) -> str:
    """The same with the number of the segment: ``trainer-00003-1796072103-77.00000``."""
    return _segment(path.name)


def _segment(name: str) -> str:
    return ".".join(name.split(".", 2)[:2])


def found(run: Path) -> tuple[list[Path], list[Path]]:
    """Segments that count, and Parquet files that do, in a run's folder. A segment that has become Parquet does not, once that is whole."""
    folder = run / EVENTS_FOLDER
    path_of = {path.name: path for path in folder.iterdir()} if folder.is_dir() else {}
    segments, stored = counting(path_of)
    return [path_of[name] for name in segments], [path_of[name] for name in stored]


def counting(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The same of the names of all files of such a folder."""
    names = sorted(name for name in names if not name.startswith("."))
    stored = [name for name in names if name.endswith(PARQUET)]
    whole = {_segment(name) for name in stored if not name.endswith(DETAIL)}
    segments = [name for name in names if name.endswith(OPEN_SUFFIX) and _segment(name) not in whole]
    pending = {*map(_segment, segments)}
    return segments, [name for name in stored if _segment(name) not in pending]


def sizes(paths: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """Bytes of those files that are still there."""
    for path in paths:
        with suppress(OSError):
            yield path, path.stat().st_size

"""One run folder as the dashboard sees it: reads that are remembered while files stay as they are, and that never raise.

What is missing, damaged or not ready yet is a `Missing` with words for the reader. Reads happen in a few threads of their own. A request
waits for one at most ``patience_s``, and then gets what was known before, or is told to come again; so no page hangs behind a large
run. The newest `MOST_KEPT` results are kept. A result is read again only when its files have changed, and not before `REST` times what
the last reading took is over, so a run that writes all the time costs a tenth of a core.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from megascale_jax.cluster.asking import ask_driver
from megascale_jax.cluster.driver_process import DRIVER_FILE
from megascale_jax.cluster.job import job_folder
from megascale_jax.errors import MegascaleError, RunFolderError
from megascale_jax.observe.events import EVENTS_FOLDER
from megascale_jax.observe.metrics import METRICS_FILE
from megascale_jax.views.curve import CONFIG_FILE, RunRecord, read_run
from megascale_jax.views.progress import Progress, read_progress
from megascale_jax.views.why import Judgement, judge

MOST_KEPT = 24
REST, LEAST_REST_S = 10.0, 1.0
_READERS = 2
_STATUS_S, _JUDGED_S = 2.0, 5.0
"""After so many seconds the driver is asked again, and the age of events is looked at again."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Missing:
    """Something that cannot be shown, and why; false in conditions. ``is_pending``: it is being read, ask again."""

    why: str
    is_pending: bool = False

    def __bool__(self) -> Literal[False]:
        return False


_STOPPED = Missing("The dashboard is being stopped.")
Watch = Callable[[Path], Hashable]
"""What a result hangs on, of a run's folder: as long as it stays the same, so does the result."""


def files(*names: str) -> Watch:
    """A watch on files and on all files of folders, by size and time of change."""

    def state(run: Path) -> Hashable:
        return hash(tuple(_stated(run / name) for name in names))

    return state


def every(seconds: float, also: Watch | None = None) -> Watch:
    """A watch that changes as time goes by."""
    return lambda run: (int(time.monotonic() / seconds), None if also is None else also(run))


def _stated(path: Path) -> Hashable:
    try:
        if path.is_dir():
            return tuple(sorted((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in path.iterdir()))
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_size, found.st_mtime_ns


EVENTS, METRICS, CONFIG = files(EVENTS_FOLDER), files(METRICS_FILE), files(CONFIG_FILE)


@dataclass
class _Entry:
    """The result of a reading; ``known``: there was one. ``under_way``: a reading that is not over."""

    value: Any = None
    is_known: bool = False
    state: Hashable = None
    rest_until_s: float = 0.0
    under_way: Future[None] | None = None


class RunView:
    """A run's folder, to be asked by many threads."""

    def __init__(self, folder: Path, *, patience_s: float = 1.5):
        """``patience_s``: longest that one question waits; a report, which can wait, gives more."""
        self.folder, self.name = folder, folder.resolve().name
        self._patience_s = patience_s
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="run-view")

    def close(self) -> None:
        """Begin no further reading."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    def known[T](self, key: Hashable, make: Callable[[], T], watch: Watch, patience_s: float | None = None) -> T | Missing:
        """The result of ``make``, made now, before, or later (`Missing`). It may not ask for other results: readers are few.

        ``key``: names the result and all that it depends on but the files of ``watch``. Whatever ``make`` raises becomes a `Missing`.
        ``patience_s``: for a page that can do without; by default the view's.
        """
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            while len(self._entries) > MOST_KEPT:
                self._entries.popitem(last=False)
            is_idle = entry.under_way is None or entry.under_way.done()
            if is_idle and (not entry.is_known or time.monotonic() >= entry.rest_until_s):
                entry.under_way = self._submitted(entry, make, watch)
            reading = entry.under_way
        if reading is not None and not entry.is_known:
            try:
                reading.result(self._patience_s if patience_s is None else patience_s)
            except NotYet:
                return Missing("This is being read; it will appear here.", is_pending=True)
            except CancelledError:
                return _STOPPED
        return entry.value if entry.is_known else _STOPPED

    def _submitted[T](self, entry: _Entry, make: Callable[[], T], watch: Watch) -> Future[None] | None:
        try:
            return self._readers.submit(self._read, entry, make, watch)
        except RuntimeError:  # it is closed
            return None

    def _read[T](self, entry: _Entry, make: Callable[[], T], watch: Watch) -> None:
        began = time.monotonic()
        state = watch(self.folder)  # before reading: what changes meanwhile is read again
        if not entry.is_known or state != entry.state:
            entry.value, entry.state, entry.is_known = made(make), state, True
        ended = time.monotonic()
        entry.rest_until_s = ended + max(LEAST_REST_S, REST * (ended - began))

    @property
    def config(self) -> dict[str, Any] | Missing:
        """The resolved experiment as plain YAML, unchecked."""
        return self.known("config", lambda: _config(self.folder / CONFIG_FILE), CONFIG)

    @property
    def record(self) -> RunRecord | Missing:
        """Losses, resumes and skips."""
        return self.known("record", lambda: read_run(self.folder), files(METRICS_FILE, CONFIG_FILE, "summary.json"))

    @property
    def progress(self) -> tuple[Progress, Judgement] | Missing:
        """Where every rank is, and what `megascale why` says of that."""
        return self.known("progress", lambda: _judged(self.folder), every(_JUDGED_S, EVENTS))

    @property
    def status(self) -> dict[str, Any] | Missing:
        """What the run's driver says (`cluster/status.py`), with the rights of the user who started this."""
        return self.known("status", lambda: _status(self.folder), every(_STATUS_S))


def made[T](make: Callable[[], T]) -> T | Missing:
    """The result, or what went wrong in words."""
    try:
        return make()
    except MegascaleError as error:
        return Missing(str(error))
    except OSError as error:
        return Missing(f"{Path(error.filename).name if error.filename else 'A file'} cannot be read: {error.strerror or error}.")
    except Exception as error:  # a damaged file may fail in any library
        _log.warning("a reading failed", exc_info=True)
        return Missing(f"This cannot be read: {type(error).__name__}: {str(error)[:300]}")


def _config(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text())
    if not isinstance(found, dict):
        raise RunFolderError(f"{path} holds {type(found).__name__}, expected a mapping; it is damaged, or no run's")
    return found


def _judged(run: Path) -> tuple[Progress, Judgement]:
    progress = read_progress(run)
    return progress, judge(progress)


def _status(run: Path) -> dict[str, Any]:
    if not (job_folder(run) / DRIVER_FILE).is_file():
        raise RunFolderError("No driver has this run now.")
    return ask_driver(run, None, "status").status

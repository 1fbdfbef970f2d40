"""A rank's end of the loader: a thread that talks to it, and on local rank 0 starts it, again if it dies.

The thread waits in the kernel; once a step it puts the next batch into a queue, without copying it. When the loader dies,
rank 0 starts another one, and every rank asks it for what it has not got yet. That must not be left to ``next``: the rank that
has its batch may wait in a collective for the rank that has not. A loader that dies ``MAX_DEATHS`` times before rank 0 has used
one more batch is given up: a ``DataError`` with its last words. Rank 0 owns the listening socket, so for the other ranks a
refused connection means that rank 0 has died, or given up.
"""

import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megascale_jax.data.batch import Batch
from megascale_jax.data.host import HostGroup
from megascale_jax.data.loader import GAVE_UP
from megascale_jax.data.loader_process import END_LIMIT_S, LoaderProcess
from megascale_jax.data.shared_memory import Ring, RingShape
from megascale_jax.data.wire import Connection, Message, connect
from megascale_jax.errors import DataError

MAX_DEATHS = 3
"""Deaths in a row that are mended."""

_GRACE_S = 1.0
"""The loader and the thread have the same limit, and know better what did not come."""
_RETRY_S = 0.02
_ANSWER_LIMIT_S = 2.0

_logger = logging.getLogger(__name__)


class LoaderClient:
    """Batches from sample ``samples`` on, in order. Close it; it cannot be used again."""

    def __init__(self, group: HostGroup, request: Mapping[str, Any], data_indices: tuple[int, ...], samples: int, limit_s: float):
        """``limit_s``: longest wait for a batch, for the other ranks of the host to come, and for a former run to go, seconds."""
        self.deaths = 0
        """Loaders that have died so far."""
        self.loader: LoaderProcess | None = None
        """On local rank 0, once it has been started."""
        self._group, self._limit_s = group, limit_s
        self._hello = {"kind": "hello", "rank": group.local_rank, "request": dict(request), "data_indices": list(data_indices)}
        self._next = samples
        self._batch_size: int = request["global_batch_size"]
        self._deaths_in_a_row = 0
        self._has_ring = False
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._batches: queue.SimpleQueue[Batch | DataError] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="megascale-data", daemon=True)
        self._thread.start()

    def take(self) -> Batch:
        """The next batch; it stays valid until it is released. Raises ``DataError`` when there will be none, or none in time."""
        try:
            batch = self._batches.get(timeout=self._limit_s + _GRACE_S)
        except queue.Empty:
            raise DataError(
                f"No batch within {self._limit_s:.0f} s: {self._ask_why()}. Look at the storage and at those processes."
            ) from None
        if isinstance(batch, DataError):
            self._batches.put(batch)  # for a second call
            raise batch
        self._deaths_in_a_row = 0
        return batch

    def release(self, samples: int) -> None:
        """Batches that start before ``samples`` are used no more."""
        self._say({"kind": "released", "samples": samples})

    def close(self) -> None:
        """Say goodbye. Waits a few seconds at most; a loader that others still use goes on."""
        self._closing.set()
        self._batches.put(DataError("The data was closed while a batch was waited for."))
        self._say({"kind": "bye"})
        with self._lock:
            if self._connection is not None:
                self._connection.end()
        self._thread.join(2 * END_LIMIT_S)
        if self.loader is not None:
            # Before it has all ranks, a loader serves nobody: the ranks that come next need another one.
            is_of_no_use = self._group.local_size == 1 or not self._has_ring
            if is_of_no_use and not self._thread.is_alive():
                self.loader.kill()
            self.loader.close(kill=is_of_no_use)

    def _say(self, message: Message) -> None:
        with self._lock, suppress(OSError):  # the thread sees the end of the stream and mends it
            if self._connection is not None:
                self._connection.send(message)

    def _ask_why(self) -> str:
        if not self._has_ring:
            return f"not all {self._group.local_size} processes of this host have asked for data, or the loader does not start"
        self._say({"kind": "why"})
        try:
            return f"the loader says that {self._answers.get(timeout=_ANSWER_LIMIT_S)}"
        except queue.Empty:
            return "the loader does not answer either"

    def _run(self) -> None:
        try:
            if self._group.local_rank == 0:
                self._start_first()
            while (connection := self._reach()) is not None:
                with self._lock:
                    self._connection = connection
                try:
                    self._listen_to(connection)
                finally:
                    with self._lock:
                        self._connection = None
                        connection.close()
                self._mend()
        except DataError as error:
            self._fail(error)
        except Exception as error:  # whatever it is, the training loop must hear of it, not only this thread
            self._fail(DataError(f"The data thread failed: {type(error).__name__}: {error}."))

    def _fail(self, error: DataError) -> None:
        self._batches.put(error)
        if self.loader is not None:
            # The other ranks are refused from now on, and so know; what the loader is still telling them is better.
            self.loader.close(kill=True)

    def _start_first(self) -> None:
        deadline = time.monotonic() + self._limit_s
        while True:
            try:
                self.loader = LoaderProcess(self._group, self._limit_s)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline or self._closing.wait(_RETRY_S):
                    raise DataError(
                        f"The loader of {self._group.name} cannot start: {error}. Another run of that name holds its socket; end it."
                    ) from error
        self.loader.start()

    def _reach(self) -> Connection | None:
        """A connection on which this rank has said what it wants; None when it is to close."""
        deadline = time.monotonic() + self._limit_s
        while not self._closing.is_set():
            try:
                connection = connect(self._group.name)
                connection.send(self._hello | {"samples": self._next, "again": self._has_ring})
                return connection
            except OSError as error:
                if self._has_ring:
                    raise DataError("The loader of this host has ended, and local rank 0 has died or given up. See its output.") from error
                if time.monotonic() > deadline:
                    raise DataError(
                        f"Local rank 0 of this host has started no loader within {self._limit_s:.0f} s ({error}). "
                        f"Look at its output; the {self._group.local_size} processes must be on one host and see one network namespace."
                    ) from error
                self._closing.wait(_RETRY_S)
        return None

    def _listen_to(self, connection: Connection) -> None:
        """Take what comes until the loader dies, or until this rank closes. Raises ``DataError`` with what the loader says."""
        ring, block = None, 0
        while True:
            while self.loader is not None and not self.loader.is_readable(connection):
                self._mend()
            message, descriptor = connection.receive()
            if message is None:
                return
            match message["kind"]:
                case "ring":
                    assert descriptor is not None, "a ring without its memory"
                    shape = RingShape(**message["shape"] | {"rows": tuple(message["shape"]["rows"])})
                    ring, block = Ring(descriptor, shape, writable=False), message["block"]
                    os.close(descriptor)
                    self._has_ring = True
                case "batch":
                    assert ring is not None and message["samples"] == self._next, f"{message}, expected samples {self._next}"
                    self._next += self._batch_size
                    self._batches.put(ring.block(message["slot"], block))
                case "because":
                    self._answers.put(message["text"])
                case "error":
                    raise DataError(message["text"])

    def _mend(self) -> None:
        """After the end of a connection: on local rank 0, another loader. Raises ``DataError`` after too many."""
        if self._closing.is_set():
            return
        self.deaths += 1
        self._deaths_in_a_row += 1
        if self.loader is None:
            return
        how = self.loader.end(kill=True)
        if self.loader.exit_code == GAVE_UP:
            raise DataError(self.loader.last_words())
        if self._deaths_in_a_row > MAX_DEATHS:
            raise DataError(
                f"The loader of this host died {self._deaths_in_a_row} times without a batch in between; the last one {how}. "
                f"Its last words:\n{self.loader.last_words()}\nMend that, or set train.data.loader=thread."
            )
        _logger.warning("the data loader %s; starting it again at sample %d", how, self._next)
        self.loader.start()

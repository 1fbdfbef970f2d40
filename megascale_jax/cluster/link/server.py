"""The driver's end of the control link.

A message is heard after three doors: a certificate of the authority (TLS 1.3, both ways), a token for this job, and the role that
the message needs. Whatever arrives, the worst that happens is that its connection ends, with a line in the audit log. Everything
runs in one event loop; nothing here waits for a peer. `megascale drive` takes uvloop's: `benchmarks/bench_driver.py` measures 25% less
CPU, and less than half the memory, because asyncio holds 256 KiB for each TLS connection.
"""

import asyncio
import functools
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, TypeAdapter

from megascale_jax.cluster.link.connection import Connection, Handler, Shared
from megascale_jax.cluster.link.security import Security
from megascale_jax.cluster.link.throttle import Throttle
from megascale_jax.cluster.link.tokens import Role
from megascale_jax.cluster.link.wire import Limits, Word

Audit = Callable[[str, dict[str, Any]], None]

_BACKLOG = 4096
_SWEEP_S = 1.0
_CLOSING_S = 2.0
"""Longest time that a connection that was told to end may take to take in what was sent to it."""

_log = logging.getLogger(__name__)


class LinkServer:
    """Listens for executors and operators of one job."""

    def __init__(
        self,
        security: Security,
        job: str,
        incoming: TypeAdapter[Any],
        handler: Handler,
        *,
        audit: Audit,
        limits: Limits | None = None,
        permits: Callable[[Role, BaseModel], bool] = lambda role, message: True,
    ):
        """``permits``: whether a role may send a message; who sends one that it may not loses its connection. Raises UsageError."""
        self._limits = limits or Limits()
        self._shared = Shared(job, security.read_signing_key(), incoming, handler, permits, self._limits, Throttle(audit))
        self._context = security.server_context()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._of_address: Counter[str] = Counter()
        """Handshakes under way."""
        self._tasks: list[asyncio.Task[None]] = []
        self._listening: socket.socket | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen on an address of this machine, ``port`` 0: any; the port. Raises OSError when it is taken or not this machine's."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listening.setblocking(False)
        self._tasks = [asyncio.create_task(self._accept(self._listening)), asyncio.create_task(self._sweep())]
        return self._listening.getsockname()[1]

    async def close(self) -> None:
        """End all connections and listen no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()
        for task in list(self._handshakes):
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        for connection in list(self._shared.connections):
            connection.end(Word.CLOSED, "the driver ends")
        limit = time.monotonic() + _CLOSING_S
        while self._shared.connections and time.monotonic() < limit:
            await asyncio.sleep(0.01)
        for connection in list(self._shared.connections):
            connection.hang_up(None)
        await asyncio.sleep(0)
        self._shared.throttle.flush()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        room = asyncio.Semaphore(self._limits.handshakes)
        while True:
            await room.acquire()
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                room.release()
                _log.warning("the control link cannot take a connection: %s; it tries again", error)
                await asyncio.sleep(_SWEEP_S)
                continue
            if refusal := self._refusal(address[0]):
                room.release()
                accepted.close()
                self._shared.throttle.put("link.refused", Word.TOO_MANY, {"address": address[0], "detail": refusal})
                continue
            self._of_address[address[0]] += 1
            task = asyncio.create_task(self._handshake(accepted, address[0]))
            self._handshakes.add(task)
            task.add_done_callback(functools.partial(self._handshake_done, room, address[0]))

    def _handshake_done(self, room: asyncio.Semaphore, address: str, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]
        room.release()

    def _refusal(self, address: str) -> str:
        """Why no further connection is taken from an address now; empty: one is."""
        limits = self._limits
        if len(self._shared.connections) + len(self._handshakes) >= limits.connections:
            return f"more than {limits.connections} connections"
        if self._of_address[address] >= limits.handshakes_per_address:
            return f"more than {limits.handshakes_per_address} handshakes of one address"
        return ""

    async def _handshake(self, accepted: socket.socket, address: str) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self._shared, address),
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._limits.handshake_s,
                ssl_shutdown_timeout=_CLOSING_S,
            )
        except OSError as error:
            detail = error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)
            self._shared.throttle.put("link.refused", Word.REFUSED, {"address": address, "detail": f"no TLS handshake: {detail}"})
            accepted.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._limits.idle_s / 4))
            now = time.monotonic()
            for connection in list(self._shared.connections):
                connection.check_idle(now)
            self._shared.throttle.flush(now)

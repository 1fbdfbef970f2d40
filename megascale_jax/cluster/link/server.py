"""The driver's end of the control link.

A message is heard after three doors: a certificate of the authority (TLS 1.3, both ways), a token for this job, and the role that
the message needs. Whatever arrives, the worst that happens is that its connection ends, with a line in the audit log. Everything
runs in one event loop; nothing here waits for a peer. Let it be uvloop's: `benchmarks/bench_driver.py` measures 25% less CPU, and less than
half the memory, because asyncio holds 256 KiB for each TLS connection.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol

from pydantic import BaseModel, TypeAdapter

from megascale_jax.cluster.link import wire
from megascale_jax.cluster.link.security import Security
from megascale_jax.cluster.link.throttle import Throttle
from megascale_jax.cluster.link.tokens import Role, TokenRefused, verify
from megascale_jax.cluster.link.wire import Fault, Kind, Limits, Word

Audit = Callable[[str, dict[str, Any]], None]

_BACKLOG = 4096
_SWEEP_S = 1.0
_CLOSING_S = 2.0
"""Longest time that a connection that was told to end may take to take in what was sent to it."""

_log = logging.getLogger(__name__)


class Handler(Protocol):
    """Who hears the peers. Called in the event loop, never two at once; what one raises is logged and ends the connection."""

    def connected(self, peer: "Peer") -> None:
        """A peer was let in."""
        ...

    def received(self, peer: "Peer", message: BaseModel) -> None:
        """A message that fits the schema and the peer's role."""
        ...

    def lost(self, peer: "Peer", why: str) -> None:
        """The last of a peer, once for each `connected`. Of two nodes with one name, the older is lost before the newer connects."""
        ...


class Peer:
    """The other end of one connection, as its token names it. To be used in the event loop only."""

    __slots__ = ("_connection", "address", "name", "role")

    def __init__(self, connection: "_Connection", name: str, role: Role, address: str):
        self.name, self.role, self.address = name, role, address
        self._connection = connection

    def send(self, message: BaseModel) -> None:
        """Queue a message; dropped when the connection has ended, which ends too when too much waits in its queue."""
        self._connection.send(message)

    def close(self, why: str) -> None:
        """End the connection; `Handler.lost` is called soon after, with ``why``."""
        self._connection.end(Word.CLOSED, why)


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
        self.incoming, self.handler, self.permits = incoming, handler, permits
        self.job, self.limits = job, limits or Limits()
        self.nodes: dict[str, Peer] = {}
        """The connected executors by name."""
        self.signing_key = security.read_signing_key()
        self._context = security.server_context()
        self._throttle = Throttle(audit)
        self._connections: set[_Connection] = set()
        self._handshakes: set[asyncio.Task[None]] = set()
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
        for connection in list(self._connections):
            connection.end(Word.CLOSED, "the driver ends")
        limit = time.monotonic() + _CLOSING_S
        while self._connections and time.monotonic() < limit:
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.hang_up(None)
        await asyncio.sleep(0)
        self._throttle.flush()

    def audit(self, action: str, word: Word, details: dict[str, Any]) -> None:
        """Put a line into the audit log, at most a few a minute for each action and word."""
        self._throttle.put(action, word, details)

    def opened(self, connection: "_Connection") -> None:
        """A TLS handshake was completed."""
        self._connections.add(connection)

    def gone(self, connection: "_Connection") -> None:
        """A connection is no more."""
        self._connections.discard(connection)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        room = asyncio.Semaphore(self.limits.handshakes)
        while True:
            await room.acquire()
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                room.release()
                _log.warning("the control link cannot take a connection: %s; it tries again", error)
                await asyncio.sleep(_SWEEP_S)
                continue
            if len(self._connections) + len(self._handshakes) >= self.limits.connections:
                room.release()
                accepted.close()
                self.audit(
                    "link.refused", Word.TOO_MANY, {"address": address[0], "detail": f"more than {self.limits.connections} connections"}
                )
                continue
            task = asyncio.create_task(self._handshake(accepted, address[0]))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)
            task.add_done_callback(lambda _: room.release())

    async def _handshake(self, accepted: socket.socket, address: str) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Connection(self, address),
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self.limits.handshake_s,
                ssl_shutdown_timeout=_CLOSING_S,
            )
        except OSError as error:
            detail = error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)
            self.audit("link.refused", Word.REFUSED, {"address": address, "detail": f"no TLS handshake: {detail}"})
            accepted.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self.limits.idle_s / 4))
            now = time.monotonic()
            for connection in list(self._connections):
                connection.check_idle(now)
            self._throttle.flush(now)


class _Connection(wire.Framed):
    def __init__(self, server: LinkServer, address: str):
        super().__init__(wire.FIRST_FRAME_BYTES, wire.new_challenge())
        self._server, self._address = server, address
        self._peer: Peer | None = None
        self._told_lost = False
        self._why = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._heard = time.monotonic()
        self._allowance = float(server.limits.burst)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.opened(self)
        self.send_frame(Kind.GREETING)
        self._deadline = asyncio.get_running_loop().call_later(self._server.limits.first_frame_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._disarm()
        self._server.gone(self)
        self.tell_lost(self._why or (f"the connection broke: {exc}" if exc else "the peer ended the connection"))

    def frame(self, kind: Kind, content: bytes) -> None:
        self._pay()
        peer = self._peer
        if peer is None:
            self._admit(kind, content)
        elif kind is Kind.MESSAGE:
            message = wire.read_message(self._server.incoming, content)
            if not self._server.permits(peer.role, message):
                raise Fault(Word.NOT_PERMITTED, f"a {type(message).__name__} from the role {peer.role}")
            self._call("received", self._server.handler.received, peer, message)
        elif kind is Kind.PING:
            self._queue(Kind.PONG, b"{}")
        elif kind is Kind.GOODBYE:
            self.end(Word.CLOSED, "the peer said goodbye")
        else:
            raise Fault(Word.NOT_UNDERSTOOD, f"a {kind.name} frame after the token")

    def fault(self, fault: Fault) -> None:
        details: dict[str, Any] = {"address": self._address, "detail": str(fault)}
        if self._peer is None:
            self._server.audit("link.refused", fault.word, details)
        else:
            self._server.audit("link.closed", fault.word, {"name": self._peer.name, "role": str(self._peer.role)} | details)
        self.end(fault.word, str(fault))

    def send(self, message: BaseModel) -> None:
        if not self.closed:
            self._queue(Kind.MESSAGE, wire.write_message(message))

    def end(self, word: Word, why: str) -> None:
        """End the connection; the handler hears of it soon, so never from within its own call."""
        if self.closed:
            return
        self._why = why
        self.hang_up(None if word is Word.TOO_SLOW else word)
        self._disarm()
        asyncio.get_running_loop().call_soon(self.tell_lost, why)

    def tell_lost(self, why: str) -> None:
        """Tell the handler, once, if it has heard of this peer."""
        peer = self._peer
        if peer is None or self._told_lost:
            return
        self._told_lost = True
        if self._server.nodes.get(peer.name) is peer:
            del self._server.nodes[peer.name]
        self._call("lost", self._server.handler.lost, peer, why)

    def check_idle(self, now: float) -> None:
        """End a connection that has been silent, or in the middle of one frame, for too long."""
        silent = now - self._heard
        if not self.closed and self._peer is not None and silent > self._server.limits.idle_s:
            self.fault(Fault(Word.TOO_SLOW, f"no complete frame for {silent:.1f} s"))

    def _admit(self, kind: Kind, content: bytes) -> None:
        if kind is not Kind.TOKEN:
            raise Fault(Word.REFUSED, f"a {kind.name} frame before the token")
        server = self._server
        shown: wire.Shown = wire.read_message(_SHOWN, content)
        try:
            token = verify(server.signing_key, shown.token, server.job, time.time())
        except TokenRefused as error:
            raise Fault(Word.REFUSED, str(error)) from None
        self._disarm()
        self.largest = server.limits.frame_bytes
        self._peer = peer = Peer(self, token.name, token.role, self._address)
        if token.role is Role.NODE:
            if (older := server.nodes.get(token.name)) is not None:
                older._connection.replaced(self._address)
            server.nodes[token.name] = peer
        self._queue(Kind.ADMITTED, b"{}")
        self._call("connected", server.handler.connected, peer)

    def replaced(self, by: str) -> None:
        """A newer connection of the same node: a partitioned executor may come back while its old connection still looks alive."""
        assert self._peer is not None
        self._server.audit("link.replaced", Word.REPLACED, {"name": self._peer.name, "address": self._address, "by": by})
        why = f"replaced by a newer connection from {by}"
        self.end(Word.REPLACED, why)
        self.tell_lost(why)

    def _pay(self) -> None:
        now, limits = time.monotonic(), self._server.limits
        self._allowance = min(float(limits.burst), self._allowance + (now - self._heard) * limits.frames_per_s) - 1.0
        self._heard = now
        if self._allowance < 0:
            raise Fault(Word.TOO_MANY, f"more than {limits.frames_per_s:g} frames a second")

    def _queue(self, kind: Kind, content: bytes) -> None:
        waiting = self.send_frame(kind, content)
        if waiting > self._server.limits.queue_bytes:
            self.fault(Fault(Word.TOO_SLOW, f"{waiting} bytes wait to be read; expected at most {self._server.limits.queue_bytes}"))

    def _late(self) -> None:
        if self._peer is None and not self.closed:
            self.fault(Fault(Word.REFUSED, f"no token within {self._server.limits.first_frame_s:g} s"))

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _call(self, what: str, method: Callable[..., None], peer: Peer, *arguments: Any) -> None:
        try:
            method(peer, *arguments)
        except Exception as error:
            _log.exception("the driver could not handle %s of %s", what, peer.name)
            with contextlib.suppress(Fault):
                details = {"name": peer.name, "role": str(peer.role), "address": self._address, "detail": f"{what}: {type(error).__name__}"}
                self._server.audit("link.failed", Word.CLOSED, details)
            self.end(Word.CLOSED, "the driver could not handle a message")


_SHOWN: TypeAdapter[wire.Shown] = TypeAdapter(wire.Shown)

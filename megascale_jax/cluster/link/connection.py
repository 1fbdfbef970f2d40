"""One connection at the driver's end: the token first, then messages, until either side ends it or breaks a rule."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel, TypeAdapter

from megascale_jax.cluster.link import wire
from megascale_jax.cluster.link.throttle import Throttle
from megascale_jax.cluster.link.tokens import Role, TokenRefused, verify
from megascale_jax.cluster.link.wire import Fault, Kind, Limits, Word

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

    def __init__(self, connection: "Connection", name: str, role: Role, address: str):
        self.name, self.role, self.address = name, role, address
        self._connection = connection

    def send(self, message: BaseModel) -> None:
        """Queue a message; dropped when the connection has ended, which ends too when too much waits in its queue."""
        self._connection.send(message)

    def close(self, why: str) -> None:
        """End the connection; `Handler.lost` is called soon after, with ``why``."""
        self._connection.end(Word.CLOSED, why)


@dataclass
class Shared:
    """What all connections of a server have in common. ``nodes``: the connected executors by name."""

    job: str
    signing_key: bytes
    incoming: TypeAdapter[Any]
    handler: Handler
    permits: Callable[[Role, BaseModel], bool]
    limits: Limits
    throttle: Throttle
    nodes: dict[str, Peer] = field(default_factory=dict)
    connections: "set[Connection]" = field(default_factory=set)


class Connection(wire.Framed):
    """One peer, from the end of its TLS handshake on."""

    def __init__(self, shared: Shared, address: str):
        super().__init__(wire.FIRST_FRAME_BYTES, wire.new_challenge())
        self._shared, self._address = shared, address
        self._peer: Peer | None = None
        self._told_lost = False
        self._why = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._heard = time.monotonic()
        self._allowance = float(shared.limits.burst)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet, and wait for the token."""
        super().connection_made(transport)
        self._shared.connections.add(self)
        self.send_frame(Kind.GREETING)
        self._deadline = asyncio.get_running_loop().call_later(self._shared.limits.first_frame_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        """There is no connection any more."""
        self.closed = True
        self._disarm()
        self._shared.connections.discard(self)
        self.tell_lost(self._why or (f"the connection broke: {exc}" if exc else "the peer ended the connection"))

    def frame(self, kind: Kind, content: bytes) -> None:
        """A complete frame in its order. May raise `Fault`."""
        self._pay()
        peer = self._peer
        if peer is None:
            self._admit(kind, content)
        elif kind is Kind.MESSAGE:
            message = wire.read_message(self._shared.incoming, content)
            if not self._shared.permits(peer.role, message):
                raise Fault(Word.NOT_PERMITTED, f"a {type(message).__name__} from the role {peer.role}")
            self._call("received", self._shared.handler.received, peer, message)
        elif kind is Kind.PING:
            self._queue(Kind.PONG, b"{}")
        elif kind is Kind.GOODBYE:
            self.end(Word.CLOSED, "the peer said goodbye")
        else:
            raise Fault(Word.NOT_UNDERSTOOD, f"a {kind.name} frame after the token")

    def fault(self, fault: Fault) -> None:
        """The peer broke a rule: a line in the audit log, and the end."""
        details: dict[str, Any] = {"address": self._address, "detail": str(fault)}
        if self._peer is None:
            self._shared.throttle.put("link.refused", fault.word, details)
        else:
            self._shared.throttle.put("link.closed", fault.word, {"name": self._peer.name, "role": str(self._peer.role)} | details)
        self.end(fault.word, str(fault))

    def send(self, message: BaseModel) -> None:
        """Queue a message, unless the connection has ended."""
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
        if self._shared.nodes.get(peer.name) is peer:
            del self._shared.nodes[peer.name]
        self._call("lost", self._shared.handler.lost, peer, why)

    def check_idle(self, now: float) -> None:
        """End a connection that has been silent, or in the middle of one frame, for too long."""
        silent = now - self._heard
        if not self.closed and self._peer is not None and silent > self._shared.limits.idle_s:
            self.fault(Fault(Word.TOO_SLOW, f"no complete frame for {silent:.1f} s"))

    def _admit(self, kind: Kind, content: bytes) -> None:
        if kind is not Kind.TOKEN:
            raise Fault(Word.REFUSED, f"a {kind.name} frame before the token")
        shared = self._shared
        shown: wire.Shown = wire.read_message(_SHOWN, content)
        try:
            token = verify(shared.signing_key, shown.token, shared.job, time.time())
        except TokenRefused as error:
            raise Fault(Word.REFUSED, str(error)) from None
        self._disarm()
        self.largest = shared.limits.frame_bytes
        self._peer = peer = Peer(self, token.name, token.role, self._address)
        if token.role is Role.NODE:
            if (older := shared.nodes.get(token.name)) is not None:
                older._connection.replaced(self._address)
            shared.nodes[token.name] = peer
        self._queue(Kind.ADMITTED, b"{}")
        self._call("connected", shared.handler.connected, peer)

    def replaced(self, by: str) -> None:
        """A newer connection of the same node: a partitioned executor may come back while its old connection still looks alive."""
        assert self._peer is not None
        if not self.closed:
            self._shared.throttle.put("link.replaced", Word.REPLACED, {"name": self._peer.name, "address": self._address, "by": by})
            self.end(Word.REPLACED, f"replaced by a newer connection from {by}")
        self.tell_lost(self._why)

    def _pay(self) -> None:
        now, limits = time.monotonic(), self._shared.limits
        self._allowance = min(float(limits.burst), self._allowance + (now - self._heard) * limits.frames_per_s) - 1.0
        self._heard = now
        if self._allowance < 0:
            raise Fault(Word.TOO_MANY, f"more than {limits.frames_per_s:g} frames a second")

    def _queue(self, kind: Kind, content: bytes) -> None:
        waiting = self.send_frame(kind, content)
        if waiting > self._shared.limits.queue_bytes:
            self.fault(Fault(Word.TOO_SLOW, f"{waiting} bytes wait to be read; expected at most {self._shared.limits.queue_bytes}"))

    def _late(self) -> None:
        if self._peer is None and not self.closed:
            self.fault(Fault(Word.REFUSED, f"no token within {self._shared.limits.first_frame_s:g} s"))

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _call(self, what: str, method: Callable[..., None], peer: Peer, *arguments: Any) -> None:
        try:
            method(peer, *arguments)
        except Exception as error:
            _log.exception("the driver could not handle %s of %s", what, peer.name)
            details = {"name": peer.name, "role": str(peer.role), "address": self._address, "detail": f"{what}: {type(error).__name__}"}
            self._shared.throttle.put("link.failed", Word.CLOSED, details)
            self.end(Word.CLOSED, "the driver could not handle a message")


_SHOWN: TypeAdapter[wire.Shown] = TypeAdapter(wire.Shown)

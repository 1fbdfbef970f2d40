"""Frames over a stream: one header, one JSON text; both ends speak the same.

    4 bytes   length of the JSON in bytes, checked against the limit before any of it is kept
    1 byte    kind
    8 bytes   sequence number of this direction, from 0, each one more than the one before
    16 bytes  the connection's challenge: random, chosen by the driver, so nothing recorded on one connection is accepted on another
    JSON

The driver greets (`GREETING`, whose challenge is the connection's), the peer answers with its `TOKEN`, the driver lets it in
(`ADMITTED`); then `MESSAGE`s go both ways, `PING` is answered by `PONG`, and whoever ends the connection on purpose says `GOODBYE`
with one of a few words. Nothing else is accepted, and what is not accepted ends the connection.
"""

import asyncio
import secrets
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from megascale_jax.cluster.link.tokens import LONGEST_TOKEN

HEADER = struct.Struct("!IBQ16s")
FIRST_FRAME_BYTES = LONGEST_TOKEN + 64
"""Longest JSON from a peer that has not shown a token yet."""

_SMALL_BUFFER = 4096


@dataclass(frozen=True)
class Limits:
    """Bounds of a connection. Times in seconds; what is beyond ends the connection."""

    frame_bytes: int = 256 << 10
    """Longest JSON of a frame, from a node or an operator."""
    answer_bytes: int = 4 << 20
    """Longest JSON of an answer to an operator: the status of thousands of nodes."""
    handshake_s: float = 10.0
    """For the TLS handshake."""
    first_frame_s: float = 5.0
    """From the end of the TLS handshake to a complete token."""
    idle_s: float = 30.0
    """Without a complete frame from the other end."""
    keepalive_s: float = 10.0
    """Without a frame from the driver, after which a client asks for one; well below ``idle_s``."""
    queue_bytes: int = 4 << 20
    """Waiting to be read by the other end."""
    frames_per_s: float = 50.0
    """Long-term rate of frames from one peer."""
    burst: int = 200
    """Frames at once beyond that rate."""
    connections: int = 4096
    """At once, those in the middle of their handshake included."""
    handshakes: int = 256
    """At once; further ones wait in the listening socket's queue."""
    handshakes_per_address: int = 32
    """At once, so that one host that connects and says nothing does not shut the door for all; further ones are refused."""
    backoff_s: float = 0.2
    """A client's first pause before it connects again; doubles up to ``longest_backoff_s``, and is shortened by up to a half by chance."""
    longest_backoff_s: float = 5.0


class Kind(IntEnum):
    """What a frame is."""

    MESSAGE = 0
    GREETING = 1
    TOKEN = 2
    ADMITTED = 3
    GOODBYE = 4
    PING = 5
    PONG = 6


class Word(StrEnum):
    """All that a peer is told about why its connection ends; the details are for the audit log."""

    CLOSED = "closed"
    REFUSED = "refused"
    NOT_PERMITTED = "not permitted"
    NOT_UNDERSTOOD = "not understood"
    TOO_LARGE = "too large"
    TOO_MANY = "too many"
    TOO_SLOW = "too slow"
    REPLACED = "replaced"


class Fault(Exception):
    """What the other end did and must not; ``word`` is for the other end, the text for the log."""

    def __init__(self, word: Word, detail: str):
        super().__init__(detail)
        self.word = word


class Shown(BaseModel):
    """The JSON of a `TOKEN` frame."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    token: str = Field(max_length=LONGEST_TOKEN)


class Goodbye(BaseModel):
    """The JSON of a `GOODBYE` frame."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    why: Word


class Framed(asyncio.BufferedProtocol, ABC):
    """One end of a connection: cuts frames out of the stream and checks their order; `frame` and `fault` are the subclass's.

    TLS is decrypted straight into this buffer, which is small and grows to a large frame only while that arrives.
    """

    def __init__(self, largest: int, challenge: bytes | None = None):
        """``challenge``: the connection's; ``None``: take it from the first frame, which must be a `GREETING`."""
        self.largest = largest
        self.closed = False
        """Nothing that arrives is looked at any more."""
        self._transport: asyncio.Transport | None = None
        self._challenge = challenge
        self._sent = 0
        self._received = 0
        self._buffer = memoryview(bytearray(_SMALL_BUFFER))
        self._begin = self._filled = 0

    @abstractmethod
    def frame(self, kind: Kind, content: bytes) -> None:
        """A complete frame in its order. May raise `Fault`."""

    @abstractmethod
    def fault(self, fault: Fault) -> None:
        """The other end broke the rules."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The TLS handshake is done."""
        self._transport = cast(asyncio.Transport, transport)

    def send_frame(self, kind: Kind, content: bytes = b"{}") -> int:
        """Hand a frame to the transport, which never blocks; bytes that wait there for the other end."""
        transport, challenge = self._transport, self._challenge
        if transport is None or challenge is None or transport.is_closing():
            return 0
        transport.write(HEADER.pack(len(content), kind, self._sent, challenge) + content)
        self._sent += 1
        return transport.get_write_buffer_size()

    def hang_up(self, word: Word | None) -> None:
        """End the connection: with a `GOODBYE` after all that waits, or at once without a word."""
        self.closed = True
        if self._transport is None:
            return
        if word is None:
            self._transport.abort()
        else:
            self.send_frame(Kind.GOODBYE, Goodbye(why=word).model_dump_json().encode())
            self._transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Room for what arrives."""
        if self.closed:
            self._begin = self._filled = 0
        elif self._filled == len(self._buffer):
            self._make_room()
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have arrived."""
        self._filled += nbytes
        try:
            while not self.closed and self._next_frame():
                pass
        except Fault as fault:
            self.fault(fault)
        if self._begin == self._filled:
            self._begin = self._filled = 0
            if len(self._buffer) > _SMALL_BUFFER:
                self._buffer = memoryview(bytearray(_SMALL_BUFFER))

    def _next_frame(self) -> bool:
        """Take one frame out of the buffer, if a whole one is there."""
        start = self._begin
        if self._filled - start < HEADER.size:
            return False
        length, kind, sequence, challenge = HEADER.unpack_from(self._buffer, start)
        if length > self.largest:
            raise Fault(Word.TOO_LARGE, f"a frame of {length} bytes; expected at most {self.largest}")
        if self._challenge is None and kind == Kind.GREETING:
            self._challenge = challenge
        if challenge != self._challenge:
            raise Fault(Word.NOT_UNDERSTOOD, "a frame with another connection's challenge: replayed")
        if sequence != self._received:
            raise Fault(Word.NOT_UNDERSTOOD, f"a frame with number {sequence}; expected {self._received}: replayed, lost or out of order")
        end = start + HEADER.size + length
        if end > self._filled:
            return False
        if kind not in _KINDS:
            raise Fault(Word.NOT_UNDERSTOOD, f"a frame of kind {kind}; expected at most {max(Kind)}")
        self._received += 1
        self._begin = end
        self.frame(_KINDS[kind], bytes(self._buffer[start + HEADER.size : end]))
        return True

    def _make_room(self) -> None:
        kept = self._filled - self._begin
        if self._begin and kept <= len(self._buffer) // 2:
            grown = self._buffer
        else:
            grown = memoryview(bytearray(min(2 * len(self._buffer), HEADER.size + max(self.largest, _SMALL_BUFFER))))
        grown[:kept] = bytes(self._buffer[self._begin : self._filled])
        self._buffer, self._begin, self._filled = grown, 0, kept


_KINDS = {int(kind): kind for kind in Kind}


def new_challenge() -> bytes:
    """Sixteen random bytes."""
    return secrets.token_bytes(16)


def read_message(adapter: TypeAdapter[Any], content: bytes) -> Any:
    """The message of a frame. Raises `Fault`, whose text names the place and the rule, and nothing of what the message holds."""
    try:
        return adapter.validate_json(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))[:100]
        raise Fault(Word.NOT_UNDERSTOOD, f"a message that is not understood: {place}: {first['type']}") from None


def write_message(message: BaseModel) -> bytes:
    """The JSON of a message."""
    return message.model_dump_json().encode()

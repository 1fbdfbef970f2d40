"""The other end of the control link: an executor's connection that comes back for ever, and a command line's one question."""

import asyncio
import contextlib
import logging
import random
import ssl
import time
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from megascale_jax.cluster.link import wire
from megascale_jax.cluster.link.security import Security
from megascale_jax.cluster.link.wire import Fault, Kind, Limits, Word
from megascale_jax.errors import LinkError, UsageError

Address = tuple[str, int]

_log = logging.getLogger(__name__)


class LinkClient:
    """An executor's connection to its driver. To be used in the event loop of `run` only; callbacks are called in it."""

    def __init__(
        self,
        security: Security,
        address: Address,
        incoming: TypeAdapter[Any],
        *,
        received: Callable[[Any], None],
        connected: Callable[[], None] = lambda: None,
        lost: Callable[[str], None] = lambda why: None,
        limits: Limits | None = None,
    ):
        """``lost`` is called once for each `connected`, with the reason; attempts that fail are logged, once for each reason in a row."""
        self._security, self._address, self._incoming = security, address, incoming
        self._callbacks = received, connected, lost
        self._limits = limits or Limits()
        self._connection: _Connection | None = None
        self._ended = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether the driver has let this end in, and neither has hung up."""
        return self._connection is not None and self._connection.usable

    def send(self, message: BaseModel) -> bool:
        """Queue a message; false, and the message is dropped, while there is no connection."""
        return self._connection is not None and self._connection.send(message)

    def close(self) -> None:
        """End the connection and `run`."""
        self._ended.set()
        if self._connection is not None:
            self._connection.hang_up(Word.CLOSED)

    async def run(self) -> None:
        """Connect, and connect again whenever the connection is lost, until `close`. Certificates and token are read anew each time."""
        attempt, reported = 0, ""
        received, connected, lost = self._callbacks
        while not self._ended.is_set():
            began: float | None = None
            why = ""
            try:
                self._connection = await connect(self._security, self._address, self._incoming, received, self._limits)
                began, reported = time.monotonic(), ""
                if not self._ended.is_set():
                    connected()
                    why = await self._until_lost(self._connection)
                    lost(why)
            except (LinkError, UsageError) as error:
                if str(error) != reported:
                    _log.warning("%s; it is tried again", error)
                reported = str(error)
            finally:
                if self._connection is not None:
                    self._connection.hang_up(Word.CLOSED)
                self._connection = None
            # A connection that the driver ends again and again at once (of two executors with one name, say) is not come back to at once.
            attempt = 0 if began is not None and time.monotonic() - began > self._limits.longest_backoff_s else attempt + 1
            pause = min(self._limits.longest_backoff_s, self._limits.backoff_s * 2.0 ** min(attempt, 16)) * random.uniform(0.5, 1.0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), pause)

    async def _until_lost(self, connection: "_Connection") -> str:
        while True:
            done, _ = await asyncio.wait([connection.lost], timeout=self._limits.keepalive_s / 2)
            if done:
                return connection.lost.result()
            connection.check_idle(time.monotonic())


def ask(security: Security, address: Address, message: BaseModel, incoming: TypeAdapter[Any], limit_s: float) -> Any:
    """Send one message, and the first that comes back; for command lines, where no event loop runs. Raises LinkError, UsageError."""
    return asyncio.run(ask_once(security, address, message, incoming, limit_s))


async def ask_once(security: Security, address: Address, message: BaseModel, incoming: TypeAdapter[Any], limit_s: float) -> Any:
    """`ask` within an event loop."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def received(message: Any) -> None:
        if not answer.done():
            answer.set_result(message)

    connection: _Connection | None = None
    try:
        async with asyncio.timeout(limit_s):
            connection = await connect(security, address, incoming, received, Limits())
            connection.send(message)
            await asyncio.wait([answer, connection.lost], return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError as error:
        raise LinkError(f"no answer from the driver at {_text(address)} within {limit_s:g} s") from error
    finally:
        if connection is not None:
            connection.hang_up(Word.CLOSED)
    if answer.done():
        return answer.result()
    assert connection is not None
    raise LinkError(f"the driver at {_text(address)} gave no answer: {connection.lost.result()}")


async def connect(
    security: Security, address: Address, incoming: TypeAdapter[Any], received: Callable[[Any], None], limits: Limits
) -> "_Connection":
    """A connection that the driver has let in. Raises LinkError when there is none, UsageError when this end's files are not in order."""
    loop = asyncio.get_running_loop()
    context, token = security.client_context(), security.read_token()
    connection = _Connection(token, incoming, received, limits)
    try:
        async with asyncio.timeout(2 * limits.handshake_s):
            await loop.create_connection(
                lambda: connection,
                *address,
                ssl=context,
                server_hostname=security.server_name or address[0],
                ssl_handshake_timeout=2 * limits.handshake_s,
                ssl_shutdown_timeout=limits.first_frame_s,
            )
            await asyncio.wait([connection.admitted, connection.lost], return_when=asyncio.FIRST_COMPLETED)
    except ssl.SSLCertVerificationError as error:
        connection.hang_up(None)
        raise LinkError(
            f"{_text(address)} is not the driver of {security.ca}: {error.verify_message}; expected a certificate for "
            f"{security.server_name or address[0]} (`megascale certs init`)"
        ) from error
    except TimeoutError as error:
        connection.hang_up(None)
        raise LinkError(f"the driver at {_text(address)} did not answer within {2 * limits.handshake_s:g} s") from error
    except (OSError, ValueError) as error:  # ValueError: a host that is no name
        connection.hang_up(None)
        raise LinkError(f"no connection to the driver at {_text(address)}: {error}") from error
    if not connection.admitted.done():
        raise LinkError(f"the driver at {_text(address)} did not let this end in: {connection.lost.result()}")
    return connection


class _Connection(wire.Framed):
    def __init__(self, token: str, incoming: TypeAdapter[Any], received: Callable[[Any], None], limits: Limits):
        super().__init__(limits.answer_bytes)
        loop = asyncio.get_running_loop()
        self.admitted: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[str] = loop.create_future()
        """Why there is no connection any more."""
        self._token, self._incoming, self._received_callback, self._limits = token, incoming, received, limits
        self._heard = time.monotonic()

    @property
    def usable(self) -> bool:
        """Messages can be sent."""
        return self.admitted.done() and not self.closed

    def send(self, message: BaseModel) -> bool:
        """Queue a message. A connection with too much in its queue ends, and another one is made."""
        if not self.usable:
            return False
        if self.send_frame(Kind.MESSAGE, wire.write_message(message)) > self._limits.queue_bytes:
            self.fault(Fault(Word.TOO_SLOW, "the driver reads too slowly"))
            return False
        return True

    def frame(self, kind: Kind, content: bytes) -> None:
        self._heard = time.monotonic()
        if kind is Kind.GREETING and not self._token_shown:
            self.send_frame(Kind.TOKEN, wire.Shown(token=self._token).model_dump_json().encode())
        elif kind is Kind.ADMITTED and not self.admitted.done():
            self.admitted.set_result(None)
        elif kind is Kind.GOODBYE:
            self._leave(_spoken(content))
        elif kind is Kind.MESSAGE and self.admitted.done():
            self._deliver(wire.read_message(self._incoming, content))
        elif kind is not Kind.PONG:
            raise Fault(Word.NOT_UNDERSTOOD, f"a {kind.name} frame that was not expected")

    def fault(self, fault: Fault) -> None:
        self._leave(str(fault), None if fault.word is Word.TOO_SLOW else fault.word)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._tell(f"the connection broke: {exc}" if exc else "the connection ended")

    def check_idle(self, now: float) -> None:
        """Ask for a sign of life, or end a connection that has given none for too long."""
        silent = now - self._heard
        if silent > self._limits.idle_s:
            self.fault(Fault(Word.TOO_SLOW, f"the driver has been silent for {silent:.1f} s"))
        elif silent >= self._limits.keepalive_s / 2:
            self.send_frame(Kind.PING)

    @property
    def _token_shown(self) -> bool:
        return self._sent > 0

    def _deliver(self, message: Any) -> None:
        try:
            self._received_callback(message)
        except Exception:
            _log.exception("a message of the driver could not be handled")
            self._leave("a message of the driver could not be handled", Word.CLOSED)

    def _leave(self, why: str, word: Word | None = Word.CLOSED) -> None:
        if not self.closed:
            self.hang_up(word)
        self._tell(why)

    def _tell(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)


def _spoken(content: bytes) -> str:
    try:
        word = wire.Goodbye.model_validate_json(content).why
    except ValidationError:
        return "the driver ended the connection"
    hint = {
        Word.REFUSED: "; it accepts no such token, and its audit log says why",
        Word.NOT_PERMITTED: "; it needs a token with another role",
    }
    return f"the driver ended the connection: {word}{hint.get(word, '')}"


def _text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"

"""Certificates made once, a job's messages, and both ends of a link on 127.0.0.1, for the tests of the control link."""

import asyncio
import atexit
import functools
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import uvloop
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from megascale_jax.cluster.link import wire
from megascale_jax.cluster.link.certificates import make_folder
from megascale_jax.cluster.link.client import LinkClient
from megascale_jax.cluster.link.connection import Peer
from megascale_jax.cluster.link.security import Security, make_token
from megascale_jax.cluster.link.server import LinkServer
from megascale_jax.cluster.link.tokens import Role
from megascale_jax.cluster.link.wire import HEADER, Kind, Limits

JOB = "job-1"
WAIT_S = 20.0


class Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Beat(Wire):
    kind: Literal["beat"] = "beat"
    step: int = 0
    text: str = ""


class Evict(Wire):
    kind: Literal["evict"] = "evict"
    node: str


class Desired(Wire):
    kind: Literal["desired"] = "desired"
    step: int = 0
    text: str = ""


INCOMING: TypeAdapter[Any] = TypeAdapter(Annotated[Beat | Evict, Field(discriminator="kind")])
OUTGOING: TypeAdapter[Any] = TypeAdapter(Desired)


@functools.cache
def folder(name: str = "own") -> Path:
    """A folder of `megascale certs init`; another name, another authority."""
    place = Path(tempfile.mkdtemp(prefix=f"megascale-certs-{name}-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    make_folder(place, [], job=JOB, force=True)
    return place


def driver() -> Security:
    return Security.load(folder(), role="driver")


@functools.cache
def client(name: str = "node-1", role: Role = Role.NODE) -> Security:
    """A client's end with a token of this name and role."""
    path = folder() / f"{name}-{role}.token"
    make_token(driver(), name, role, days=1, path=path)
    return Security.load(folder(), role="client", token=path)


@dataclass
class Recorder:
    """A handler that notes everything; ``answer``: whether it answers beats."""

    answer: bool = False
    heard: list[tuple[Any, ...]] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
    audited: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def connected(self, peer: Peer) -> None:
        self.heard.append(("connected", peer.name))
        self.peers.append(peer)

    def received(self, peer: Peer, message: BaseModel) -> None:
        self.heard.append(("received", peer.name, message))
        if isinstance(message, Beat) and message.text == "fail":
            raise RuntimeError("a bug of the handler")
        if self.answer and isinstance(message, Beat):
            peer.send(Desired(step=message.step, text="answer"))

    def lost(self, peer: Peer, why: str) -> None:
        self.heard.append(("lost", peer.name, why))

    def audit(self, action: str, details: dict[str, Any]) -> None:
        self.audited.append((action, details))

    def messages(self) -> list[Any]:
        return [entry[2] for entry in self.heard if entry[0] == "received"]


@asynccontextmanager
async def serving(recorder: Recorder, port: int = 0, limits: Limits | None = None) -> AsyncIterator[tuple[str, int]]:
    """A driver's end; its address."""
    server = LinkServer(
        driver(), JOB, INCOMING, recorder, audit=recorder.audit, limits=limits,
        permits=lambda role, message: role is (Role.ADMIN if isinstance(message, Evict) else Role.NODE),
    )  # fmt: skip
    port = await server.start("127.0.0.1", port)
    try:
        yield "127.0.0.1", port
    finally:
        await server.close()


@asynccontextmanager
async def running(client_end: LinkClient) -> AsyncIterator[LinkClient]:
    """A client whose `run` runs."""
    task = asyncio.create_task(client_end.run())
    try:
        yield client_end
    finally:
        client_end.close()
        await asyncio.wait_for(task, WAIT_S)


def play(scenario: Callable[[], Coroutine[Any, Any, None]], loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop) -> None:
    """Run a scenario, in the event loop that drivers use unless another is asked for."""
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())


async def until(condition: Any) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


class Raw:
    """A client that can break every rule: frames made by hand over a real TLS connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.challenge, self.sequence = b"", 0

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, address: tuple[str, int], security: Security | None = None, *, local: str | None = None
    ) -> AsyncIterator["Raw"]:
        """After the greeting; ``local``: the address to connect from."""
        context, own = (security or client()).client_context(), None if local is None else (local, 0)
        async with asyncio.timeout(WAIT_S):
            reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname=address[0], local_addr=own)
        raw = cls(reader, writer)
        try:
            raw.challenge = (await raw.read())[1]
            yield raw
        finally:
            writer.transport.abort()

    async def read(self) -> tuple[Kind, bytes, bytes]:
        """The next frame: kind, challenge, JSON."""
        async with asyncio.timeout(WAIT_S):
            length, kind, _, challenge = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            return Kind(kind), challenge, await self.reader.readexactly(length)

    def frame(
        self, kind: int, content: bytes, *, sequence: int | None = None, challenge: bytes | None = None, length: int | None = None
    ) -> bytes:
        number = self.sequence if sequence is None else sequence
        self.sequence += 1
        return HEADER.pack(len(content) if length is None else length, kind, number, challenge or self.challenge) + content

    def send(self, kind: int, content: bytes, **header: Any) -> None:
        self.writer.write(self.frame(kind, content, **header))

    async def admit(self, security: Security | None = None) -> None:
        """Show the token, and wait to be let in."""
        self.send(Kind.TOKEN, wire.Shown(token=(security or client()).read_token()).model_dump_json().encode())
        assert (await self.read())[0] is Kind.ADMITTED

    async def goodbye(self) -> str:
        """The word with which the driver ends the connection; empty: none."""
        try:
            while True:
                kind, _, content = await self.read()
                if kind is Kind.GOODBYE:
                    return wire.Goodbye.model_validate_json(content).why
        except (asyncio.IncompleteReadError, OSError):
            return ""

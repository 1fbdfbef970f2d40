"""The loader of a host: a process that reads every row its ranks need once, and hands batches over in shared memory.

Local rank 0 starts it (`loader_client.py`) with a listening socket and a pipe. It waits for all ranks of the host, makes a
ring of ``SLOTS`` batches, and fills slot after slot while a free one is left; a slot is free again when every rank has
released the batch in it, so the slowest rank holds it back and it holds nobody up. It keeps no position: what it reads follows from
what the ranks ask for, so a new loader goes on exactly where a killed one was.

It ends by itself: when all ranks have said goodbye; when rank 0 dies before it came; and, after telling the others, when a rank
dies, when the ranks do not come within the limit, when they want different things, or at a damaged row. JAX is never imported:
a device runtime, or half a gigabyte of it, has no place here.
"""

import logging
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megascale_jax.data.wire import Connection, Message, accept
from megascale_jax.errors import DataError

if TYPE_CHECKING:
    from megascale_jax.data.host_batches import HostBatches

SLOTS = 4
"""Batches of the ring: two that a rank may still use (`host_iterator.py`), two that are ready or being filled."""

GAVE_UP = 3
"""Exit code when a new try would not help; the reason is the last thing written."""


@dataclass
class _Member:
    """A rank that is connected."""

    rank: int
    hello: Message
    connection: Connection
    released: int
    """Batches that start before this sample are needed no more."""


class _Over(Exception):
    """Every rank that is left has been told, or has gone: nothing more to do."""


class Loader:
    """Serves the ``local_size`` ranks that connect to ``listener``; ``run`` may be called once."""

    def __init__(self, listener: socket.socket, lifeline: int, local_size: int, limit_s: float):
        """``lifeline``: a pipe whose other end dies with rank 0. ``limit_s``: longest wait for all ranks to come, seconds."""
        self._listener, self._lifeline = listener, lifeline
        self._local_size, self._limit_s = local_size, limit_s
        self._members: dict[int, _Member] = {}
        self._selector = selectors.DefaultSelector()
        self._position = 0

    def run(self) -> str | None:
        """Serve until there is nothing more to do; why it gave up, if it did."""
        reason = None
        with suppress(_Over):
            try:
                self._gather()
                self._serve(self._open())
            except DataError as error:
                reason = str(error)
                for member in self._members.values():
                    self._tell(member, {"kind": "error", "text": reason})
        for member in self._members.values():
            member.connection.close()
        return reason

    def _gather(self) -> None:
        """Wait until all ranks have come."""
        deadline = time.monotonic() + self._limit_s
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._lifeline, selectors.EVENT_READ)
        while len(self._members) < self._local_size:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(self._local_size)) - set(self._members))
                raise DataError(
                    f"Of the {self._local_size} processes of this host, local ranks {missing} have not asked for data within "
                    f"{self._limit_s:.0f} s. Look at their output."
                )
            for key, _ in ready:
                if key.fileobj is self._listener:
                    if (connection := accept(self._listener)) is not None:
                        self._selector.register(connection, selectors.EVENT_READ)
                elif key.fileobj == self._lifeline:
                    self._selector.unregister(self._lifeline)
                    if 0 not in self._members:
                        raise _Over
                elif isinstance(key.fileobj, Connection):
                    self._greet(key.fileobj)
        if self._lifeline in self._selector.get_map():
            self._selector.unregister(self._lifeline)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _greet(self, connection: Connection) -> None:
        member = next((member for member in self._members.values() if member.connection is connection), None)
        if member is not None:  # it should say nothing before it has the ring
            self._hear(member)
            return
        message, _ = connection.receive()
        if message is None or message["kind"] != "hello":
            self._selector.unregister(connection)
            connection.close()
            return
        if message["rank"] in self._members:
            connection.send({"kind": "error", "text": f"Two processes of this host call themselves local rank {message['rank']}."})
            raise DataError(f"Two processes of this host call themselves local rank {message['rank']}. Check the launcher.")
        self._members[message["rank"]] = _Member(message["rank"], message, connection, message["samples"])

    def _open(self) -> "HostBatches":
        """Check that all want the same, and make the ring for it."""
        from megascale_jax.data.host_batches import HostBatches

        hellos = [self._members[rank].hello for rank in range(self._local_size)]
        wanted, batch = hellos[0]["request"], hellos[0]["request"]["global_batch_size"]
        for rank, hello in enumerate(hellos):
            for key, value in wanted.items():
                if hello["request"].get(key) != value:
                    raise DataError(f"Local rank 0 wants data with {key} {value}, local rank {rank} with {hello['request'].get(key)}.")
        positions = [hello["samples"] for hello in hellos]
        spread = max(positions) - min(positions)
        # After the death of a loader, one rank may have got a batch more than another.
        if spread and (spread % batch or spread > SLOTS * batch or not all(hello["again"] for hello in hellos)):
            raise DataError(f"The processes of this host want to go on at different samples: {positions}. Did all restore one checkpoint?")
        blocks = sorted({tuple(hello["data_indices"]) for hello in hellos})
        batches = HostBatches(wanted, blocks, SLOTS)
        self._position = min(positions)
        for member in self._members.values():
            block = blocks.index(tuple(member.hello["data_indices"]))
            self._tell(member, {"kind": "ring", "shape": asdict(batches.ring.shape), "block": block}, batches.descriptor)
        batches.close_descriptor()
        return batches

    def _serve(self, batches: "HostBatches") -> None:
        slot = 0
        while True:
            while self._is_full(batches.global_batch_size):
                self._hear_some(None)
            batches.fill(slot, self._position)
            self._hear_some(0)
            for member in list(self._members.values()):
                if self._position >= member.hello["samples"]:
                    self._tell(member, {"kind": "batch", "samples": self._position, "slot": slot})
            self._position += batches.global_batch_size
            slot = (slot + 1) % SLOTS

    def _is_full(self, batch: int) -> bool:
        return self._position - min(member.released for member in self._members.values()) >= SLOTS * batch

    def _hear_some(self, timeout: float | None) -> None:
        """What the ranks have to say; without a time-out, wait for it as long as one lives."""
        for key, _ in self._selector.select(timeout):
            self._hear(next(member for member in self._members.values() if member.connection is key.fileobj))

    def _hear(self, member: _Member) -> None:
        message, _ = member.connection.receive()
        if message is None:
            self._leave(member)
            raise DataError(f"Local rank {member.rank} of this host has died, so no more data is read for the others. See its output.")
        match message["kind"]:
            case "released":
                member.released = max(member.released, message["samples"])
            case "why":
                self._tell(member, {"kind": "because", "text": self._state()})
            case "bye":
                self._leave(member)
                if not self._members or (member.rank == 0 and self._listener.fileno() >= 0):
                    raise _Over

    def _state(self) -> str:
        least = min(member.released for member in self._members.values())
        behind = [member.rank for member in self._members.values() if member.released == least]
        return f"the next batch to read starts at sample {self._position}, local ranks {behind} use the one at {least}"

    def _leave(self, member: _Member) -> None:
        self._selector.unregister(member.connection)
        member.connection.close()
        del self._members[member.rank]

    def _tell(self, member: _Member, message: dict[str, Any], descriptor: int | None = None) -> None:
        with suppress(OSError):  # it has died: hearing it says so
            member.connection.send(message, descriptor)


def main() -> None:
    """``python -m megascale_jax.data.loader LISTENER LOCAL_SIZE LIMIT_S``, with the lifeline as standard input."""
    listener, local_size, limit_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the ranks: they finish their step, save, and say goodbye
        signal.signal(number, signal.SIG_IGN)
    # Grain imports JAX where there is one, but does not need it, and warns that it is not there.
    sys.modules["jax"] = None  # type: ignore[assignment]
    logging.getLogger("absl").setLevel(logging.ERROR)
    if reason := Loader(socket.socket(fileno=listener), sys.stdin.fileno(), local_size, limit_s).run():
        print(reason, file=sys.stderr)
        sys.exit(GAVE_UP)


if __name__ == "__main__":
    main()

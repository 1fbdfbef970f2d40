"""Messages between a loader and the ranks of its host: JSON objects over a Unix socket that has no file.

The socket lives in the abstract namespace, so it vanishes with the processes that hold it; it keeps the borders of messages,
and passes the descriptor of the ring. Only processes of the same user are let in. The death of either side is an end of
the stream at once for the other.

    rank -> loader    hello {rank, request, data_indices, samples, again}   wanted from this sample on
                      released {samples}                                    batches that start before it may be overwritten
                      why {}                                                what am I waiting for?
                      bye {}                                                an orderly end; without it, a death
    loader -> rank    ring {shape, block} and the descriptor
                      batch {samples, slot}
                      because {text}                                        answer to `why`
                      error {text}                                          no batch will come, and a new try would not help
"""

import hashlib
import json
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

_BACKLOG = 1024
_MAX_BYTES = 1 << 17
_SEND_LIMIT_S = 30.0
"""The other side reads all the time, from a thread or between two batches."""


class Connection:
    """One end of a connection. ``send`` may be called by one thread while another receives."""

    def __init__(self, connected: socket.socket):
        self._socket = connected
        seconds = int(_SEND_LIMIT_S)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any], descriptor: int | None = None) -> None:
        """Send one message. Raises ``OSError`` when the other side has gone or does not read for ``_SEND_LIMIT_S`` seconds."""
        data = json.dumps(message).encode()
        assert len(data) <= _MAX_BYTES, f"a message of {len(data)} bytes"
        if descriptor is None:
            self._socket.send(data)
        else:
            socket.send_fds(self._socket, [data], [descriptor])

    def receive(self) -> tuple[Message | None, int | None]:
        """The next message, and the descriptor that came with it (to be closed by the caller); no message at the end of the stream."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _MAX_BYTES, 1)
        except ConnectionResetError:
            # It died with words of ours unread. That is reported before its own last words, which may matter.
            data, descriptors, _, _ = socket.recv_fds(self._socket, _MAX_BYTES, 1)
        return (json.loads(data) if data else None), (descriptors[0] if descriptors else None)

    def end(self) -> None:
        """End the stream in both directions, which wakes a thread that receives."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def listen(name: str) -> socket.socket:
    """A socket that ranks connect to. Raises ``OSError`` (EADDRINUSE) while another process holds that name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_address(name))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def accept(listener: socket.socket) -> Connection | None:
    """The next connection, or None when it was of another user."""
    connected, _ = listener.accept()
    return _own(connected)


def connect(name: str) -> Connection:
    """Connect to the listener of that name. Raises ``ConnectionRefusedError`` when there is none of this user."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.connect(_address(name))
    except OSError:
        connected.close()
        raise
    if (connection := _own(connected)) is None:
        raise ConnectionRefusedError("the loader's socket belongs to another user")
    return connection


def _own(connected: socket.socket) -> Connection | None:
    _, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user == os.getuid():
        return Connection(connected)
    connected.close()
    return None


def _address(name: str) -> bytes:
    return f"\0megascale-data-{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()[:24]}".encode()

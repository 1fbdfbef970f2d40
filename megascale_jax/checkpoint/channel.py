"""Messages between a trainer and its keeper, and between keepers: JSON, then bytes, over a stream socket.

On the socket of a host, file descriptors travel along, so that memory is handed over instead of copied. Between hosts the
one who connects proves that it knows the run's secret by answering a challenge (HMAC-SHA256); nothing that arrives is executed
or unpickled. Every wait has a limit; a peer that is gone, silent or not understood raises ConnectionError.
"""

import array
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
from collections.abc import Buffer, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

_HEADER = struct.Struct("!IQ")
_LONGEST_TEXT = 64 << 20
_CHUNK = 4 << 20
_NONCE_BYTES = 32


class Channel:
    """One connection. ``limit_s``: longest time without a byte while something is expected."""

    def __init__(self, connection: socket.socket, limit_s: float):
        connection.settimeout(limit_s)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            # a message leaves in two pieces, and the second would wait for the receipt of the first
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def local_address(self) -> str:
        """This side's address, which the other host reaches."""
        return self._socket.getsockname()[0]

    def limit(self, limit_s: float | None) -> None:
        """Change the limit; ``None``: wait for as long as the peer lives. Raises ConnectionError when the connection is closed."""
        try:
            self._socket.settimeout(limit_s)
        except OSError as error:
            raise ConnectionError(f"the connection is closed: {error}") from error

    def send(self, message: Mapping[str, Any], payload: Buffer = b"", descriptors: Sequence[int] = ()) -> None:
        """Send a message, with bytes or file descriptors beside it."""
        text = json.dumps(message).encode()
        data = memoryview(payload).cast("B")
        try:
            header = _HEADER.pack(len(text), data.nbytes)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            sent = self._socket.sendmsg([header], rights)
            self._socket.sendall(header[sent:] + text)
            for start in range(0, data.nbytes, _CHUNK):
                self._socket.sendall(data[start : start + _CHUNK])
        except OSError as error:
            raise ConnectionError(f"cannot send: {error or type(error).__name__}") from error

    def receive(self, into: Buffer | None = None) -> tuple[dict[str, Any], bytes, list[int]]:
        """The next message, its bytes and its descriptors; bytes go to ``into``, which must be as long, if it is given."""
        try:
            header, descriptors = self._receive_header()
            length, size = _HEADER.unpack(header)
            if length > _LONGEST_TEXT:
                raise ConnectionError(f"a message of {length} bytes; expected at most {_LONGEST_TEXT}")
            message = json.loads(self._receive(bytearray(length)))
            if into is not None and size:
                target = memoryview(into).cast("B")
                if target.nbytes != size:
                    raise ConnectionError(f"{size} bytes arrive where {target.nbytes} were expected")
                self._receive(target)
                return message, b"", descriptors
            if size > _LONGEST_TEXT:
                raise ConnectionError(f"{size} bytes arrive that nobody asked for")
            return message, bytes(self._receive(bytearray(size))), descriptors
        except ValueError as error:
            raise ConnectionError(f"not a message: {error}") from error
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(f"no answer: {error or type(error).__name__}") from error

    def ask(self, message: Mapping[str, Any], payload: Buffer = b"", descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send, and the answer. Raises ConnectionError, OSError when the other side answers with an ``error``."""
        self.send(message, payload, descriptors)
        answer = self.receive()[0]
        if "error" in answer:
            raise OSError(answer["error"])
        return answer

    def challenge(self, secrets_known: Sequence[str]) -> bool:
        """Whether the other side knows one of the secrets; ask once, before anything else."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self.send({"op": "challenge"}, nonce)
        answer = self.receive()[1]
        return any(hmac.compare_digest(answer, _proof(secret, nonce)) for secret in secrets_known)

    def prove(self, secret: str) -> None:
        """The other end of `challenge`."""
        nonce = self.receive()[1]
        self.send({"op": "proof"}, _proof(secret, nonce))

    def _receive_header(self) -> tuple[bytes, list[int]]:
        content, ancillary, _, _ = self._socket.recvmsg(_HEADER.size, socket.CMSG_SPACE(4 * 8), socket.MSG_CMSG_CLOEXEC)
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if not content:
            raise ConnectionError("the other side has closed the connection")
        return content + bytes(self._receive(bytearray(_HEADER.size - len(content)))), list(descriptors)

    def _receive(self, target: Any) -> Any:
        view = memoryview(target).cast("B")
        done = 0
        while done < view.nbytes:
            got = self._socket.recv_into(view[done : done + _CHUNK])
            if not got:
                raise ConnectionError("the other side has closed the connection in the middle of a message")
            done += got
        return target


def _proof(secret: str, nonce: bytes) -> bytes:
    return hmac.new(secret.encode(), nonce, hashlib.sha256).digest()


def connect_tcp(host: str, port: int, secret: str, limit_s: float) -> Channel:
    """A channel to another host's keeper, authenticated. Raises ConnectionError."""
    try:
        channel = Channel(socket.create_connection((host, port), timeout=limit_s), limit_s)
    except OSError as error:
        raise ConnectionError(f"cannot reach {host}:{port}: {error}") from error
    channel.prove(secret)
    return channel


def keeper_address(folder: Path) -> bytes:
    """Socket of the keeper of a folder, in the namespace of sockets without a file: nothing is left behind, no path is too long."""
    return f"\0megascale-keeper-{os.getuid()}-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:24]}".encode()


def connect_unix(folder: Path, limit_s: float) -> Channel:
    """A channel to the keeper of a folder on this host. Raises ConnectionError when there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(limit_s)
    try:
        connection.connect(keeper_address(folder))
        if not is_own(connection):
            raise OSError("the socket belongs to another user")
    except OSError as error:
        connection.close()
        raise ConnectionError(f"no keeper answers for {folder}: {error}") from error
    return Channel(connection, limit_s)


def is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is this user's."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user == os.getuid()

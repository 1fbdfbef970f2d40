"""Addresses of this host; free ports below the range that the kernel hands out to clients, so that nobody takes one before its use."""

import os
import secrets
import socket
from random import Random

from megascale_jax.errors import UsageError

_FIRST, _LAST = 20000, 32000
_TRIES = 400


def address_towards(host: tuple[str, int]) -> str:
    """The address of this host from which another one is reached; nothing is sent. Raises OSError when there is no way."""
    family, *_, target = socket.getaddrinfo(*host, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def free_ports(address: str, count: int) -> tuple[int, ...]:
    """Ports of an address of this host that nobody uses now. Raises UsageError when there are not as many."""
    found: list[int] = []
    for port in Random(os.getpid() ^ secrets.randbits(32)).sample(range(_FIRST, _LAST), _TRIES):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return tuple(found)
    raise UsageError(f"found {len(found)} free ports between {_FIRST} and {_LAST} on {address}, expected {count}")


def parse_address(text: str, option: str) -> tuple[str, int]:
    """HOST:PORT as a pair; a host that is an IPv6 address stands in brackets. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{option} is {text!r}; expected HOST:PORT")
    return host.strip("[]"), int(port)

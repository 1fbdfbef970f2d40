"""Which processes of a run share a machine, as a plain value.

``MEGASCALE_LOCAL_RANK`` and ``MEGASCALE_LOCAL_SIZE`` decide where a launcher sets them; else the processes with the same
``host_identity`` share a host, in the order of their ranks. Half of a pair, or numbers that cannot be, is a ``DataError``.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale_jax.errors import DataError

LOCAL_RANK = "MEGASCALE_LOCAL_RANK"
LOCAL_SIZE = "MEGASCALE_LOCAL_SIZE"


@dataclass(frozen=True)
class HostGroup:
    """The processes of one run on one host. Local rank 0 starts the loader; ``name`` is unlike that of any other run there."""

    local_rank: int
    local_size: int
    name: str

    def __post_init__(self) -> None:
        if not 0 <= self.local_rank < self.local_size:
            raise DataError(f"{LOCAL_RANK} is {self.local_rank}; expected a number in [0, {LOCAL_SIZE} = {self.local_size}).")


def host_identity() -> str:
    """The same for two processes exactly when they can share memory through a socket: machine and network namespace."""
    parts = [socket.gethostname()]
    for path in (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")):
        try:
            parts.append(str(path.readlink()) if path.is_symlink() else path.read_text().strip())
        except OSError:  # a sandbox without /proc: the host name alone must do
            continue
    return " ".join(parts)


def host_group(hosts: Sequence[str], rank: int, run: str, environment: Mapping[str, str] = os.environ) -> HostGroup:
    """The group of ``rank``, when ``hosts[r]`` is the host identity of rank r and ``run`` names the run.

    Raises ``DataError`` when the environment says only half of it, or something impossible.
    """
    given = {name: environment.get(name, "") for name in (LOCAL_RANK, LOCAL_SIZE)}
    if any(given.values()):
        if not all(value.isdecimal() for value in given.values()):
            shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise DataError(f"{shown}; expected two numbers. A launcher sets both or none.")
        return HostGroup(int(given[LOCAL_RANK]), int(given[LOCAL_SIZE]), run)
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return HostGroup(neighbours.index(rank), len(neighbours), run)

"""What the driver needs of whatever runs nodes: a few idempotent requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

NODES_FOLDER = "nodes"
"""Below the job's folder: a folder for each node."""


@dataclass(frozen=True)
class Start:
    """What an executor is started with."""

    driver: tuple[str, int]
    """Where the driver listens."""
    security: Path
    """Folder of the job's certificates; the token of a node is ``tokens/NODE`` in it."""
    folder: Path
    """The job's own, below the run folder."""
    training: Sequence[str]
    """Argv of a training process."""


class Backend(Protocol):
    """Runs one executor per node. Every request may come again, and has then no further effect."""

    def ensure(self, name: str) -> None:
        """Have the node's executor running, if it is to be had. Raises BackendError when the request itself fails."""
        ...

    def is_alive(self, name: str) -> bool | None:
        """Whether the executor runs; ``None`` when this backend cannot tell faster than its missing beats do. Asked again and again of the
        nodes that are part of the job, as `ensure` is of those that are missed.
        """
        ...

    def remove(self, name: str, machine: str, reason: str) -> None:
        """Take an evicted node and the machine it ran on out of service, for other jobs too. Raises BackendError."""
        ...

    def restore(self, name: str, machine: str) -> None:
        """Take a removed node back into service. Raises BackendError."""
        ...

    def taken_back(self) -> Mapping[str, str]:
        """Removed nodes, with their machines, that somebody has put back into service without the driver; each until it is restored."""
        ...

    def switch(self, machine: str) -> str | None:
        """What names the switch that a machine is under, the same for all under it; ``None`` where only the node itself can tell, or
        nobody. Never waits.
        """
        ...

    def release(self, name: str) -> None:
        """The job is over: end the executor if it is still there. Raises BackendError."""
        ...

    def facts(self) -> Mapping[str, str]:
        """Where things are, for the status page: name -> text."""
        ...


class Engine(Protocol):
    """Where the nodes of a job come from, known before its driver is there. Raises BackendError when it is not to be had here."""

    @property
    def names(self) -> tuple[str, ...]:
        """Nodes that the backend should have running: those that train and the spares."""
        ...

    @property
    def launch(self) -> str:
        """Identity of what started this driver, if that starts another one whenever one ends without success; else empty.

        Such a driver leaves at SIGTERM and lets the job go on.
        """
        ...

    @property
    def host(self) -> str:
        """Address of this machine at which the nodes reach the driver."""
        ...

    def backend(self, start: Start) -> Backend:
        """The nodes themselves."""
        ...

    def start_over(self) -> str:
        """Too few nodes are left: ask for a new set of them if that is possible; what became of it, empty where there is no such thing."""
        ...

"""What the driver needs of whatever runs nodes: a few idempotent requests."""

from collections.abc import Mapping
from typing import Protocol


class Backend(Protocol):
    """Runs one executor per node. Every request may come again, and has then no further effect."""

    def ensure(self, name: str) -> None:
        """Have the node's executor running, if it is to be had. Raises BackendError when the request itself fails."""
        ...

    def is_alive(self, name: str) -> bool | None:
        """Whether the executor runs; ``None`` when this backend cannot tell faster than its missing beats do."""
        ...

    def remove(self, name: str, reason: str) -> None:
        """Take the node out of service: it was evicted, or the job is over. Raises BackendError."""
        ...

    def restore(self, name: str) -> None:
        """Take a removed node back into service. Raises BackendError."""
        ...

    def facts(self) -> Mapping[str, str]:
        """Where things are, for the status page: name -> text."""
        ...

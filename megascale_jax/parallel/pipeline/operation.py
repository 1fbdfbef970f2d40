"""One operation of a tick: what the tables of `operations.py` are made of. No JAX."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

OperationKind = Literal["compute", "collective", "copy", "glue"]


@dataclass(frozen=True)
class Operation:
    """One step of a tick; ``axes`` are the mesh axes of a collective, ``beside`` what it shares a phase with, if that is fixed."""

    name: str
    kind: OperationKind
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    axes: tuple[str, ...] = ()
    beside: str | None = None

    @property
    def slot(self) -> str:
        """Letter of the slot."""
        return self.name[0]

    @property
    def branch(self) -> int | None:
        """Number of the branch; ``None`` where there is none."""
        number = self.name[1:].split(".")[0]
        return int(number) if number else None

    @property
    def verb(self) -> str:
        """What it does."""
        return self.name.split(".")[1]


def compute(name: str, reads: Iterable[str], *writes: str) -> Operation:
    """A heavy kernel."""
    return Operation(name, "compute", tuple(reads), writes)


def collective(name: str, axis: str, reads: str, writes: str) -> Operation:
    """A collective over one mesh axis."""
    return Operation(name, "collective", (reads,), (writes,), (axis,))


def glue(name: str, reads: Iterable[str], *writes: str) -> Operation:
    """Element-wise work."""
    return Operation(name, "glue", tuple(reads), writes)

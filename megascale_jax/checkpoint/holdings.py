"""What a keeper holds, and what it is asked: the values that its threads pass to each other."""

from dataclasses import dataclass, field
from typing import Any

from megascale_jax.checkpoint.manifest import Manifest
from megascale_jax.checkpoint.slot import Slot, SlotIndex
from megascale_jax.checkpoint.stage_two import Target


@dataclass
class Held:
    """A slot in the keeper's hands. ``sums`` are there once it is verified; ``readers``: threads of stage 2 that are not done with it."""

    slot: Slot
    index: SlotIndex | None = None
    sums: list[int] | None = None
    readers: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether stage 2 reads it, so that it must not be filled again."""
        return self.readers > 0


@dataclass
class Rank:
    """What the keeper knows of one local rank."""

    slots: dict[int, Held] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    released: bool = False


@dataclass
class Request:
    """What rank ``number`` asks, with descriptors it sent and those that go back."""

    number: int
    rank: Rank
    message: dict[str, Any]
    descriptors: list[int]
    reply_descriptors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """A filled slot to be carried on for a rank."""

    rank: Rank
    held: Held
    index: SlotIndex
    target: Target | None
    """``None``: the state stays in memory only."""
    manifest: Manifest | None = None
    """Once it is published."""


@dataclass(frozen=True)
class Work:
    """Something that a keeper has in hand: ``what`` is ``copying``, ``writing``, ``publication`` or ``upload``."""

    what: str
    step: int

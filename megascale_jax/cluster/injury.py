"""What a drill can do to a job: the job as it needs it, a fault, and the injury that a fault leaves until it is undone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megascale_jax.cluster.proxy import Proxy

RECOVER_LIMIT_S = 300.0
"""Longest that most kinds may hold the training up."""


class Power(Protocol):
    """Switches nodes off, with all that runs on them, and on again."""

    def off(self, node: str) -> None:
        """Nothing of the node runs, and nothing starts."""
        ...

    def on(self, node: str) -> None:
        """The contrary."""
        ...


class Job(Protocol):
    """A job under drill."""

    folder: Path
    """Its run folder."""
    proxy: Proxy | None
    """Relays between its nodes and its driver; ``None``: it was started without one."""
    power: Power | None
    """Switches its nodes off; ``None``: that is not in the drill's hand."""
    has_small_disk: bool
    """Its folder is a disk of its own, which may be filled."""
    shrinks: bool
    """It may go on with fewer nodes."""
    flips_bits: bool
    """Its processes flip a bit of their state when they are asked to."""
    compiles_anew: bool
    """Its processes compile at every start, and take nothing from those before."""
    isolates: bool
    """It acts on slow nodes (`cluster.slow_nodes.action`)."""

    def status(self) -> dict[str, Any] | None:
        """What the driver says; ``None`` while there is none."""
        ...

    def kill_driver(self) -> None:
        """SIGKILL to the driver, and its command again."""
        ...


def nothing() -> None:
    """Nothing has to be undone."""


@dataclass
class Injury:
    """What was done to a job. ``undo`` once it has recovered, or as soon as ``is_enough`` says so; ``nodes`` were hurt."""

    nodes: frozenset[str]
    undo: Callable[[], None] = nothing
    is_enough: Callable[[dict[str, Any] | None], bool] | None = None
    measured: dict[str, float] = field(default_factory=dict)
    """What only this kind has, seconds; complete once `amiss` was asked."""
    amiss: Callable[[], str] = lambda: ""
    """Once training goes on: what was not as this kind needs it; empty when nothing was."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault. ``interrupts``: training has to be interrupted; ``None``: it may be."""

    inject: Callable[[Job, dict[str, Any], str], Injury]
    hits_node: bool = True
    interrupts: bool | None = True
    lacks: Callable[[Job], str] = field(default=lambda job: "")
    """Why it cannot be injected into a job; empty when it can."""
    looks_for: str | None = None
    """Rule that should say something, although nothing needs to be done; without that the fault counts as not recovered."""
    after_steps: int = 1
    """Of the present attempt, before the rule can know."""
    interruptions: int | None = None
    """So many there must be, and no node evicted; ``None``: any number."""
    limit_s: float = RECOVER_LIMIT_S
    """Longest that it may hold the training up before it counts as not recovered."""

"""Phases of a job and states of a node, and every move that is legal (paper section 4.1)."""

from collections.abc import Mapping
from enum import StrEnum

from megascale_jax.errors import MegascaleError


class IllegalMoveError(MegascaleError):
    """A move that the tables do not have: a fault of the driver itself, never of the cluster."""


class Phase(StrEnum):
    """What a job is doing."""

    REPLACING = "replacing"
    """Seats are filled with nodes; a job starts here."""
    RESTORING = "restoring"
    """Processes start, meet and load the newest state; ends with their first step."""
    RUNNING = "running"
    SUSPENDED = "suspended"
    """Every training process is being ended."""
    DIAGNOSING = "diagnosing"
    STOPPING = "stopping"
    """An operator asked for the end; processes save."""
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


class NodeStatus(StrEnum):
    """What a node is to the job."""

    READY = "ready"
    """Connected, without a seat: a spare."""
    ASSIGNED = "assigned"
    LOST = "lost"
    """Not heard of; takes up its place again when it comes back in time."""
    CORDONED = "cordoned"
    """Gets no seat until an operator says so; keeps the one it has."""
    EVICTED = "evicted"


ENDS = frozenset({Phase.FINISHED, Phase.STOPPED, Phase.FAILED})

JOB_MOVES: Mapping[Phase, frozenset[Phase]] = {
    Phase.REPLACING: frozenset({Phase.RESTORING, Phase.STOPPED, Phase.FAILED}),
    Phase.RESTORING: frozenset({Phase.RUNNING, Phase.SUSPENDED, Phase.STOPPING, Phase.FINISHED, Phase.FAILED}),
    Phase.RUNNING: frozenset({Phase.SUSPENDED, Phase.STOPPING, Phase.FINISHED, Phase.FAILED}),
    Phase.SUSPENDED: frozenset({Phase.STOPPING, Phase.DIAGNOSING, Phase.REPLACING, Phase.STOPPED, Phase.FAILED}),
    Phase.DIAGNOSING: frozenset({Phase.REPLACING, Phase.STOPPED, Phase.FAILED}),
    Phase.STOPPING: frozenset({Phase.STOPPED, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
    Phase.STOPPED: frozenset(),
    Phase.FAILED: frozenset(),
}

NODE_MOVES: Mapping[NodeStatus, frozenset[NodeStatus]] = {
    NodeStatus.READY: frozenset({NodeStatus.ASSIGNED, NodeStatus.LOST, NodeStatus.CORDONED, NodeStatus.EVICTED}),
    NodeStatus.ASSIGNED: frozenset({NodeStatus.READY, NodeStatus.LOST, NodeStatus.CORDONED, NodeStatus.EVICTED}),
    NodeStatus.LOST: frozenset({NodeStatus.READY, NodeStatus.ASSIGNED, NodeStatus.CORDONED, NodeStatus.EVICTED}),
    NodeStatus.CORDONED: frozenset({NodeStatus.READY, NodeStatus.ASSIGNED, NodeStatus.LOST, NodeStatus.EVICTED}),
    NodeStatus.EVICTED: frozenset({NodeStatus.READY, NodeStatus.LOST}),
}


def check_phase(old: Phase, new: Phase) -> None:
    """Raise IllegalMoveError unless a job may go from one phase to the other."""
    if new not in JOB_MOVES[old]:
        raise IllegalMoveError(f"a job cannot go from {old} to {new}; it can go to {', '.join(sorted(JOB_MOVES[old])) or 'nothing'}")


def check_status(old: NodeStatus, new: NodeStatus) -> None:
    """Raise IllegalMoveError unless a node may go from one status to the other."""
    if old != new and new not in NODE_MOVES[old]:
        raise IllegalMoveError(f"a node cannot go from {old} to {new}; it can go to {', '.join(sorted(NODE_MOVES[old]))}")

"""How often the nodes of a fleet fail, how each failure shows itself, and how long every part of a recovery takes.

One file a fleet in ``configs/fleet``, read by `megascale_jax.sim` alone. Rates are failures per 1,000 node-days of the whole job's
nodes; nothing but what a file says is known of a fleet, so every rate and time of a recovery must be there. ``source`` says for each
group where its numbers are from, and whether they are published, derived or assumed.
"""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megascale_jax.config.schema import Positive, Section

Rate = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Bandwidth = Annotated[float, Field(gt=0)]
Source = Annotated[str, Field(min_length=1)]
Shows = Literal["exit", "hang", "silent", "corrupt"]


class FaultKind(Section):
    """One kind of failure of a single node."""

    failures_per_1000_node_days: Rate = Field(description="failures of this kind per 1,000 node-days")
    shows: Shows = Field(
        description="exit: a process ends; hang: it stays in its step; silent: nothing is heard of the node; corrupt: its copy of the "
        "state is wrong, which the next comparison of states finds (train.digest_every)"
    )
    heals: Share = Field(description="share of them after which the same node goes on: a restart suffices, no node is replaced")
    found: Share = Field(
        description="share of the others in which the checks of the first diagnosis find the node; else the failure comes back "
        "until the driver's rules evict the node, or it gives up"
    )
    detect_s: Seconds | None = Field(description="from the failure until it is noticed, seconds; null: what the driver's own rules take")
    source: Source = Field(description="where these numbers are from")


class CorrelatedEvent(Section):
    """One event that takes several nodes at once, such as a switch or a power feed."""

    events_per_1000_group_days: Rate = Field(description="events per 1,000 days of one group of nodes")
    group_nodes: Positive = Field(description="nodes that it takes: neighbours in the order of ranks")
    outage_s: Seconds = Field(description="time until the group is there again, seconds")
    source: Source = Field(description="where these numbers are from")


class SlowNodes(Section):
    """Nodes that compute slower than their peers without failing."""

    share: Share = Field(description="share of nodes that are slow")
    excess: Annotated[float, Field(gt=0)] = Field(description="how much longer their passes take (0.1: 10 %)")
    step_cost: Annotated[float, Field(ge=0)] = Field(description="how much longer the job's step takes while one of them has a seat")
    source: Source = Field(description="where these numbers are from")


class RecoveryTimes(Section):
    """How long each part of a recovery takes, in its order, seconds."""

    suspend_s: Seconds = Field(description="until every node has confirmed that its training processes are gone")
    diagnose_s: Seconds = Field(description="checks of all nodes and verdict")
    replace_s: Seconds = Field(description="until a spare has taken the place of a node, images and mounts included")
    init_s: dict[Positive, Seconds] = Field(
        min_length=1, description="start of processes and communicators by GPUs of the job: linear between, and beyond by the nearest slope"
    )
    load_s: Seconds | None = Field(description="reading the state; null: its bytes over the storage's read bandwidth")
    compile_s: Seconds = Field(description="compilation, or its cached result")
    reboot_s: Seconds = Field(description="until a node that went silent and is sound is there again")
    spare_supply_s: Seconds = Field(description="until another machine is in the place of one that was evicted")
    operator_s: Seconds = Field(description="until a person has put right what the driver gave up, and started it again")
    source: Source = Field(description="where these numbers are from")


class CheckpointTimes(Section):
    """What a save costs; both stages of `checkpoint/two_stage.py`."""

    blocking_s: Seconds | None = Field(description="stage 1, which holds up the training; null: a device's bytes over host_copy_gbps")
    host_copy_gbps: Bandwidth = Field(description="device to pinned host memory, GB/s of one device")
    storage_write_gbps: Bandwidth = Field(description="storage as all nodes together write it, GB/s")
    storage_read_gbps: Bandwidth = Field(description="storage as all nodes together read it, GB/s")
    source: Source = Field(description="where these numbers are from")


class Fleet(Section):
    """Failures, recovery and checkpoints of one fleet."""

    description: Source = Field(description="which fleet this is, for readers")
    kinds: dict[str, FaultKind] = Field(min_length=1, description="failures of single nodes by name")
    correlated: dict[str, CorrelatedEvent] = Field(description="events of several nodes by name; {}: none")
    slow_nodes: SlowNodes | None = Field(description="null: none")
    recovery: RecoveryTimes = Field(description="parts of a recovery")
    checkpoint: CheckpointTimes = Field(description="parts of a save")

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if both := sorted(set(self.kinds) & set(self.correlated)):
            raise ValueError(f"{both[0]} is a kind and a correlated event; expected names that differ")
        return self

    @property
    def failures_per_1000_node_days(self) -> float:
        """Of single nodes, all kinds together."""
        return sum(kind.failures_per_1000_node_days for kind in self.kinds.values())


def init_s(recovery: RecoveryTimes, gpus: int) -> float:
    """Start of processes and communicators of a job of so many GPUs, seconds; never negative."""
    points = sorted(recovery.init_s.items())
    if len(points) == 1:
        return points[0][1]
    below, above = next((pair for pair in pairwise(points) if gpus <= pair[1][0]), (points[-2], points[-1]))
    slope = (above[1] - below[1]) / (above[0] - below[0])
    return max(0.0, below[1] + slope * (gpus - below[0]))

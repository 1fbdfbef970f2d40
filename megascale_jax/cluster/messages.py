"""What driver and executors say to each other; every message is checked against these types on arrival.

An executor says `Hello` once a connection and a `Beat` each second. The driver says `Desired`: all of what that node should be
doing, not a change, so a message that is lost, late or doubled does no harm.
"""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from megascale_jax.cluster.diagnose.request import PairTask, Port
from megascale_jax.cluster.reports import Count, ProcessReport
from megascale_jax.config.schema import NonNegative, Positive

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
Name = Annotated[str, Field(pattern=_NAME)]
Text = Annotated[str, Field(max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""One line for people. What a node says of itself is kept in the journal, so all of it has bounds."""
MOST_PORTS = 64


def is_name(text: str) -> bool:
    """Whether a node can be called so."""
    return re.fullmatch(_NAME, text) is not None


class Message(BaseModel):
    """Base of all that goes over the control link."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Hello(Message):
    """A node presents itself."""

    kind: Literal["hello"] = "hello"
    node: Name
    incarnation: str = Field(pattern=r"^[ -~]{1,64}$", description="of this executor process; a restarted one has another")
    address: str = Field(pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:%_-]{0,254}$", description="where other nodes reach this one")
    ports: tuple[Port, ...] = Field(
        min_length=1, max_length=MOST_PORTS, description="free ports there, for the coordinator of one attempt each"
    )
    software: dict[Text, Text] = Field(max_length=100, description="versions that should be the same on all nodes")
    machine: Text = Field(default="", description="what it runs on; an evicted node that comes on another machine is a new one")
    attempt: Count = Field(default=0, description="attempt whose processes it has")
    switch: Text | None = Field(default=None, description="where it hangs in the network, if known")


class Beat(Message):
    """Liveness and progress of a node."""

    kind: Literal["beat"] = "beat"
    attempt: Count = Field(description="newest attempt this node was given; 0: none")
    is_idle: bool = Field(description="no training process is left")
    processes: tuple[ProcessReport, ...] = Field(max_length=64)
    counters: dict[Text, float] = Field(default={}, description="of GPU, network and host, as they stand")


class Diagnosis(Message):
    """Outcomes of the checks of one round."""

    kind: Literal["diagnosis"] = "diagnosis"
    round: Count
    outcomes: tuple[dict[str, JsonValue], ...] = Field(max_length=200, description="each one checked by `diagnose/checks.py`")


class Command(Message):
    """What an operator asks for; see `link/operators.py` for who may."""

    kind: Literal["command"] = "command"
    action: Literal["status", "stop", "restart", "rewind", "evict", "confirm", "cordon", "uncordon"]
    node: Name | None = None
    number: Count | None = Field(default=None, description="of the eviction that is confirmed")
    rewind: tuple[NonNegative, NonNegative, Positive] | None = Field(
        default=None, description="step, first and end of the samples to skip, as train.rewinds"
    )


FromNode = Annotated[Hello | Beat | Diagnosis | Command, Field(discriminator="kind")]
"""Whatever arrives at the driver."""


class Assignment(Message):
    """One attempt's training process of a node."""

    attempt: int
    rank: int
    num_ranks: int
    coordinator: str = Field(description="host:port of rank 0's node")
    overrides: tuple[str, ...] = Field(default=(), description="of this attempt beside the run's own, such as parallel.data=2")


class DiagnosisOrder(Message):
    """Checks that a node should run now."""

    round: int
    checks: tuple[str, ...]
    limit_s: float
    pair: PairTask | None = Field(default=None, description="this node's part of a test with a neighbour")


class Desired(Message):
    """All of what a node should be doing."""

    kind: Literal["desired"] = "desired"
    beat_s: float
    assignment: Assignment | None = None
    stop_grace_s: float = Field(default=0.0, description="time between SIGTERM and SIGKILL for processes that are not wanted")
    diagnosis: DiagnosisOrder | None = None
    warm: bool = Field(default=False, description="keep a process with its imports done for the next attempt")
    leave: bool = Field(default=False, description="the run is over for this node")
    is_over: bool = Field(default=False, description="the run is over for all; a node that leaves otherwise may be replaced")


class Answer(Message):
    """What an operator's command did."""

    kind: Literal["answer"] = "answer"
    is_done: bool
    text: str
    status: dict[str, JsonValue] = {}


ToNode = Annotated[Desired | Answer, Field(discriminator="kind")]
"""Whatever the driver sends."""

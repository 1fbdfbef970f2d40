"""A job as the driver knows it, and the events that change it. Both are values and JSON; the journal holds the events.

Times are seconds on the journal's axis: the driver's monotonic clock, which goes on where it was when the driver is started again.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from megascale_jax.cluster.lifecycle import NodeStatus, Phase

CORRUPTION, LOSS_SPIKE, SLOW_NODE = "corruption", "loss_spike", "slow_node"
"""Rules whose findings are dealt with in a way of their own."""

Rewind = tuple[int, int, int]
"""A run is to go on from a checkpoint of at most this step, without samples ``first`` to ``end - 1`` (`checkpoint/line.py`)."""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Suspicion(_Value):
    """One thing that is wrong: which rule found it, and where."""

    rule: str
    node: str | None = None
    rank: int | None = None
    detail: str = ""
    is_primary: bool = True
    """False: a consequence of something else, such as a lost connection to a peer that died."""
    rewind: Rewind | None = None
    """What would undo it."""


class SlowPass(_Value):
    """Evidence that a node computed slower than its peers in a window: the pass in which that was worst, as in `slow_windows.PassTimes`."""

    name: str
    excess: float
    usual: float
    """Its excess in the windows from which it was learned."""
    cost_s: float
    waits_less: float


class SlowWindow(_Value):
    """Steps ``first <= step < end``, and the nodes that were slow in them."""

    first: int
    end: int
    slow: dict[str, SlowPass]


class Profile(_Value):
    """What is usual for a node: its excess over its peers by pass, in the first windows after it came. ``machine``: what it ran on."""

    machine: str
    windows: int = 0
    excess: dict[str, tuple[float, ...]] = {}


class Governed(_Value):
    """A node that is or was suspected of being slow; ``stage`` moves only as `governance.py` says."""

    stage: Literal["suspected", "isolated", "returned", "archived"]
    since_s: float
    evidence: str
    isolations: int = 0
    findings: str = ""
    """Of the checks after its last isolation."""


class Node(_Value):
    """One node as the job sees it."""

    status: NodeStatus
    incarnation: str
    address: str
    ports: tuple[int, ...] = ()
    machine: str = ""
    """What it runs on, as its backend names it; an eviction is of this."""
    lost_at_s: float | None = None
    faults_s: tuple[float, ...] = ()
    """When it was named as the cause of something that no check explains, or was lost."""
    reason: str = ""
    """Of an eviction or a loss."""
    is_out_of_service: bool = False
    """It was evicted, and its backend has not confirmed yet that it was taken back."""


class Incident(_Value):
    """One interruption of the training and how it was overcome; times in seconds on the journal's axis."""

    number: int
    suspicions: tuple[Suspicion, ...]
    named: tuple[str, ...]
    step: int
    """Newest step that was done when it began."""
    began_s: float
    suspended_s: float | None = None
    diagnosed_s: float | None = None
    replaced_s: float | None = None
    restored_s: float | None = None
    resumed_step: int | None = None
    """Step from which the training went on."""
    evicted: tuple[str, ...] = ()
    findings: dict[str, str] = {}
    is_planned: bool = False
    """An operator's, or the job growing back: processes save before they end."""
    rewind: Rewind | None = None


class Shape(_Value):
    """One size that the job can have."""

    num_nodes: int
    overrides: tuple[str, ...] = ()


class State(_Value):
    """A job."""

    phase: Phase = Phase.REPLACING
    since_s: float = 0.0
    attempt: int = 0
    shapes: tuple[Shape, ...]
    """Full size first."""
    shape: int = 0
    """Index of the present one."""
    seats: tuple[str | None, ...]
    """Node of each rank."""
    nodes: dict[str, Node] = {}
    idle: frozenset[str] = frozenset()
    """Nodes that confirmed that nothing of the present attempt is left."""
    best_step: int = 0
    saved_step: int = 0
    rewinds: tuple[Rewind, ...] = ()
    """All so far; every attempt is told."""
    fruitless: int = 0
    """Recoveries in a row without a step beyond the best."""
    last_best_step: int = -1
    evictions_s: tuple[float, ...] = ()
    """Automatic ones."""
    incidents: tuple[Incident, ...] = ()
    profiles: dict[str, Profile] = {}
    slow_windows: tuple[SlowWindow, ...] = ()
    """The newest ones."""
    slow: dict[str, Governed] = {}
    isolations_s: tuple[float, ...] = ()
    """When a node was isolated because it was slow."""
    alarms: tuple[str, ...] = ()
    """What a person should look at."""
    outcome: str = ""
    exit_code: int = 0
    """Of the driver's process, for a job that failed."""

    @property
    def incident(self) -> Incident | None:
        """The one that is being dealt with."""
        return self.incidents[-1] if self.incidents and self.incidents[-1].restored_s is None else None


class _Event(_Value):
    at_s: float


class Joined(_Event):
    """An executor came, or came back."""

    kind: Literal["joined"] = "joined"
    node: str
    incarnation: str
    address: str
    ports: tuple[int, ...]
    machine: str = ""


class Lost(_Event):
    """Nothing was heard of a node for too long, or its executor is known to be dead."""

    kind: Literal["lost"] = "lost"
    node: str
    incarnation: str
    reason: str
    step: int = 0


class Anomaly(_Event):
    """Rules that may act found something; all of what was found together."""

    kind: Literal["anomaly"] = "anomaly"
    attempt: int
    step: int
    suspicions: tuple[Suspicion, ...]


class Idle(_Event):
    """A node confirmed that no process of an attempt is left."""

    kind: Literal["idle"] = "idle"
    node: str
    attempt: int


class Diagnosed(_Event):
    """All outcomes of the diagnosis are in, or its time was up."""

    kind: Literal["diagnosed"] = "diagnosed"
    attempt: int
    bad: dict[str, str]
    findings: dict[str, str] = {}


class Advanced(_Event):
    """The first step of an attempt, and from time to time a later one."""

    kind: Literal["advanced"] = "advanced"
    attempt: int
    step: int
    resumed_step: int = 0
    """From which the attempt went on."""
    saved_step: int


class Ended(_Event):
    """Every process of an attempt ended well. ``is_complete``: the run has all its steps."""

    kind: Literal["ended"] = "ended"
    attempt: int
    step: int
    is_complete: bool


class Elapsed(_Event):
    """A limit of the present phase passed."""

    kind: Literal["elapsed"] = "elapsed"
    phase: Phase
    since_s: float


class Restored(_Event):
    """The backend has taken a node back into service that was evicted before."""

    kind: Literal["restored"] = "restored"
    node: str


class Judged(_Event):
    """The nodes that were slow in a window of steps. ``usual``: excess by pass of those of which it is still learned."""

    kind: Literal["judged"] = "judged"
    attempt: int
    window: SlowWindow
    usual: dict[str, dict[str, float]] = {}


class Rechecked(_Event):
    """The checks of an isolated node are over; ``bad``: what they found, empty when nothing. ``isolation``: which one of this node."""

    kind: Literal["rechecked"] = "rechecked"
    node: str
    isolation: int
    bad: str = ""
    findings: str = ""


class Ordered(_Event):
    """An operator's command, after all checks of who may give it."""

    kind: Literal["ordered"] = "ordered"
    action: Literal["stop", "restart", "rewind", "evict", "cordon", "uncordon"]
    node: str | None = None
    by: str
    step: int = 0
    rewind: Rewind | None = None


Event = Annotated[
    Joined | Lost | Anomaly | Idle | Diagnosed | Advanced | Ended | Elapsed | Restored | Judged | Rechecked | Ordered,
    Field(discriminator="kind"),
]

"""How a driven run is watched and healed: periods, limits, rules, budgets (paper section 4.1). Read by `megascale drive` alone.

All times are seconds of the driver's or of one node's own monotonic clock; a wall clock that is wrong changes nothing.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

JOB_FOLDER = "cluster"
"""Where a driver keeps its journal, below the run folder."""
DRIVER_LOCK = ".driver.lock"
"""Held by the one driver of a run folder; not in the folder above, which ``--fresh`` removes."""

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Mode = Literal["off", "observe", "act"]
NodeLabel = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")]
"""The key of a label, as Kubernetes allows it."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class FloorsConfig(_Section):
    """Least limit of each section of a training process, seconds; what a run has shown to be longer is learned on top."""

    start: Seconds = Field(default=300.0, description="imports and data")
    join: Seconds = Field(default=300.0, description="meeting the other processes")
    data: Seconds = Field(default=120.0, description="waiting for rows")
    restore: Seconds = Field(default=600.0, description="reading a state")
    compile: Seconds = Field(default=1800.0, description="the first step of a process, and the first evaluation")
    step: Seconds = Field(default=10.0, description="one step")
    evaluate: Seconds = Field(default=60.0, description="held-out loss")
    checkpoint: Seconds = Field(default=120.0, description="stage 1 of a save")
    end: Seconds = Field(default=300.0, description="the last save and summary")


class RulesConfig(_Section):
    """What is looked for, and whether finding it only says so (``observe``) or suspends the run (``act``)."""

    missed_beats: Mode = Field(default="act", description="no beat of a node for lost_after_s")
    exit: Mode = Field(default="act", description="a training process ended with an error")
    halted: Mode = Field(
        default="act", description="a process was stopped (SIGSTOP, a debugger) for halted_s, or is frozen for longer than a step may take"
    )
    no_progress: Mode = Field(default="act", description="longer in a section than its limit")
    corruption: Mode = Field(default="act", description="copies of the training state that should be equal differ (train.digest_every)")
    keyword: Mode = Field(default="observe", description="a word in a log that names a fault, such as Xid or an uncorrectable error")
    non_finite: Mode = Field(default="act", description="non_finite_steps steps in a row were skipped")
    loss_spike: Mode = Field(
        default="observe",
        description="loss_spike_steps steps in a row above the median plus loss_spike_deviations times the median absolute deviation of "
        "the last loss_spike_window good ones; act: go back to a checkpoint from before and skip the samples of the spike",
    )
    step_drift: Mode = Field(default="observe", description="steps take step_drift_ratio times as long as they did")
    traffic: Mode = Field(default="observe", description="a node's network traffic falls below traffic_ratio of what it was")
    software: Mode = Field(default="observe", description="a node runs other versions than most")
    loss_spike_window: Annotated[int, Field(ge=8)] = Field(
        default=64, description="good steps that a loss is compared with; after a start none is judged before there are so many"
    )
    loss_spike_deviations: Annotated[float, Field(gt=1)] = Field(default=8.0, description="see loss_spike")
    loss_spike_steps: AtLeastOne = Field(default=3, description="see loss_spike")
    loss_spike_margin: Count = Field(default=8, description="steps before a spike whose samples are skipped with it")
    halted_s: Seconds = Field(
        default=10.0, description="that the kernel may report a process as stopped; what trains never is, so no section's limit applies"
    )
    non_finite_steps: AtLeastOne = Field(default=8, description="skipped steps in a row that are an anomaly")
    step_drift_ratio: Annotated[float, Field(gt=1)] = Field(default=1.5, description="over the fastest the run has shown for a while")
    traffic_ratio: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.5, description="of the median of the last minutes")


class SlowNodesConfig(_Section):
    """Nodes that compute slower than their peers in real steps, window by window; see `cluster/governance.py`."""

    action: Mode = Field(
        default="observe",
        description="observe: a suspected node is an alarm, with the evidence; act: a spare takes its place once a checkpoint is there, "
        "it is checked, and it is a spare again, or evicted when it comes to that a second time",
    )
    windows: AtLeastOne = Field(default=4, description="slow in so many of the last `of` windows makes a node suspected")
    of: AtLeastOne = Field(default=5, description="see windows")
    excess: Annotated[float, Field(gt=0, lt=10)] = Field(
        default=0.05, description="a node is slow in a window if it computes longer than the median of its peers by this (0.05: 5 %)"
    )
    deviations: Annotated[float, Field(gt=0)] = Field(default=3.0, description="and by so many standard deviations of such a difference")
    steps: Annotated[int, Field(ge=8)] = Field(default=40, description="steps of a window")
    every_s: Seconds = Field(default=60.0, description="least time between the ends of two windows: what disturbs for a moment is in one")
    baseline: AtLeastOne = Field(
        default=3, description="windows in which it is learned what is usual for a node; up to half of `excess` is forgiven as that"
    )

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        if self.windows > self.of:
            raise ValueError(f"windows is {self.windows}, expected at most `of`, {self.of}")
        return self


class SlurmConfig(_Section):
    """What only ``--backend slurm`` reads."""

    host: str | None = Field(
        default=None, description="address, name or interface of the driver's node at which executors reach it; default: towards the others"
    )
    node_folder: str | None = Field(
        default=None,
        description="folder for logs and marks on a disk of each node, which gets one of its name there; may have $VARIABLES of the node; "
        "default: below SLURM_TMPDIR, TMPDIR or /tmp",
    )
    start_s: Seconds = Field(
        default=900.0,
        description="longest that an executor may take from the start of its step until it is heard of, before the step is ended and "
        "another one started: containers are pulled, many nodes import from one file system",
    )
    requeue: bool = Field(default=True, description="have the batch job queued again, for other nodes, when too few are left")
    max_requeues: Count = Field(default=3, description="times that the job may have been queued again, by Slurm's own doing too")


class KubernetesConfig(_Section):
    """What only ``--backend kubernetes`` reads."""

    switch_labels: tuple[NodeLabel, ...] = Field(
        default=(
            "fabric.topograph.run/tier-0",
            "network.topology.nvidia.com/leaf",
            "topology.k8s.aws/network-node-layer-4",
            "topology.k8s.aws/network-node-layer-3",
            "cloud.google.com/gce-topology-subblock",
            "cloud.provider.com/topology-rack",
        ),
        description="labels (PREFIX/NAME) of the cluster's nodes that say under which switch or in which rack each is; the "
        "first one that a node has counts, so the most specific comes first. A diagnosis pairs neighbours under one switch; []: whatever "
        "they are under, and the driver needs no right to list nodes",
    )


class ClusterConfig(_Section):
    """The driver's settings."""

    beat_s: Seconds = Field(default=1.0, description="time between two beats of an executor")
    lost_after_s: Seconds = Field(default=15.0, description="a node is lost after so long without a beat")
    settle_s: Seconds = Field(
        default=0.5, description="wait for further anomalies after the first, to tell the cause from its consequences"
    )
    stop_s: Seconds = Field(default=20.0, description="longest that a node may take to confirm that its processes are gone")
    save_s: Seconds = Field(default=300.0, description="longest that the processes may take to save when an operator stops the run")
    diagnose_s: Seconds = Field(default=120.0, description="longest that a diagnosis may take")
    grace_s: Seconds = Field(default=10.0, description="a lost node that returns within this keeps its place; then a spare takes it")
    wait_s: Seconds = Field(default=600.0, description="longest wait for enough nodes before the run shrinks or ends")
    first_wait_s: Seconds = Field(default=7200.0, description="longest wait for enough nodes before the first start: images, new machines")
    node_order: tuple[str, ...] = Field(
        default=(),
        description="nodes, or the machines they are on, in the order of their ranks, then the spares (`megascale place`, --node-order); "
        "those missing at the first start are waited for wait_s; []: by name",
    )
    warm: bool = Field(default=True, description="each node keeps a process with its imports done, seconds nearer to the next start")
    shrink: bool = Field(default=False, description="go on with a smaller data-parallel size when no node is left, and grow back later")
    strikes: AtLeastOne = Field(default=3, description="unexplained faults of one node within strike_window_s that evict it")
    strike_window_s: Seconds = Field(default=3600.0, description="faults of a node older than this are forgotten")
    evict_on_corruption: bool = Field(
        default=True, description="a node is evicted when a comparison of states names it once: what computes wrongly does so again"
    )
    max_evictions: Count | None = Field(
        default=None, description="nodes that may be evicted within strike_window_s without an operator; null: 2, or a 192nd of the job's"
    )
    max_rewinds: Count = Field(default=3, description="rewinds after loss spikes in one job; further spikes are only observed")
    fruitless_recoveries: AtLeastOne = Field(default=5, description="recoveries without a new step after which the run ends")
    limit_factor: Annotated[float, Field(gt=1)] = Field(default=5.0, description="a section's limit is this times the longest pass seen")
    compile_factor: Annotated[float, Field(gt=1)] = Field(default=12.0, description="the same for the first step of a process")
    two_persons: bool = Field(default=True, description="an eviction by hand needs a second admin's confirmation")
    floors: FloorsConfig = Field(default=FloorsConfig(), description="least limits of sections")
    rules: RulesConfig = Field(default=RulesConfig(), description="anomalies")
    slow_nodes: SlowNodesConfig = Field(default=SlowNodesConfig(), description="nodes that compute slower than their peers")
    webhook: str | None = Field(
        default=None,
        pattern=r"^(https?://\S+|\$[A-Za-z_][A-Za-z0-9_]*)$",
        max_length=2000,
        description="where alarms and incidents are posted as JSON: an https URL, http to 127.0.0.1 only, or $NAME for the driver's "
        "environment variable that holds it: most such URLs are secrets, and this file is kept with the run",
    )
    slurm: SlurmConfig = Field(default=SlurmConfig(), description="nodes of a Slurm allocation")
    kubernetes: KubernetesConfig = Field(default=KubernetesConfig(), description="nodes that are pods")

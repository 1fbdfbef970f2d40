"""A job as both fault simulations see it: rates and times in whole nanoseconds, from a fleet, a driver's settings and a save's costs.

Every time is an integer, so what is booked sums up to the wall time exactly.

Rules that both simulations share:

- Failures come at times of their own, whatever the job does (Poisson, each kind by itself). One that comes while no process runs
  strikes when the next attempt starts to restore.
- An attempt trains ``interval`` and saves for ``blocking``, again and again. A save counts once its copy is safe, ``lag`` after its end:
  of a failure the training since the newest such save is recomputed. Stage 2 has two slots, so an upload longer than an interval holds up
  the next save by the rest.
- A node that is replaced takes a spare; another machine is there in its place after a while. Without a spare the job waits.
"""

from dataclasses import dataclass

import numpy as np

from megascale_jax.cluster.limits import Limits
from megascale_jax.config.cluster import ClusterConfig
from megascale_jax.config.fleet import FaultKind, Fleet, Shows, SlowNodes, init_s
from megascale_jax.errors import ConfigError

SECOND_NS = 10**9
DAY_NS = 86_400 * SECOND_NS
NEVER_NS = 1 << 62
RECURS_S = 60.0
"""Training after a restart until a failure that was not found shows again: assumed. Less than the shortest replay counts alike."""
_STEADY_PASSES = 20


@dataclass(frozen=True)
class CheckpointCosts:
    """Of one save, seconds. ``interval_s``: training between two; ``upload_s``: from its end until the storage has it whole.

    ``copy_s``: until another host's memory has it, which outlives the loss of one node; ``None``: there is no such copy.
    """

    interval_s: float
    blocking_s: float
    upload_s: float
    copy_s: float | None = None


@dataclass(frozen=True)
class Event:
    """One kind of failure of a job of ``nodes`` nodes; times in nanoseconds.

    ``takes``: nodes at once. ``away_ns``: until a machine is in the place of one that is replaced; ``back_ns``: until a silent node
    that is sound is back by itself. ``lag_ns``: age that a save must have to survive it.
    """

    name: str
    shows: Shows
    per_second: float
    takes: int
    groups: int
    detect_ns: int
    heals: float
    found: float
    away_ns: int
    back_ns: int
    lag_ns: int


@dataclass(frozen=True)
class Case:
    """One job on one fleet. Times in nanoseconds."""

    nodes: int
    spares: int
    events: tuple[Event, ...]
    step_ns: int
    interval_ns: int
    stage_one_ns: int
    upload_ns: int
    suspend_ns: int
    diagnose_ns: int
    replace_ns: int
    restore_ns: int
    compile_ns: int
    operator_ns: int
    digest_ns: int
    slow_nodes: SlowNodes | None
    cluster: ClusterConfig

    @property
    def blocking_ns(self) -> int:
        """How long a save holds up the training: stage 1, or until stage 2 has left its slot."""
        return self.blocking_at(self.interval_ns)

    def blocking_at(self, interval_ns: int) -> int:
        """The same with another interval between saves."""
        return max(self.stage_one_ns, self.upload_ns - interval_ns)

    @property
    def per_second(self) -> float:
        """Failures of the whole job a second."""
        return sum(event.per_second for event in self.events)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the whole job; infinite without any."""
        return 1 / self.per_second if self.per_second else float("inf")

    @property
    def recurs_ns(self) -> int:
        """Of training after a restart until a failure that was not found shows again."""
        return ns(RECURS_S)

    def incidents_until_evicted(self, event: Event) -> int | None:
        """Incidents of a failure that no check finds until ``strikes`` evict its node; ``None``: the driver gives up first."""
        between_s = (event.detect_ns + self.suspend_ns + self.diagnose_ns + self.restore_ns + self.compile_ns + self.recurs_ns) / SECOND_NS
        cluster = self.cluster
        if cluster.strikes > cluster.fruitless_recoveries or (cluster.strikes - 1) * between_s >= cluster.strike_window_s:
            return None
        return cluster.strikes


def ns(seconds: float) -> int:
    """Whole nanoseconds."""
    return round(seconds * SECOND_NS)


def case_of(
    fleet: Fleet,
    cluster: ClusterConfig,
    *,
    nodes: int,
    gpus_per_node: int,
    spares: int,
    step_s: float,
    costs: CheckpointCosts,
    load_s: float,
    digest_every: int | None,
) -> Case:
    """Put together what both simulations need. Raises ConfigError for times with which no recovery would ever end."""
    recovery = fleet.recovery
    for name, seconds, limit_s in (
        ("suspend_s", recovery.suspend_s, cluster.stop_s),
        ("diagnose_s", recovery.diagnose_s, cluster.diagnose_s),
    ):
        if seconds > limit_s:
            setting = "stop_s" if name == "suspend_s" else "diagnose_s"
            raise ConfigError(
                f"recovery.{name} of the fleet is {seconds:g}, but cluster.{setting} is {limit_s:g}: every one would run out of time; "
                f"raise cluster.{setting}"
            )
    if costs.interval_s < step_s:
        raise ConfigError(f"a checkpoint interval of {costs.interval_s:g} s is shorter than a step of {step_s:g} s; give at least one step")
    memory_lag = ns(costs.upload_s if costs.copy_s is None else costs.copy_s)
    events = [_single(name, kind, fleet, cluster, nodes, step_s, memory_lag) for name, kind in fleet.kinds.items()]
    for name, one in fleet.correlated.items():
        groups = -(-nodes // one.group_nodes)
        per_second = one.events_per_1000_group_days * groups / 1000 / 86_400
        away, lag = ns(one.outage_s), ns(costs.upload_s)
        detect = ns(cluster.lost_after_s)
        events.append(Event(name, "silent", per_second, min(one.group_nodes, nodes), groups, detect, 1.0, 1.0, away, away, lag))
    return Case(
        nodes=nodes,
        spares=spares,
        events=tuple(events),
        step_ns=ns(step_s),
        interval_ns=ns(costs.interval_s),
        stage_one_ns=ns(costs.blocking_s),
        upload_ns=ns(costs.upload_s),
        suspend_ns=ns(recovery.suspend_s),
        diagnose_ns=ns(recovery.diagnose_s),
        replace_ns=ns(recovery.replace_s),
        restore_ns=ns(init_s(recovery, nodes * gpus_per_node)) + ns(load_s),
        compile_ns=ns(recovery.compile_s),
        operator_ns=ns(recovery.operator_s),
        digest_ns=0 if digest_every is None else ns(digest_every * step_s),
        slow_nodes=fleet.slow_nodes,
        cluster=cluster,
    )


def _single(name: str, kind: FaultKind, fleet: Fleet, cluster: ClusterConfig, nodes: int, step_s: float, lag_ns: int) -> Event:
    recovery = fleet.recovery
    detect_s = detection_s(kind.shows, cluster, step_s) if kind.detect_s is None else kind.detect_s
    per_second = kind.failures_per_1000_node_days * nodes / 1000 / 86_400
    heals, found = (0.0, 1.0) if kind.shows == "corrupt" and cluster.evict_on_corruption else (kind.heals, kind.found)
    away, back = ns(recovery.spare_supply_s), ns(recovery.reboot_s)
    return Event(name, kind.shows, per_second, 1, nodes, ns(detect_s), heals, found, away, back, lag_ns)


def detection_s(shows: Shows, cluster: ClusterConfig, step_s: float) -> float:
    """What the driver's own rules take to notice a failure, seconds: the same limits as `cluster/anomaly.py` has for a steady run."""
    match shows:
        case "exit":
            return cluster.settle_s
        case "hang":
            limits = Limits.of(cluster)
            limits.learn({"step": step_s, "compile": step_s})
            return limits.limit_s("step", {"step": _STEADY_PASSES}) + cluster.settle_s
        case "silent":
            return cluster.lost_after_s
        case "corrupt":  # the comparison itself; how long it is until then is drawn
            return cluster.settle_s


def split_run(
    ran_ns: np.ndarray, interval_ns: np.ndarray, blocking_ns: int, lag_ns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of an attempt that ran so long: time trained, time saved, and the part of the training whose save is safe; all int64[n]."""
    cycle = interval_ns + blocking_ns
    cycles, rest = np.divmod(ran_ns, cycle)
    trained = cycles * interval_ns + np.minimum(rest, interval_ns)
    safe = np.maximum((ran_ns - lag_ns) // cycle, 0) * interval_ns
    return trained, ran_ns - trained, safe


def run_until(train_ns: np.ndarray, interval_ns: np.ndarray, blocking_ns: int) -> np.ndarray:
    """How long an attempt must run until it has trained so long, int64[n]; the save after the very end is not waited for."""
    return train_ns + blocking_ns * (np.maximum(train_ns - 1, 0) // interval_ns)

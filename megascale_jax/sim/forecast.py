"""What a run on a fleet will take: goodput with its spread, the best checkpoint interval, cost, capacity. Everything here is simulated.

An experiment says what is trained and how it is saved and healed, a fleet how often what fails and how long which part of a recovery takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite

from megascale_jax.config.advice import on_nodes
from megascale_jax.config.fleet import Fleet
from megascale_jax.config.layout import MeshShape
from megascale_jax.config.memory import state_bytes
from megascale_jax.config.price import Price
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import ConfigError
from megascale_jax.sim.capacity import Answer, checklist, checkpoint_bytes
from megascale_jax.sim.cost import Cost, Power, Sensitivity, cost_of, tornado
from megascale_jax.sim.faults.case import DAY_NS, SECOND_NS, Case, CheckpointCosts, case_of
from megascale_jax.sim.faults.closed_forms import best_interval_s, daly_s, expected_ettr, meta_ettr_of, young_s
from megascale_jax.sim.faults.decisions import Decided, decide
from megascale_jax.sim.faults.draws import Batch, draw
from megascale_jax.sim.faults.fast import simulate
from megascale_jax.sim.faults.outcome import Outcome
from megascale_jax.sim.step_time import step_seconds

_GB = 1e9
_HORIZONS = (2.0, 8.0, 32.0)
"""Times the time without failures in which the wanted tokens must be done."""
CONFIRMATIONS = 1_100_000
"""Words of nodes that the driver's code hears in one job, at most: about 20 s of one core. Longer jobs are cut to a part."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for: ``days`` of wall time or ``tokens`` to train, one of both; ``step_s`` or ``mfu``, else the step is predicted.

    ``interval_s``: training between two saves; ``None``: the experiment's own. ``memory_copies``: states are copied to a neighbour's
    memory too, and one lost node goes on from there. ``own_detection``: failures are noticed as the driver's rules do. ``decided``: jobs
    in which the driver's own code decides.
    """

    days: float | None = None
    tokens: float | None = None
    step_s: float | None = None
    mfu: float | None = None
    spares: int = 0
    interval_s: float | None = None
    seeds: int = 100
    decided: int = 1
    memory_copies: bool = False
    own_detection: bool = False
    host_memory_gib: float | None = None
    power: Power | None = None
    price: Price | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a request that contradicts itself."""
        if (self.days is None) == (self.tokens is None):
            raise ConfigError("expected one of --days and --tokens: how long the job runs, or what it is to train")
        for option, value in (("--days", self.days), ("--tokens", self.tokens), ("--checkpoint-interval", self.interval_s)):
            if value is not None and not (value > 0 and isfinite(value)):
                raise ConfigError(f"{option} {value:g}: expected a number above 0")


@dataclass(frozen=True)
class Intervals:
    """Training between two saves in seconds, and the goodput that the expectation gives each.

    ``own`` and ``best``, the latter by trying all; ``young``, ``daly``; ``meta_ettr`` is Meta's formula at the own one.
    """

    own_s: float
    own_ettr: float
    best_s: float
    best_ettr: float
    young_s: float
    daly_s: float
    meta_ettr: float


@dataclass(frozen=True)
class Forecast:
    """One experiment on one fleet. ``decided``: jobs with the driver's own decisions, of ``decided_days``; ``array_goodput``: the arrays'
    result on the very same draws.
    """

    experiment: Experiment
    fleet_name: str
    case: Case
    wanted: Wanted
    step_s: float
    outcome: Outcome
    decided: tuple[Decided, ...]
    decided_days: float
    array_goodput: tuple[float, ...]
    intervals: Intervals
    cost: Cost
    sensitivities: tuple[Sensitivity, ...]
    capacity: tuple[Answer, ...]

    @property
    def tokens(self) -> float:
        """Trained tokens, the mean over the seeds."""
        return float(self.outcome.steps.mean()) * self.experiment.tokens_per_step


def sized(experiment: Experiment, nodes: int) -> Experiment:
    """The experiment on so many nodes: other data-parallel size, all else the same. Raises ConfigError when that cannot be."""
    return on_nodes(experiment, nodes, gpus_per_node(experiment))


def gpus_per_node(experiment: Experiment) -> int:
    """Devices of one node. Raises ConfigError where the system has no limit."""
    per_node = experiment.system.devices_per_node
    if per_node is None:
        raise ConfigError(f"system.devices_per_node of {experiment.system.device} is null; set it: failures are counted by node")
    return per_node


def case_for(experiment: Experiment, fleet: Fleet, wanted: Wanted, step_s: float) -> Case:
    """The job as the fault simulations see it. Raises ConfigError."""
    per_node, gpus = gpus_per_node(experiment), MeshShape.of(experiment.parallel).size
    if gpus % per_node:
        raise ConfigError(f"{gpus} devices fill no whole number of nodes of {per_node}; choose parallel.* so that they do")
    every = experiment.train.checkpoint.every
    if wanted.interval_s is None and every is None:
        raise ConfigError("train.checkpoint.every is null: nothing is saved before the end; set it, or give --checkpoint-interval")
    size, times = checkpoint_bytes(experiment), fleet.checkpoint
    of_device = state_bytes(experiment).master_and_moments
    load_s = size / times.storage_read_gbps / _GB if fleet.recovery.load_s is None else fleet.recovery.load_s
    costs = CheckpointCosts(
        interval_s=wanted.interval_s if wanted.interval_s is not None else (every or 0) * step_s,
        blocking_s=of_device / times.host_copy_gbps / _GB if times.blocking_s is None else times.blocking_s,
        upload_s=size / times.storage_write_gbps / _GB,
        copy_s=_copy_s(experiment, of_device) if wanted.memory_copies else None,
    )
    if wanted.own_detection:
        kinds = {name: kind.model_copy(update={"detect_s": None}) for name, kind in fleet.kinds.items()}
        fleet = fleet.model_copy(update={"kinds": kinds})
    return case_of(
        fleet,
        experiment.cluster,
        nodes=gpus // per_node,
        gpus_per_node=per_node,
        spares=wanted.spares,
        step_s=step_s,
        costs=costs,
        load_s=load_s,
        digest_every=experiment.train.digest_every,
    )


def _copy_s(experiment: Experiment, of_device: float) -> float:
    rates = experiment.system.rates
    if rates is None:
        raise ConfigError(f"system.rates of {experiment.system.device} is null, so the time of a copy to a neighbour is not known")
    return of_device / rates.network_gbps / _GB


def forecast(experiment: Experiment, fleet_name: str, fleet: Fleet, wanted: Wanted) -> Forecast:
    """Simulate. Raises ConfigError for what cannot run, or would not end within 32 times its time without failures."""
    step_s = step_seconds(experiment, wanted.step_s, wanted.mfu)
    case = case_for(experiment, fleet, wanted, step_s)
    outcome = simulated(case, experiment, wanted)
    decided_days = _decided_days(case, float(outcome.wall_ns.mean()) / DAY_NS)
    draws = [draw(case, seed, round(decided_days * DAY_NS)) for seed in range(wanted.decided)]
    decided = tuple(decide(case, one, round(decided_days * DAY_NS)) for one in draws)
    same = [simulate(case, Batch.of(case, [one]), round(decided_days * DAY_NS)).mean_goodput for one in draws]
    tokens = float(outcome.steps.mean()) * experiment.tokens_per_step
    wall_s = float(outcome.wall_ns.mean()) / SECOND_NS
    cost = cost_of(wall_s, case.nodes, case.spares, gpus_per_node(experiment), tokens, wanted.power, wanted.price)
    capacity = checklist(experiment, fleet, case, wanted.host_memory_gib)
    return Forecast(
        experiment=experiment,
        fleet_name=fleet_name,
        case=case,
        wanted=wanted,
        step_s=step_s,
        outcome=outcome,
        decided=decided,
        decided_days=decided_days,
        array_goodput=tuple(same),
        intervals=intervals_of(case),
        cost=cost,
        sensitivities=tuple(tornado(case)),
        capacity=tuple(capacity),
    )


def simulated(case: Case, experiment: Experiment, wanted: Wanted, seeds: int | None = None) -> Outcome:
    """All seeds at once, for the wanted days or until the wanted tokens are done."""
    seeds = wanted.seeds if seeds is None else seeds
    if wanted.days is not None:
        end_ns = round(wanted.days * DAY_NS)
        return simulate(case, Batch.of(case, [draw(case, seed, end_ns) for seed in range(seeds)]), end_ns)
    assert wanted.tokens is not None, "one of both is given"
    steps = wanted.tokens / experiment.tokens_per_step
    end_ns = 0
    for factor in _HORIZONS:
        end_ns = round(factor * steps * case.step_ns) + DAY_NS
        outcome = simulate(case, Batch.of(case, [draw(case, seed, end_ns) for seed in range(seeds)]), end_ns, need_steps=steps)
        if outcome.is_finished.all():
            return outcome
    raise ConfigError(
        f"{wanted.tokens:g} tokens are not done within {end_ns / DAY_NS:.0f} days, {_HORIZONS[-1]:g} times their time without failures; "
        "save more often, or use fewer nodes"
    )


def _decided_days(case: Case, days: float) -> float:
    """Days in which the driver's code hears no more than `CONFIRMATIONS` words of nodes."""
    a_day = case.per_second * 86_400 * case.nodes
    return min(days, CONFIRMATIONS / a_day) if a_day else days


def intervals_of(case: Case) -> Intervals:
    """The case's own interval beside the best one."""
    own_s, blocking_s = case.interval_ns / SECOND_NS, case.stage_one_ns / SECOND_NS
    best_s = best_interval_s(case)
    return Intervals(
        own_s=own_s,
        own_ettr=expected_ettr(case),
        best_s=best_s,
        best_ettr=expected_ettr(case, best_s) if isfinite(best_s) else 1.0,
        young_s=young_s(blocking_s, case.mtbf_s),
        daly_s=daly_s(blocking_s, case.mtbf_s) if isfinite(case.mtbf_s) else case.mtbf_s,
        meta_ettr=meta_ettr_of(case),
    )


def what_if(experiment: Experiment, fleet: Fleet, wanted: Wanted) -> Mapping[str, float | None]:
    """Mean goodput of the same seeds if one thing were otherwise, by its name; the first is as it is. ``None``: the job would not end."""
    step_s = step_seconds(experiment, wanted.step_s, wanted.mfu)
    base = case_for(experiment, fleet, wanted, step_s)
    best_s = best_interval_s(base)
    changes: dict[str, Case] = {
        "as it is": base,
        "half the failures": _with_rates(base, 0.5),
        "twice the failures": _with_rates(base, 2.0),
        "noticed at once": replace(base, events=tuple(replace(event, detect_ns=0) for event in base.events)),
        "diagnosed at once": replace(base, diagnose_ns=0),
        "restored in half the time": replace(base, restore_ns=base.restore_ns // 2),
        "every failing node found at once": replace(base, events=tuple(replace(event, found=1.0) for event in base.events)),
        "no spares": replace(base, spares=0),
        "twice the spares": replace(base, spares=2 * base.spares),
    }
    if not wanted.own_detection:
        changes["noticed as the driver's own rules do"] = case_for(experiment, fleet, replace(wanted, own_detection=True), step_s)
    if not wanted.memory_copies and experiment.system.rates is not None:
        changes["copies in a neighbour's memory"] = case_for(experiment, fleet, replace(wanted, memory_copies=True), step_s)
    if isfinite(best_s):
        best = replace(wanted, interval_s=max(best_s, step_s))
        changes[f"a save every {best_s / 60:.1f} min, the best"] = case_for(experiment, fleet, best, step_s)
    found: dict[str, float | None] = {}
    for name, case in changes.items():
        try:
            found[name] = simulated(case, experiment, wanted).mean_goodput
        except ConfigError:
            found[name] = None
    return found


def _with_rates(case: Case, factor: float) -> Case:
    return replace(case, events=tuple(replace(event, per_second=factor * event.per_second) for event in case.events))

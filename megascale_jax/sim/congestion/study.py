"""Every algorithm on every workload, seed by seed: what `megascale network --study congestion` and the benchmark
print. All numbers are simulated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megascale_jax.config.network import NetworkConfig
from megascale_jax.sim.congestion import workloads
from megascale_jax.sim.congestion.engine import Load, Outcome, Setting, simulate
from megascale_jax.sim.congestion.fabric import Fabric
from megascale_jax.sim.congestion.parameters import ALGORITHMS, Algorithm

HOSTS, LEAVES = 64, 4
LIMIT_S = 0.1
"""Of simulated time; the longest run here needs a tenth of it."""
_MB = 1_000_000


@dataclass(frozen=True)
class Workload:
    """A name, what it is, and how its flows are drawn."""

    name: str
    words: str
    flows: Callable[[Fabric, np.random.Generator], Load]


def all_workloads() -> tuple[Workload, ...]:
    """Those compared."""
    return (
        Workload("incast", f"{HOSTS - 1} hosts send 1 MB each to one", lambda fabric, g: workloads.incast(fabric, HOSTS - 1, _MB, g)),
        Workload("all-to-all", "128 KB a pair, all at once", lambda fabric, g: workloads.all_to_all(fabric, 131_072, g)),
        Workload(
            "all-to-all incast",
            "256 KB a pair, all to one host after the other",
            lambda fabric, g: workloads.all_to_all_incast(fabric, 262_144, g),
        ),
        Workload("victim", "a flow of 1 MB beside an incast of 32", lambda fabric, g: workloads.victim(fabric, 32, _MB, g)),
        Workload("two jobs", "rings of 4 and 8 MB a host over the same spines", lambda fabric, g: workloads.two_jobs(fabric, 4 * _MB, g)),
    )


@dataclass(frozen=True)
class Row:
    """One run."""

    workload: str
    algorithm: Algorithm
    seed: int
    gbit_s: float
    """Rate at which all bytes arrived, first start to last end."""
    pauses: int
    paused_ms: float
    """Summed over links."""
    nic_pauses: int
    """Of them, those that a ToR switch told a NIC."""
    p99_ms: float
    """Of flow completion times."""
    slowdown: float
    """Completion time of flow 0 over that of the same flow alone; the victim's in that workload."""
    peak_mb: float
    dropped: int
    lost: int
    """Packets sent that neither came nor were dropped: 0, or the simulator is wrong."""


def rows(
    config: NetworkConfig,
    seeds: int,
    algorithms: Sequence[Algorithm] = ALGORITHMS,
    chosen: Sequence[Workload] | None = None,
    told: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """A row for each workload, algorithm and seed; the same flows for all algorithms. ``told``: hears of each as it is done."""
    fabric, found = Fabric(config, HOSTS, LEAVES), list[Row]()
    for workload in chosen or all_workloads():
        for seed in range(seeds):
            for algorithm in algorithms:
                load = workload.flows(fabric, np.random.default_rng([seed, HOSTS]))
                setting = Setting.of(algorithm, fabric)
                outcome = simulate(fabric, load, setting, seed=seed, limit_s=LIMIT_S)
                found.append(_row(fabric, workload.name, algorithm, seed, setting, outcome))
                told(found[-1])
    return found


def _row(fabric: Fabric, workload: str, algorithm: Algorithm, seed: int, setting: Setting, outcome: Outcome) -> Row:
    load = outcome.load
    first = Load(load.source[:1], load.target[:1], load.spine[:1], load.size[:1], np.zeros(1))
    alone = simulate(fabric, first, setting, limit_s=LIMIT_S).completion_s[0]
    return Row(
        workload=workload,
        algorithm=algorithm,
        seed=seed,
        gbit_s=outcome.gbit_s,
        pauses=int(outcome.pauses.sum()),
        paused_ms=float(outcome.paused_s.sum() * 1e3),
        nic_pauses=int(outcome.pauses[: fabric.hosts].sum()),
        p99_ms=float(np.quantile(np.nan_to_num(outcome.completion_s, nan=LIMIT_S), 0.99) * 1e3),
        slowdown=float(np.nan_to_num(outcome.completion_s[0], nan=LIMIT_S) / alone),
        peak_mb=float(outcome.peak_bytes.max() / 1e6),
        dropped=outcome.dropped,
        lost=outcome.packets_sent - outcome.packets_received - outcome.dropped if not np.isnan(outcome.completion_s).any() else 0,
    )

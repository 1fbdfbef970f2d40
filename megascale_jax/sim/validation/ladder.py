"""What each layer of detail buys on Table 2: from one efficiency for each system to the full simulation. No JAX.

A rung fits an efficiency of each system on its two calibration rows, ``t = FLOPs / (E x peak) x (1 + bubble) x stragglers + fixed``, and
is scored on the 12 held-out rows. Fixed costs are the simulator's own, never fitted: four rows do not identify them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megascale_jax.sim.validation.calibration import constants_of
from megascale_jax.sim.validation.published import CALIBRATION_GPUS, TABLE2, Scaling
from megascale_jax.sim.validation.runs import REFERENCE_MICRO_BATCH, paper_run
from megascale_jax.sim.validation.score import mean_and_worst
from megascale_jax.sim.validation.tables import table2

_STEPS = 200
_MOST_SLOWDOWN = 0.4


@dataclass(frozen=True)
class Rung:
    """Held-out errors, fractions, of a model of so much detail."""

    name: str
    fitted: str
    mean: float
    worst: float


@dataclass(frozen=True)
class _Facts:
    """Of a row: useful seconds at the peak, its bubble, chance of a slow node, fixed seconds."""

    row: Scaling
    useful_s: float
    bubble: float
    chance: float
    fixed_s: float


def ladder(micro_batch: int) -> list[Rung]:
    """All rungs for a micro-batch; the last one is the simulator."""
    facts = [_facts(row, micro_batch) for row in TABLE2]
    bare = [replace(fact, bubble=0.0, fixed_s=0.0) for fact in facts]
    sourced = paper_run("megascale", "175B", 256, 768, micro_batch).device.slow_node_slowdown
    slowdowns = [_MOST_SLOWDOWN * step / _STEPS for step in range(_STEPS + 1)]
    fitted = min(slowdowns, key=lambda slowdown: sum(error**2 for row, error in _errors(facts, slowdown) if row.gpus in CALIBRATION_GPUS))
    full = table2().means["simulated" if micro_batch == REFERENCE_MICRO_BATCH else f"micro-batch {micro_batch}"]
    return [
        _rung("one efficiency a system", "E", bare, 0.0),
        _rung("+ bubble", "E", [replace(fact, fixed_s=0.0) for fact in facts], 0.0),
        _rung("+ fixed costs", "E", facts, 0.0),
        _rung("+ stragglers, published", "E", facts, sourced),
        _rung("+ stragglers, fitted", "E, g", facts, fitted),
        Rung("full simulation", "e, g", *full),
    ]


def _facts(row: Scaling, micro_batch: int) -> _Facts:
    run = paper_run(row.system, "175B", row.gpus, row.batch, micro_batch).calibrated(constants_of(micro_batch))
    work, device, times = run.work, run.device, run.times
    return _Facts(
        row,
        work.model_flops("full") / (work.devices * device.peak),
        (work.pipe - 1) / (work.virtual_stages * work.micro_batches),
        1 - (1 - device.slow_node_share) ** work.nodes(device.per_node),
        times.data_s + times.embedding_s + times.optimizer_s + times.input_s + times.host_s,
    )


def _errors(facts: Sequence[_Facts], slowdown: float) -> list[tuple[Scaling, float]]:
    """Relative errors with each system's efficiency fitted on its calibration rows."""
    found: list[tuple[Scaling, float]] = []
    for system in ("megatron-lm", "megascale"):
        lines: list[tuple[Scaling, float, float]] = []
        for fact in facts:
            if fact.row.system == system:
                slope = fact.useful_s * (1 + fact.bubble) * (1 + slowdown * fact.chance) / fact.row.seconds
                lines.append((fact.row, slope, 1 - fact.fixed_s / fact.row.seconds))
        known = [(slope, rest) for row, slope, rest in lines if row.gpus in CALIBRATION_GPUS]
        inverse = sum(slope * rest for slope, rest in known) / sum(slope * slope for slope, _ in known)
        found += [(row, inverse * slope - rest) for row, slope, rest in lines]
    return found


def _rung(name: str, fitted: str, facts: Sequence[_Facts], slowdown: float) -> Rung:
    return Rung(name, fitted, *mean_and_worst([error for row, error in _errors(facts, slowdown) if row.gpus not in CALIBRATION_GPUS]))

"""The two calibrated constants: fitted on four rows of Table 2, kept in ``configs/calibration/table2.yaml``, refitted by a test. No JAX.

For a given GEMM ceiling the iteration is linear in the slow nodes' slowdown, so that one has a closed form, and the ceiling is found by
golden-section search. The least sum of squared relative errors of the four rows decides.
"""

from dataclasses import replace
from functools import lru_cache

from pydantic import Field

from megascale_jax.config import search
from megascale_jax.config.hardware import Share
from megascale_jax.config.load import load_document
from megascale_jax.config.schema import Section
from megascale_jax.errors import ConfigError
from megascale_jax.sim.validation.published import CALIBRATION_GPUS, TABLE2
from megascale_jax.sim.validation.runs import Constants, Run, paper_run

_GOLDEN = (5**0.5 - 1) / 2
_CEILINGS = (0.6, 1.0)
"""Shares of the peak between which the ceiling is looked for."""
_ITERATIONS = 40


class Fitted(Section):
    """The constants of one micro-batch."""

    micro_batch: int = Field(description="rows of a micro-batch that the fit assumed")
    gemm_ceiling: Share = Field(description="as of system.hardware")
    slow_node_slowdown: float = Field(description="as of system.hardware")

    @property
    def constants(self) -> Constants:
        """Both."""
        return Constants(self.gemm_ceiling, self.slow_node_slowdown)


class Calibration(Section):
    """The kept file."""

    rows: tuple[str, ...] = Field(description="rows that were fitted")
    fits: tuple[Fitted, ...] = Field(description="by micro-batch")


@lru_cache
def kept() -> Calibration:
    """The file. Raises ConfigError where it cannot be read."""
    return load_document("calibration", str(search.shipped_tree() / "calibration" / "table2.yaml"), Calibration)


def constants_of(micro_batch: int) -> Constants:
    """Kept constants of a micro-batch. Raises ConfigError for one that was never fitted."""
    for fit in kept().fits:
        if fit.micro_batch == micro_batch:
            return fit.constants
    raise ConfigError(f"configs/calibration/table2.yaml has no fit for micro-batch {micro_batch}; fitted: {kept().fits}")


def calibration_runs(micro_batch: int) -> list[tuple[Run, float]]:
    """The rows that are fitted: runs, and their published seconds."""
    rows = [row for row in TABLE2 if row.gpus in CALIBRATION_GPUS]
    return [(paper_run(row.system, "175B", row.gpus, row.batch, micro_batch), row.seconds) for row in rows]


def fit(micro_batch: int) -> tuple[Constants, float]:
    """Best constants, and the root of the mean squared relative error that they leave."""
    runs = calibration_runs(micro_batch)
    low, high = _CEILINGS
    for _ in range(_ITERATIONS):
        width = _GOLDEN * (high - low)
        if _best_slowdown(runs, high - width)[1] < _best_slowdown(runs, low + width)[1]:
            high = low + width
        else:
            low = high - width
    ceiling = (low + high) / 2
    slowdown, squares = _best_slowdown(runs, ceiling)
    return Constants(ceiling, slowdown), (squares / len(runs)) ** 0.5


def _best_slowdown(runs: list[tuple[Run, float]], ceiling: float) -> tuple[float, float]:
    """Slow nodes' slowdown of least squares at a ceiling, and the sum of squared relative errors."""
    lines: list[tuple[float, float]] = []
    for run, seconds in runs:
        device = replace(run.device, gemm_ceiling=ceiling, slow_node_slowdown=1.0)
        times = run._replace(device=device).times
        lines.append((times.stragglers_s / seconds, 1 - (times.iteration_s - times.stragglers_s) / seconds))
    slowdown = sum(slope * rest for slope, rest in lines) / sum(slope * slope for slope, _ in lines)
    return slowdown, sum((slope * slowdown - rest) ** 2 for slope, rest in lines)

"""What a simulated job did with its time, in the classes of `megascale goodput`."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megascale_jax.observe.booked import KINDS, Kind

QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Outcome:
    """Many simulated jobs, one a seed; every array has one element for each.

    ``booked_ns`` int64 by class: they sum up to ``wall_ns`` exactly. ``steps``: float64, steps whose result counts. int64: ``incidents``,
    ``replaced`` (spares that took a seat), ``gave_up`` (times that a person had to help), ``waited_ns`` (for a spare, within the classes).
    ``is_finished``: whether the wanted steps were reached, or the wanted days are over.
    """

    booked_ns: Mapping[Kind, np.ndarray]
    wall_ns: np.ndarray
    steps: np.ndarray
    incidents: np.ndarray
    replaced: np.ndarray
    gave_up: np.ndarray
    waited_ns: np.ndarray
    is_finished: np.ndarray

    @property
    def goodput(self) -> np.ndarray:
        """Effective training time ratio of each: training time that counts / wall time."""
        return self.booked_ns["training"] / self.wall_ns

    def total_ns(self) -> dict[Kind, int]:
        """Of all jobs together by class, in the vocabulary's order; sums up to the sum of their wall times exactly."""
        return {kind: int(self.booked_ns[kind].sum()) for kind in KINDS}

    @property
    def mean_goodput(self) -> float:
        """Training time over wall time of all jobs together."""
        return int(self.booked_ns["training"].sum()) / int(self.wall_ns.sum())

    def spread(self, values: np.ndarray) -> tuple[float, float, float]:
        """5th percentile, median and 95th percentile over the seeds."""
        low, middle, high = np.quantile(values, QUANTILES)
        return float(low), float(middle), float(high)

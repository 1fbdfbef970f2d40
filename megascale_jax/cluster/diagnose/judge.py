"""Which values are too slow, beside the fleet's median or a stated baseline.

A value is an outlier when it is below the median by more than ``max(MAD, floor * median)``, MAD being the median absolute
deviation (the rule of Megatron-LM's GPU sniff test). Only slow ones matter. Fewer than three values cannot tell who is wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

FLOOR = 0.10
CPU_FLOOR = 0.5
"""Virtual nodes share the cores of a machine, so there a neighbour's load looks like a slow device."""
FEWEST = 3


@dataclass(frozen=True)
class Comparison:
    """Keys of the slow values, each with its reason. ``problem``: why nothing could be compared, if so."""

    slow: Mapping[str, str]
    problem: str = ""


def compare(rates: Mapping[str, float], unit: str, *, floor: float = FLOOR, baseline: float | None = None) -> Comparison:
    """Compare rates (higher is better) with each other, or with ``baseline`` when they are too few. ``floor``: share of the median."""
    if len(rates) < FEWEST:
        if baseline is None:
            return Comparison({}, f"{len(rates)} to compare, too few to tell: {FEWEST} are needed, or a baseline")
        reference, slack, name = baseline, floor * baseline, "baseline"
    else:
        reference = median(rates.values())
        spread = median(abs(rate - reference) for rate in rates.values())
        slack, name = max(spread, floor * reference), f"median of {len(rates)}"
    return Comparison(
        {
            key: f"{rate:.3g} {unit} is {1 - rate / reference:.0%} below the {name}, {reference:.3g} {unit}"
            for key, rate in rates.items()
            if reference - rate > slack
        }
    )

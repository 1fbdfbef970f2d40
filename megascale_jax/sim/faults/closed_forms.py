"""Goodput and the best checkpoint interval by formula: Young, Daly, Meta's expectation, and the renewal form of this package's own rules.

All times are seconds, ``rate`` is failures a second of the whole job.
"""

from math import exp, expm1, inf, sqrt

import numpy as np

from megascale_jax.sim.faults.case import SECOND_NS, Case

_POINTS = 2000
_GROWTH = 300.0
"""The search goes from so much below Young's interval to so much above it."""


def young_s(blocking_s: float, mtbf_s: float) -> float:
    """Best training time between saves to first order, sqrt(2 w M) (Young, CACM 1974)."""
    return sqrt(2 * blocking_s * mtbf_s)


def daly_s(blocking_s: float, mtbf_s: float) -> float:
    """The same to higher order (Daly, FGCS 2006); M itself where a save takes twice as long and more."""
    if blocking_s >= 2 * mtbf_s:
        return mtbf_s
    share = blocking_s / (2 * mtbf_s)
    return sqrt(2 * blocking_s * mtbf_s) * (1 + sqrt(share) / 3 + share / 9) - blocking_s


def meta_ettr(rate: float, restart_s: float, interval_s: float, blocking_s: float) -> float:
    """Expected effective training time ratio, (1 - N r (u0 + dt / 2)) / (1 + w / dt), to first order in the rate.

    Meta's study of its research clusters (HPCA 2025): N nodes that fail at r each, u0 to restart, dt between saves, w of them blocking.
    """
    return (1 - rate * (restart_s + interval_s / 2)) / (1 + blocking_s / interval_s)


def renewal_ettr(rate: float, before_s: float, restart_s: float, interval_s: float, blocking_s: float, lag_s: float = 0.0) -> float:
    """Expected share of the time that trains and counts, for any rate: attempts are alike, and failures have no memory.

    A failure costs ``before_s`` until the job restores and ``restart_s`` until it trains; another one in between strikes when the restore
    begins, or ends it. Of an attempt of T seconds, ``floor((T - lag) / (interval + blocking))`` intervals count.
    """
    if rate == 0:
        return interval_s / (interval_s + blocking_s)
    cycle = interval_s + blocking_s
    if rate * max(cycle + lag_s, before_s + restart_s) > _GROWTH:
        return 0.0
    kept = interval_s * exp(-rate * lag_s) / expm1(rate * cycle)
    survives = exp(-rate * (before_s + restart_s))
    down = (before_s + exp(-rate * before_s) * -expm1(-rate * restart_s) / rate) / survives
    return kept / (1 / rate + down)


def expected_ettr(case: Case, interval_s: float | None = None, rate_factor: float = 1.0) -> float:
    """`renewal_ettr` of a case, by the means over its kinds; a failure that is not found counts as often as it comes back.

    Waits for spares and what a person has to do are not in it. ``interval_s``: in place of the case's own.
    """
    mean = _Means.of(case)
    slow = case.slow_nodes
    longer = 1 + slow.step_cost * (1 - (1 - slow.share) ** case.nodes) if slow is not None else 1.0
    interval_s = longer * (case.interval_ns / SECOND_NS if interval_s is None else interval_s)
    rate = case.per_second * rate_factor * mean.incidents
    blocking_s = case.blocking_at(round(interval_s * SECOND_NS)) / SECOND_NS
    return renewal_ettr(rate, mean.before_s, mean.restart_s, interval_s, blocking_s, mean.lag_s)


def meta_ettr_of(case: Case) -> float:
    """`meta_ettr` of a case, by the same means: u0 is all between a failure and training, and the age that a save must have."""
    mean = _Means.of(case)
    restart_s = mean.before_s + mean.restart_s + mean.lag_s
    return meta_ettr(case.per_second * mean.incidents, restart_s, case.interval_ns / SECOND_NS, case.blocking_ns / SECOND_NS)


def best_interval_s(case: Case) -> float:
    """The interval of the highest `expected_ettr`, by trying all of a fine grid from one step on; infinite without failures."""
    if case.per_second == 0:
        return inf
    step_s = case.step_ns / SECOND_NS
    middle = max(young_s(case.stage_one_ns / SECOND_NS, case.mtbf_s), case.upload_ns / SECOND_NS, step_s)
    grid = np.geomspace(max(step_s, middle / _GROWTH), middle * _GROWTH, _POINTS)
    return float(grid[np.argmax([expected_ettr(case, float(one)) for one in grid])])


class _Means:
    """Means over the kinds of a case, weighted by how often each comes."""

    def __init__(self, incidents: float, before_s: float, restart_s: float, lag_s: float):
        self.incidents, self.before_s, self.restart_s, self.lag_s = incidents, before_s, restart_s, lag_s

    @classmethod
    def of(cls, case: Case) -> "_Means":
        rates = np.array([event.per_second for event in case.events])
        if rates.sum() == 0:
            return cls(1.0, 0.0, 0.0, 0.0)
        repeats = np.array([case.incidents_until_evicted(event) or case.cluster.fruitless_recoveries + 1 for event in case.events])
        hides = np.array([0.0 if event.shows == "silent" else (1 - event.heals) * (1 - event.found) for event in case.events])
        times = 1 + hides * (repeats - 1)
        weights = rates * times / (rates * times).sum()
        detect, lag = (np.array([getattr(event, name) for event in case.events]) / SECOND_NS for name in ("detect_ns", "lag_ns"))
        replaced = (1 - np.array([event.heals for event in case.events])) / times
        grace = np.array([event.shows == "silent" for event in case.events]) * case.cluster.grace_s
        stopped_s = (case.suspend_ns + case.diagnose_ns) / SECOND_NS
        return cls(
            incidents=float((rates * times).sum() / rates.sum()),
            before_s=float(weights @ (detect + np.maximum(stopped_s, grace))),
            restart_s=(case.restore_ns + case.compile_ns) / SECOND_NS + float(weights @ replaced) * case.replace_ns / SECOND_NS,
            lag_s=float(weights @ lag),
        )

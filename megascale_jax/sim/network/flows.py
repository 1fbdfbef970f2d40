"""Max-min fair shares of flows on links: what long flows get when congestion control is perfect and paths are fixed.

A link is a bottleneck once its fair share is the least that any of its flows finds on its path: rates of other flows are frozen at or
below the shares of the links they leave, so no share ever falls, and this one stays. All such links are settled at once; a few
rounds suffice for ten thousand flows (Bertsekas and Gallager, Data Networks, section 6.5, has the sequential form).
"""

import numpy as np

from megascale_jax.sim.network.topology import NO_LINK

_CLOSE = 1e-9
"""Relative; shares that differ by rounding alone are equal."""


def max_min_rates(paths: np.ndarray, capacity: np.ndarray, demand: np.ndarray | None = None) -> np.ndarray:
    """float64[flow]: rates, in the unit of ``capacity`` float64[link].

    ``paths``: int64[flow, hop], `NO_LINK` for no link. ``demand``: float64[flow], most that a flow takes; None: unlimited. A flow over no
    link at all gets its demand, or infinity.
    """
    number, links = len(paths), len(capacity)
    real = paths != NO_LINK
    padded = np.where(real, paths, links)
    rate = np.full(number, np.inf)
    limit = np.full(number, np.inf) if demand is None else demand.astype(float)
    left = np.append(capacity.astype(float), np.inf)
    alive = real.any(axis=1)
    rate[~alive] = limit[~alive]
    while alive.any():
        over = padded[alive]
        users = np.bincount(over.ravel(), minlength=links + 1)[: links + 1].astype(float)
        users[links] = 1.0
        share = np.full(links + 1, np.inf)
        used = users > 0
        share[used] = np.maximum(left[used], 0.0) / users[used]
        share[links] = np.inf
        least = np.minimum(share[over].min(axis=1), limit[alive])
        # a link settles when no flow of it finds less elsewhere; a flow settles with any of its links, or by its own demand
        lowest = np.full(links + 1, np.inf)
        np.minimum.at(lowest, over.ravel(), np.repeat(least, over.shape[1]))
        settled = lowest >= share * (1 - _CLOSE)
        settled[links] = False
        done = settled[over].any(axis=1) | (limit[alive] <= share[over].min(axis=1))
        index = np.flatnonzero(alive)[done]
        rate[index] = least[done]
        np.subtract.at(left, padded[index].ravel(), np.repeat(rate[index], padded.shape[1]))
        left[links] = np.inf
        alive[index] = False
    return rate


def loads(paths: np.ndarray, num_links: int, rate: np.ndarray | None = None) -> np.ndarray:
    """float64[link]: sum of the rates of the flows on it, or their number when no rates are given."""
    weights = np.repeat(np.ones(len(paths)) if rate is None else rate, paths.shape[1])
    real = paths.ravel() != NO_LINK
    return np.bincount(paths.ravel()[real], weights=weights[real], minlength=num_links)

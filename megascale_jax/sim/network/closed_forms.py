"""Flows hashed uniformly onto the uplinks of one switch, exactly: balls in bins.

``flows`` flows of rate ``flow_gbit_s`` on ``links`` links of ``link_gbit_s``; a link with more than it carries shares it equally.
"""

from math import comb, exp, floor, lgamma, log, prod

import numpy as np


def collision_free(flows: int, links: int) -> float:
    """Probability that no two flows share a link."""
    return prod(1 - index / links for index in range(flows)) if flows <= links else 0.0


def mean_used(flows: int, links: int) -> float:
    """Mean number of links with at least one flow."""
    return links * (1 - (1 - 1 / links) ** flows)


def delivered(flows: int, links: int, flow_gbit_s: float, link_gbit_s: float) -> float:
    """Mean share of the offered rate that arrives: the expectation of min(load, rate) of a link with a binomial number of flows."""
    total = 0.0
    for number in range(flows + 1):
        chance = comb(flows, number) * (1 / links) ** number * (1 - 1 / links) ** (flows - number)
        total += chance * min(number * flow_gbit_s, link_gbit_s)
    return links * total / (flows * flow_gbit_s)


def no_overload(flows: int, links: int, flow_gbit_s: float, link_gbit_s: float) -> float:
    """Probability that no link gets more than it carries: that every one has at most ``link_gbit_s / flow_gbit_s`` flows.

    The coefficient of x^flows in (sum of x^i / i! up to that number)^links, times flows! / links^flows, in logarithms.
    """
    most = floor(link_gbit_s / flow_gbit_s + 1e-12)
    if flows > most * links:
        return 0.0
    series = np.array([1.0 / exp(lgamma(number + 1)) for number in range(most + 1)])
    power, scale = np.ones(1), 0.0
    for _ in range(links):
        power = np.convolve(power, series)[: flows + 1]
        scale += log(largest := power.max())
        power = power / largest
    return float(exp(log(power[flows]) + scale + lgamma(flows + 1) - flows * log(links))) if power[flows] > 0 else 0.0

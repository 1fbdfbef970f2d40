"""A link that goes down for some seconds and comes back: what a time-out costs when it is short, and when it is long.

A NIC that hears nothing sends again: try ``k`` of ``retries`` comes after ``k`` time-outs of 4.096 us x 2^exponent (InfiniBand and RoCE;
NCCL sets the exponent with NCCL_IB_TIMEOUT and the retries with NCCL_IB_RETRY_CNT). A flap that ends before the last try stalls the job
until the first try after it; a longer one is an error one time-out after that try, and the job starts again from a checkpoint. The run's
own limit of a step ends what hangs longer. So short time-outs lose jobs, long ones lose time, also when a link never comes back, and
between them lies a plateau (the MegaScale paper, sections 3.6 and 6.3, tells of both ends).

*Adaptive* retransmission (the NIC's ``adap_retrans``, whose algorithm is not published) is modelled as *assumed*: the first tries come soon
and each waits twice as long as the last, up to the time-out; when the last one comes stays the same.

Flaps have a length with an exponential distribution, the one that is fixed by a mean alone. All costs are job seconds of one flap.
"""

from dataclasses import dataclass

import numpy as np

from megascale_jax.errors import ConfigError

UNIT_S = 4.096e-6
EXPONENTS = range(10, 31)
"""Those compared: 4 ms to 73 minutes."""
FIRST_ADAPTIVE_EXPONENT = 14
"""Time-out before the first adaptive try, 67 ms: assumed."""
FLAP_S = 3.0
"""Mean length, assumed: the paper says "several seconds"."""
RESTART_S = 1500.0
"""Cost of an error, the paper's upper limits: 10 minutes to detect and diagnose, 15 to catch up (section 4)."""
BROKEN = 0.001
"""Share of flaps after which the link stays down, assumed."""
PLATEAU = 1.1
"""Time-outs that cost up to so many times the least are as good as the best."""


@dataclass(frozen=True)
class Retries:
    """When a NIC sends again. ``tries_s``: float64[try], seconds after the first loss; ``error_s``: when it gives up."""

    tries_s: np.ndarray
    error_s: float

    @classmethod
    def of(cls, exponent: int, retries: int, limit_s: float, *, adaptive: bool = False) -> "Retries":
        """By the settings; no try counts after ``limit_s``, when the run itself gives up. Raises ConfigError for what NICs do not take."""
        if not 1 <= exponent <= 31 or not 1 <= retries <= 7 or limit_s <= 0:
            raise ConfigError(f"got time-out exponent {exponent}, {retries} retries, {limit_s} s; expected 1 to 31, 1 to 7, more than 0")
        timeout = UNIT_S * 2**exponent
        tries: np.ndarray = timeout * np.arange(1, retries + 1)
        if adaptive:
            early, wait, at = list[float](), UNIT_S * 2.0**FIRST_ADAPTIVE_EXPONENT, 0.0
            while wait < timeout and at + wait < tries[-1]:
                at += wait
                early.append(at)
                wait *= 2
            later: np.ndarray = np.arange(at + timeout, float(tries[-1]), timeout)
            tries = np.unique(np.concatenate([np.array(early), later, tries[-1:]]))
        return cls(tries[tries <= limit_s], min(timeout * (retries + 1), limit_s))


@dataclass(frozen=True)
class Flaps:
    """Mean length and cost of an error in seconds, and the share of flaps that never end. Raises ConfigError for impossible ones."""

    mean_s: float = FLAP_S
    restart_s: float = RESTART_S
    broken: float = BROKEN

    def __post_init__(self) -> None:
        """Checks."""
        if self.mean_s <= 0 or self.restart_s < 0 or not 0 <= self.broken <= 1:
            raise ConfigError(
                f"got flaps of {self.mean_s} s, restarts of {self.restart_s} s and a share {self.broken} of broken links; expected more "
                "than 0, at least 0, and a share from 0 to 1"
            )


@dataclass(frozen=True)
class Cost:
    """Of one flap: chance that the job dies, mean stall of a job that lives on (times its chance), and both together in seconds."""

    death: float
    stall_s: float
    total_s: float


def expected(retries: Retries, flaps: Flaps) -> Cost:
    """Closed form: a flap that ends between two tries costs the later one."""
    outlasts = (1 - flaps.broken) * np.exp(-np.concatenate([[0.0], retries.tries_s]) / flaps.mean_s) + flaps.broken
    stall = float((retries.tries_s * (outlasts[:-1] - outlasts[1:])).sum())
    death = float(outlasts[-1])
    return Cost(death, stall, stall + death * (retries.error_s + flaps.restart_s))


def simulated(retries: Retries, flaps: Flaps, number: int, generator: np.random.Generator) -> tuple[Cost, float]:
    """The same from so many drawn flaps, each try made in turn on a link that is down or up; and the standard error of the total."""
    ends_s = np.where(generator.random(number) < flaps.broken, np.inf, generator.exponential(flaps.mean_s, number))
    waiting, cost_s = np.ones(number, bool), np.zeros(number)
    for at_s in retries.tries_s:
        arrives = waiting & (ends_s <= at_s)
        cost_s[arrives] = at_s
        waiting &= ~arrives
    stall = float(cost_s.sum() / number)
    cost_s[waiting] = retries.error_s + flaps.restart_s
    return Cost(float(waiting.mean()), stall, float(cost_s.mean())), float(cost_s.std(ddof=1) / np.sqrt(number))


def plateau(costs_s: np.ndarray) -> tuple[int, int]:
    """First and last index of the run of time-outs around the best one that cost at most `PLATEAU` times as much."""
    good = costs_s <= PLATEAU * costs_s.min()
    first = last = int(costs_s.argmin())
    while first > 0 and good[first - 1]:
        first -= 1
    while last < len(good) - 1 and good[last + 1]:
        last += 1
    return first, last

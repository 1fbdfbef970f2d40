"""What senders and switches are set to: DCQCN in two named sets, Swift, and a hybrid of both. Times in microseconds, rates in Gbit/s here.

DCQCN (Zhu et al., SIGCOMM 2015): ``paper`` has the values of that paper, scaled from its 40 Gbit/s to the NIC's rate; ``firmware`` the
defaults of a ConnectX NIC as a dumped configuration shows them, with the switch thresholds of the HPCC simulator. Where a value is of
neither it says *assumed*. Swift (Kumar et al., SIGCOMM 2020): the values of csg-htsim, which calls them guesses itself, and a longer hop.

``hybrid`` is a reconstruction and no published algorithm: the MegaScale paper (section 3.6) says only that it joins round-trip times as
Swift measures them with ECN's rapid answer as DCQCN has it, and gives no constant. Here Swift's window is governed by Swift's law, and a
marked packet does to it in addition what a CNP does to DCQCN's rate, once a round trip at most: both with their published constants, none
of our own. ``nscc`` is a reconstruction after UEC's NSCC, the public design that joins both signals (each says yes or no, which makes four
cases); two of its constants are assumed. Only orderings should be read out of either.
"""

from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["dcqcn-paper", "dcqcn-firmware", "swift", "hybrid", "nscc"]
ALGORITHMS: tuple[Algorithm, ...] = ("dcqcn-paper", "dcqcn-firmware", "swift", "hybrid", "nscc")
MTU_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Dcqcn:
    """Rates of a sender that hears of marked packets by CNPs."""

    g: float = 1 / 256
    alpha_period_us: float
    cut_gap_us: float
    """Least time between two cuts."""
    raise_period_us: float
    byte_counter: float
    """Bytes of a round of the byte counter; 0: rounds are counted by the timer alone."""
    fast_rounds: int
    additive_gbit_s: float
    hyper_gbit_s: float
    least_gbit_s: float
    cnp_gap_us: float
    """Least time between two CNPs of a flow."""


@dataclass(frozen=True, kw_only=True)
class Marking:
    """ECN by the length of an egress queue: never below ``least``, at ``most_chance`` at ``most``, always above it. Bytes at the NIC's
    rate.
    """

    least_bytes: float
    most_bytes: float
    most_chance: float


@dataclass(frozen=True, kw_only=True)
class Swift:
    """Windows of a sender that measures round-trip times; in packets."""

    additive: float = 1.0
    beta: float = 0.8
    largest_cut: float = 0.5
    target_us: float = 20.0
    hop_us: float = 1.0
    scaling_us: float = 80.0
    """Most that a small window adds to the target: 4 times the base."""
    scaling_least: float = 0.1
    scaling_most: float = 100.0
    """Windows at which it adds all of that, and nothing."""
    window_least: float = 0.001
    window_most_bdp: float = 1e9


@dataclass(frozen=True, kw_only=True)
class Hybrid(Swift):
    """Swift's constants; those of ECN are DCQCN's."""


@dataclass(frozen=True, kw_only=True)
class Nscc(Swift):
    """UEC's target, a queueing delay of one base round trip, which `of` knows, and what ECN adds."""

    hop_us: float = 0.0
    scaling_us: float = 0.0
    fast: float = 4.0
    """Times `additive` that a window grows while neither delay nor ECN complains, in proportion to how far below target. Assumed."""
    slow: float = 0.25
    """The same while delay alone complains. Assumed."""
    window_most_bdp: float = 1.5

    @classmethod
    def of(cls, base_rtt_us: float) -> "Nscc":
        """At a fabric's round-trip time."""
        return cls(target_us=2 * base_rtt_us)


def dcqcn(name: Literal["dcqcn-paper", "dcqcn-firmware"], nic_gbit_s: float) -> tuple[Dcqcn, Marking]:
    """Sender and switch of a named set at a NIC's rate."""
    if name == "dcqcn-paper":
        scale = nic_gbit_s / 40
        sender = Dcqcn(
            alpha_period_us=55,
            cut_gap_us=50,
            raise_period_us=55,
            byte_counter=10e6 * scale,
            fast_rounds=5,
            additive_gbit_s=0.04 * scale,
            hyper_gbit_s=0.4 * scale,  # assumed: ten times the additive step, as in the firmware's set
            least_gbit_s=0.1,  # assumed: the HPCC simulator's
            cnp_gap_us=50,
        )
        return sender, Marking(least_bytes=5e3 * scale, most_bytes=200e3 * scale, most_chance=0.01)
    scale = nic_gbit_s / 25
    sender = Dcqcn(
        g=5 / 1024,
        alpha_period_us=1,
        cut_gap_us=4,
        raise_period_us=300,
        byte_counter=32767,  # the dump has no unit: assumed to be bytes
        fast_rounds=1,
        additive_gbit_s=0.005 * scale,
        hyper_gbit_s=0.05 * scale,
        least_gbit_s=0.1,
        cnp_gap_us=2,
    )
    return sender, Marking(least_bytes=100e3 * scale, most_bytes=400e3 * scale, most_chance=0.2)


def nscc_marking(bdp_bytes: float) -> Marking:
    """UEC's NSCC: from 0.2 to 0.8 of the product of bandwidth and round-trip time, then always."""
    return Marking(least_bytes=0.2 * bdp_bytes, most_bytes=0.8 * bdp_bytes, most_chance=1.0)

"""Runs flows over a fabric, packet by packet, and says what they and the switches went through.

The switches are HPCC's simulator's in outline (Li et al., SIGCOMM 2019): a shared buffer, a link paused when its packets hold more than a
share of what is free, headroom behind that for what is already under way. With `is_lossless` nothing may be dropped; `Outcome.dropped`
counts.
"""

from dataclasses import dataclass, replace

import numpy as np

from megascale_jax.errors import MegascaleError
from megascale_jax.sim.congestion.fabric import Fabric
from megascale_jax.sim.congestion.loop import run_events
from megascale_jax.sim.congestion.parameters import MTU_BYTES, Algorithm, Dcqcn, Hybrid, Marking, Nscc, Swift, dcqcn, nscc_marking
from megascale_jax.sim.congestion.state import (
    CNPS,
    COUNTERS,
    DROPPED,
    EVENTS,
    FAULT,
    FREE,
    HYBRID,
    MARKED,
    MOST_HOPS,
    NO_PACKET_LEFT,
    NSCC,
    OPEN,
    RATE,
    RECEIVED,
    SAMPLE,
    SENT,
    WINDOW,
    Calendar,
    FlowStates,
    Law,
    Links,
    Packets,
    Trace,
    World,
    records,
)

PS_PER_US = 1_000_000
_NEVER = -(1 << 60)
_RESERVE_BYTES, _HYSTERESIS_BYTES = 4096, 3072
"""Of the HPCC simulator's switch: what a link may always have in the buffer, and how far below the threshold it is resumed."""
_SHARE_EXPONENT = 3
"""A link at the NIC's rate may have 2^-3 of the free buffer, one twice as fast twice that (HPCC's simulator)."""
_HEADROOM = 3
"""Times rate x delay of a link, kept for what comes after a pause was asked for (HPCC's simulator)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What senders and switches do. `of` makes that of a named algorithm."""

    name: str
    rate: Dcqcn | None
    window: Swift | None
    marking: Marking | None
    is_lossless: bool = True

    @classmethod
    def of(cls, algorithm: Algorithm, fabric: Fabric) -> "Setting":
        """Published or declared constants at the fabric's rate; see `parameters`."""
        if algorithm == "dcqcn-paper" or algorithm == "dcqcn-firmware":
            rate, marking = dcqcn(algorithm, fabric.config.nic_gbit_s)
            return cls(name=algorithm, rate=rate, window=None, marking=marking)
        if algorithm == "swift":
            return cls(name=algorithm, rate=None, window=Swift(), marking=None)
        if algorithm == "hybrid":
            return cls(name=algorithm, rate=None, window=Hybrid(), marking=dcqcn("dcqcn-paper", fabric.config.nic_gbit_s)[1])
        return cls(name=algorithm, rate=None, window=Nscc.of(base_rtt_s(fabric) * 1e6), marking=nscc_marking(bdp_bytes(fabric)))

    def lossy(self) -> "Setting":
        """The same without pauses."""
        return replace(self, is_lossless=False)


@dataclass(frozen=True)
class Load:
    """Flows, all [flow]: int64 hosts, spines and bytes, float64 start in seconds."""

    source: np.ndarray
    target: np.ndarray
    spine: np.ndarray
    size: np.ndarray
    start_s: np.ndarray


@dataclass(frozen=True)
class Outcome:
    """A run. Flows that did not finish in time have NaN."""

    load: Load
    completion_s: np.ndarray
    """float64[flow]: from start to last byte."""
    received: np.ndarray
    """int64[flow]: bytes."""
    end_s: float
    pauses: np.ndarray
    """int64[link]: times that it was told to pause."""
    paused_s: np.ndarray
    peak_bytes: np.ndarray
    """int64[link]: longest queue in front of it."""
    packets_sent: int
    packets_received: int
    dropped: int
    marked: int
    cnps: int
    events: int
    samples: "Samples"

    @property
    def gbit_s(self) -> float:
        """Rate at which all bytes together arrived, from the first start to the end."""
        return float(self.received.sum() * 8 / (self.end_s - self.load.start_s.min()) / 1e9)


@dataclass(frozen=True)
class Samples:
    """State every so often: int64[sample, flow] bytes received, float64[sample, flow] round-trip seconds,
    int64[sample, link] bytes queued.
    """

    time_s: np.ndarray
    received: np.ndarray
    delay_s: np.ndarray
    queued: np.ndarray


def simulate(
    fabric: Fabric, load: Load, setting: Setting, *, seed: int = 0, limit_s: float = 1.0, sample_s: float = 0.0, samples: int = 0
) -> Outcome:
    """Run until all flows have finished or ``limit_s`` of simulated time is over. ``seed``: of marking by chance.

    Raises MegascaleError when a table of the simulator is too small, which is a fault of its own.
    """
    world, law = _world(fabric, load, setting, seed, sample_s, samples), _law(fabric, setting)
    run_events(world, law, round(limit_s * 1e6 * PS_PER_US))
    flows, links, counters = world.flows, world.links, world.counters
    if counters[FAULT]:
        what = "packets" if counters[FAULT] == NO_PACKET_LEFT else "events"
        raise MegascaleError(f"the simulator's table of {what} is full after {counters[EVENTS]:,} events; start fewer flows at once")
    finish = np.where(flows.finish >= 0, flows.finish / 1e12, np.nan)
    end = float(np.nanmax(finish)) if not counters[OPEN] else limit_s
    taken = int(counters[SAMPLE])
    trace = world.trace
    return Outcome(
        load=load,
        completion_s=finish - load.start_s,
        received=np.array(flows.received),
        end_s=end,
        pauses=np.array(links.pauses),
        paused_s=links.paused_ps / 1e12,
        peak_bytes=np.array(links.peak),
        packets_sent=int(counters[SENT]),
        packets_received=int(counters[RECEIVED]),
        dropped=int(counters[DROPPED]),
        marked=int(counters[MARKED]),
        cnps=int(counters[CNPS]),
        events=int(counters[EVENTS]),
        samples=Samples(np.arange(taken) * sample_s, trace.received[:taken], trace.delay[:taken] / 1e12, trace.queued[:taken]),
    )


def base_rtt_s(fabric: Fabric) -> float:
    """Round-trip time of a full packet between two ToR switches without any queue, seconds."""
    config = fabric.config
    sending = 2 * MTU_BYTES * 8 / (config.nic_gbit_s * 1e9) + 2 * MTU_BYTES * 8 / (config.uplink_gbit_s * 1e9)
    return sending + 2 * MOST_HOPS * config.hop_us / 1e6


def bdp_bytes(fabric: Fabric) -> float:
    """Bytes under way of a NIC at full rate over that time."""
    return base_rtt_s(fabric) * fabric.config.nic_gbit_s * 1e9 / 8


def _law(fabric: Fabric, setting: Setting) -> Law:
    per_ps = 1e9 / 8 / 1e12  # Gbit/s to bytes a picosecond
    rate = setting.rate or dcqcn("dcqcn-paper", fabric.config.nic_gbit_s)[0]
    window = setting.window or Swift()
    grown = window if isinstance(window, Nscc) else Nscc()
    kind = RATE if setting.rate else HYBRID if isinstance(window, Hybrid) else NSCC if isinstance(window, Nscc) else WINDOW
    return Law(
        kind=kind,
        is_lossless=setting.is_lossless,
        mtu=MTU_BYTES,
        mark_chance=setting.marking.most_chance if setting.marking else 0.0,
        reserve=float(_RESERVE_BYTES),
        hysteresis=float(_HYSTERESIS_BYTES),
        g=rate.g,
        alpha_period=round(rate.alpha_period_us * PS_PER_US),
        cut_gap=round(rate.cut_gap_us * PS_PER_US),
        raise_period=round(rate.raise_period_us * PS_PER_US),
        byte_counter=float(rate.byte_counter),
        fast_rounds=rate.fast_rounds,
        additive_rate=rate.additive_gbit_s * per_ps,
        hyper_rate=rate.hyper_gbit_s * per_ps,
        least_rate=rate.least_gbit_s * per_ps,
        line_rate=fabric.config.nic_gbit_s * per_ps,
        cnp_gap=round(rate.cnp_gap_us * PS_PER_US),
        additive=float(window.additive),
        beta=window.beta,
        largest_cut=window.largest_cut,
        target=window.target_us * PS_PER_US,
        hop=window.hop_us * PS_PER_US,
        scaling=window.scaling_us * PS_PER_US,
        scaling_least=window.scaling_least,
        scaling_most=window.scaling_most,
        window_least=window.window_least,
        fast=grown.fast,
        slow=grown.slow,
    )


def _links(fabric: Fabric, setting: Setting) -> Links:
    number, rates = fabric.num_links, fabric.rates()
    owner, end = fabric.ends()
    relative = rates / fabric.config.nic_gbit_s
    marking = setting.marking or Marking(least_bytes=np.inf, most_bytes=np.inf, most_chance=0.0)

    values = {
        "ps_per_byte": 8000 / rates,
        "delay": round(fabric.config.hop_us * PS_PER_US),
        "owner": owner,
        "end": end,
        "share": relative * 2.0**-_SHARE_EXPONENT,
        "mark_from": marking.least_bytes * relative,
        "mark_to": marking.most_bytes * relative,
        "first": -1,
        "last": -1,
    }
    return records(Links, number, values | dict.fromkeys(("is_busy", "is_paused", "is_asked"), False))


def _flows(fabric: Fabric, load: Load, setting: Setting, links: Links) -> tuple[FlowStates, np.ndarray]:
    number = len(load.size)
    path, hops = fabric.paths(load.source, load.target, load.spine)
    window = bdp_bytes(fabric) / MTU_BYTES
    most = window * setting.window.window_most_bdp if setting.window else window
    start = np.round(load.start_s * 1e12).astype(np.int64)
    line = fabric.config.nic_gbit_s * 1e9 / 8 / 1e12

    values = {
        "hops": hops,
        "host": load.source,
        "length": load.size,
        "start": start,
        "back": hops * links.delay[0],
        "finish": -1,
        "is_ready": False,
        "following": -1,
        "rate": line,
        "goal": line,
        "alpha": 1.0,
        "alpha_at": start,
        "alpha_seen": False,
        "cut_at": _NEVER,
        "raise_at": start,
        "byte_count": 0.0,
        "cnp_at": _NEVER,
        "window": window,
        "window_most": max(most, 1.0),
    }
    return records(FlowStates, number, values), path


def _world(fabric: Fabric, load: Load, setting: Setting, seed: int, sample_s: float, samples: int) -> World:
    links = _links(fabric, setting)
    flows, path = _flows(fabric, load, setting, links)
    whole = fabric.buffers()
    entering: np.ndarray = links.end >= 0
    ends: np.ndarray = links.end[entering]
    kept: np.ndarray = _HEADROOM * links.delay[entering] / links.ps_per_byte[entering]
    headroom = np.bincount(ends, kept, fabric.num_switches)
    total = int(np.ceil(load.size / MTU_BYTES).sum())
    pool = min(total, int(whole.sum() / MTU_BYTES * 1.5) + 64 * fabric.num_links) + 1
    events = 3 * pool + 4 * len(load.size) + 4 * fabric.num_links + 16
    counters = np.zeros(COUNTERS, np.int64)
    counters[OPEN] = len(load.size)
    following = np.arange(1, pool + 1)
    following[-1] = -1
    counters[FREE] = 0

    return World(
        links=links,
        flows=flows,
        packets=records(Packets, pool, {"is_marked": False, "following": following}),
        calendar=records(Calendar, events, {}),
        path=path,
        ready_first=np.full(fabric.hosts, -1),
        ready_last=np.full(fabric.hosts, -1),
        used=np.zeros(fabric.num_switches, np.int64),
        shared=whole - headroom,
        whole=whole,
        counters=counters,
        random=np.array([np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] | np.uint64(1)]),
        trace=Trace(
            round(sample_s * 1e12) if samples else 0,
            np.zeros((samples, len(load.size)), np.int64),
            np.zeros((samples, len(load.size)), np.int64),
            np.zeros((samples, fabric.num_links), np.int64),
        ),
    )

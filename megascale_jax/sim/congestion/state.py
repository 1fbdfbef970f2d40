"""Everything that a run of the packet simulator changes: record arrays, one element a link, flow, packet or event.

The classes below say which fields they have, and stand for them in signatures; `records` makes the arrays. As separate arrays they would
be sixty, and numba would take more than twice as long to compile what passes them on.

Times are int64 picoseconds (4 KB at 200 Gbit/s are 163,840), rates float64 bytes a picosecond, windows packets. -1 is "none" in lists.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np

HEAP_SIZE, ORDER, FREE, DROPPED, MARKED, CNPS, FAULT, NOW, OPEN, SENT, RECEIVED, EVENTS, SAMPLE, COUNTERS = range(14)
"""Places in ``counters``: events that wait; the next event's order; first free packet; packets dropped, marked; CNPs; what went wrong; the
time;
flows that are not finished; packets sent and received; events handled; next sample; the number of places."""
NO_FAULT, NO_PACKET_LEFT, NO_EVENT_LEFT = range(3)
START, PACE, SENT_OFF, ARRIVES, ACKED, CNP, PAUSE, RESUME, LOST, LOOK = range(10)
"""Kinds of events; beside each goes the number of a flow, a link or a packet."""
RATE, WINDOW, HYBRID, NSCC = range(4)
"""How senders are governed."""
MOST_HOPS = 4


def records[T](kind: type[T], number: int, values: Mapping[str, Any], otherwise: Any = 0) -> T:
    """A record array of ``number`` elements with the fields of ``kind``, each as ``values`` says, else int64 and ``otherwise``."""
    types = {name: np.asarray(values.get(name, np.int64(0))).dtype for name in kind.__annotations__}
    made = np.recarray(number, dtype=np.dtype(list(types.items()), align=True))
    for name in types:
        made[name] = values.get(name, otherwise)
    return cast(T, made)


class Links(NamedTuple):
    """One direction of a cable, with the queue in front of it and what the switch at its end holds of its packets."""

    ps_per_byte: np.ndarray
    delay: np.ndarray
    owner: np.ndarray
    """Switch that sends on it; -1: a NIC."""
    end: np.ndarray
    """Switch at its end; -1: a NIC."""
    share: np.ndarray
    """Of the free buffer that its packets may have at its end before it is paused."""
    mark_from: np.ndarray
    mark_to: np.ndarray
    first: np.ndarray
    last: np.ndarray
    queued: np.ndarray
    peak: np.ndarray
    is_busy: np.ndarray
    is_paused: np.ndarray
    held: np.ndarray
    """Bytes at its end that came over it."""
    is_asked: np.ndarray
    """Its end has asked for a pause."""
    pauses: np.ndarray
    paused_at: np.ndarray
    paused_ps: np.ndarray


class FlowStates(NamedTuple):
    """Flows: fixed at the start, then what the NIC, the receiver and the law of congestion control keep of each."""

    hops: np.ndarray
    host: np.ndarray
    length: np.ndarray
    start: np.ndarray
    back: np.ndarray
    """Delay of an answer."""
    sent: np.ndarray
    flying: np.ndarray
    received: np.ndarray
    finish: np.ndarray
    is_ready: np.ndarray
    following: np.ndarray
    send_at: np.ndarray
    rate: np.ndarray
    goal: np.ndarray
    alpha: np.ndarray
    alpha_at: np.ndarray
    alpha_seen: np.ndarray
    cut_at: np.ndarray
    raise_at: np.ndarray
    timer_rounds: np.ndarray
    byte_rounds: np.ndarray
    byte_count: np.ndarray
    cnp_at: np.ndarray
    window: np.ndarray
    window_most: np.ndarray
    delay: np.ndarray
    """Newest round-trip time."""


class Packets(NamedTuple):
    """A pool."""

    flow: np.ndarray
    hop: np.ndarray
    is_marked: np.ndarray
    sent_at: np.ndarray
    length: np.ndarray
    following: np.ndarray


class Calendar(NamedTuple):
    """A binary heap of events by time, then order."""

    time: np.ndarray
    order: np.ndarray
    kind: np.ndarray
    number: np.ndarray


class Law(NamedTuple):
    """All constants, in the simulator's units; those of the other laws are unread."""

    kind: int
    is_lossless: bool
    mtu: int
    mark_chance: float
    reserve: float
    """Bytes that a link may always have at its end."""
    hysteresis: float
    g: float
    alpha_period: int
    cut_gap: int
    raise_period: int
    byte_counter: float
    fast_rounds: int
    additive_rate: float
    hyper_rate: float
    least_rate: float
    line_rate: float
    cnp_gap: int
    additive: float
    beta: float
    largest_cut: float
    target: float
    hop: float
    scaling: float
    scaling_least: float
    scaling_most: float
    window_least: float
    fast: float
    slow: float


class Trace(NamedTuple):
    """Samples every ``period`` ps: bytes received of each flow, its round-trip time, and the queue of each link."""

    period: int
    received: np.ndarray
    delay: np.ndarray
    queued: np.ndarray


class World(NamedTuple):
    """A run."""

    links: Links
    flows: FlowStates
    packets: Packets
    calendar: Calendar
    path: np.ndarray
    """int64[flow, MOST_HOPS]: links."""
    ready_first: np.ndarray
    ready_last: np.ndarray
    used: np.ndarray
    """Bytes that each switch holds."""
    shared: np.ndarray
    """Bytes that it can hold without headroom, and ``whole`` with it."""
    whole: np.ndarray
    counters: np.ndarray
    random: np.ndarray
    trace: Trace

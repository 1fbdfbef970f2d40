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


type Column = Any
"""A NumPy array, of which an element is a number to numba; a type checker would have it be an array again."""


def records[T](kind: type[T], number: int, values: Mapping[str, Any], otherwise: Any = 0) -> T:
    """A record array of ``number`` elements with the fields of ``kind``, each as ``values`` says, else int64 and ``otherwise``."""
    types = {name: np.asarray(values.get(name, np.int64(0))).dtype for name in kind.__annotations__}
    made = np.recarray(number, dtype=np.dtype(list(types.items()), align=True))
    for name in types:
        made[name] = values.get(name, otherwise)
    return cast(T, made)


class Links(NamedTuple):
    """One direction of a cable, with the queue in front of it and what the switch at its end holds of its packets."""

    ps_per_byte: Column
    delay: Column
    owner: Column
    """Switch that sends on it; -1: a NIC."""
    end: Column
    """Switch at its end; -1: a NIC."""
    share: Column
    """Of the free buffer that its packets may have at its end before it is paused."""
    mark_from: Column
    mark_to: Column
    first: Column
    last: Column
    queued: Column
    peak: Column
    is_busy: Column
    is_paused: Column
    held: Column
    """Bytes at its end that came over it."""
    is_asked: Column
    """Its end has asked for a pause."""
    pauses: Column
    paused_at: Column
    paused_ps: Column


class FlowStates(NamedTuple):
    """Flows: fixed at the start, then what the NIC, the receiver and the law of congestion control keep of each."""

    hops: Column
    host: Column
    length: Column
    start: Column
    back: Column
    """Delay of an answer."""
    sent: Column
    flying: Column
    received: Column
    finish: Column
    is_ready: Column
    following: Column
    send_at: Column
    rate: Column
    goal: Column
    alpha: Column
    alpha_at: Column
    alpha_seen: Column
    cut_at: Column
    raise_at: Column
    timer_rounds: Column
    byte_rounds: Column
    byte_count: Column
    cnp_at: Column
    window: Column
    window_most: Column
    delay: Column
    """Newest round-trip time."""


class Packets(NamedTuple):
    """A pool."""

    flow: Column
    hop: Column
    is_marked: Column
    sent_at: Column
    length: Column
    following: Column


class Calendar(NamedTuple):
    """A binary heap of events by time, then order."""

    time: Column
    order: Column
    kind: Column
    number: Column


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
    received: Column
    delay: Column
    queued: Column


class World(NamedTuple):
    """A run."""

    links: Links
    flows: FlowStates
    packets: Packets
    calendar: Calendar
    path: Column
    """int64[flow, MOST_HOPS]: links."""
    ready_first: Column
    ready_last: Column
    used: Column
    """Bytes that each switch holds."""
    shared: Column
    """Bytes that it can hold without headroom, and ``whole`` with it."""
    whole: Column
    counters: Column
    random: Column
    trace: Trace

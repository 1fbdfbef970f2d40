"""The loop over events, until all flows have finished or the time is up."""

from megascale_jax.sim.compiled import compiled
from megascale_jax.sim.congestion.calendar import pop, push
from megascale_jax.sim.congestion.nic import acknowledged, congested, lost, make_ready, receive, send_from
from megascale_jax.sim.congestion.state import (
    ACKED,
    ARRIVES,
    CNP,
    EVENTS,
    FAULT,
    HEAP_SIZE,
    LOOK,
    LOST,
    NO_FAULT,
    NOW,
    OPEN,
    PACE,
    PAUSE,
    RESUME,
    SAMPLE,
    SENT_OFF,
    START,
    Law,
    World,
)
from megascale_jax.sim.congestion.switch import pause, resume, send_next, take_in


@compiled
def run_events(world: World, law: Law, end: int) -> None:
    """Handle events up to ``end`` (ps). What became of it is in ``world``."""
    flows, counters = world.flows, world.counters
    for flow in range(len(flows.length)):
        push(world, flows.start[flow], START, flow)
    if world.trace.period > 0:
        push(world, 0, LOOK, 0)
    while counters[HEAP_SIZE] > 0 and counters[OPEN] > 0 and counters[FAULT] == NO_FAULT:
        if world.calendar.time[0] > end:
            break
        now, kind, item = pop(world)
        counters[NOW] = now
        counters[EVENTS] += 1
        handle(world, law, now, kind, item)
    for link in range(len(world.links.is_paused)):
        if world.links.is_paused[link]:
            resume(world, link, counters[NOW])


@compiled
def handle(world: World, law: Law, now: int, kind: int, item: int) -> None:
    """One event."""
    links = world.links
    if kind == ARRIVES:
        flow = world.packets.flow[item]
        link = world.path[flow, world.packets.hop[item]]
        if links.end[link] < 0:
            receive(world, law, item, now)
        else:
            take_in(world, law, item, link, now)
    elif kind == SENT_OFF:
        links.is_busy[item] = False
        carry_on(world, law, item, now)
    elif kind == ACKED:
        acknowledged(world, law, item, now)
    elif kind in (PACE, START):
        if kind == START:
            world.flows.raise_at[item] = world.flows.alpha_at[item] = now
        make_ready(world, law, item, now)
    elif kind == CNP:
        congested(world, law, item, now)
    elif kind == PAUSE:
        pause(world, item, now)
    elif kind == RESUME:
        resume(world, item, now)
        carry_on(world, law, item, now)
    elif kind == LOST:
        lost(world, law, item, now)
    elif kind == LOOK:
        look(world, now)


@compiled
def carry_on(world: World, law: Law, link: int, now: int) -> None:
    """A link can send again."""
    if world.links.owner[link] < 0:
        send_from(world, law, link, now)
    else:
        send_next(world, law, link, now)


@compiled
def look(world: World, now: int) -> None:
    """Take a sample, and have the next one taken while there is room."""
    trace, counters = world.trace, world.counters
    row = counters[SAMPLE]
    trace.received[row] = world.flows.received
    trace.delay[row] = world.flows.delay
    trace.queued[row] = world.links.queued
    counters[SAMPLE] = row + 1
    if row + 1 < len(trace.received):
        push(world, now + trace.period, LOOK, 0)

"""What switches do: queue packets, mark them, hold the buffer's account, pause the links that bring too much, drop what does not fit."""

import numpy as np

from megascale_jax.sim.compiled import compiled
from megascale_jax.sim.congestion.calendar import push
from megascale_jax.sim.congestion.state import ARRIVES, DROPPED, LOST, MARKED, PAUSE, RESUME, SENT_OFF, Law, World


@compiled
def chance(world: World) -> float:
    """A number in [0, 1): xorshift64* (Vigna, 2016)."""
    state = world.random[0]
    state ^= state >> np.uint64(12)
    state ^= state << np.uint64(25)
    state ^= state >> np.uint64(27)
    world.random[0] = state
    return float((state * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@compiled
def allowance(world: World, link: int, law: Law) -> float:
    """Bytes that a link may have at its end before it is paused: its reserve and a share of what is free now."""
    switch = world.links.end[link]
    free = world.shared[switch] - world.used[switch]
    return law.reserve + max(free, 0) * world.links.share[link]


@compiled
def take_in(world: World, law: Law, packet: int, link: int, now: int) -> bool:
    """A packet has come to a switch over ``link``; whether it was kept."""
    links, packets = world.links, world.packets
    switch, size = links.end[link], packets.length[packet]
    if world.used[switch] + size > world.whole[switch]:
        world.counters[DROPPED] += 1
        push(world, now + world.flows.back[packets.flow[packet]], LOST, packet)
        return False
    world.used[switch] += size
    links.held[link] += size
    if law.is_lossless and not links.is_asked[link] and links.held[link] > allowance(world, link, law):
        links.is_asked[link] = True
        links.pauses[link] += 1
        push(world, now + links.delay[link], PAUSE, link)
    packets.hop[packet] += 1
    out = world.path[packets.flow[packet], packets.hop[packet]]
    packets.following[packet] = -1
    if links.first[out] < 0:
        links.first[out] = packet
    else:
        packets.following[links.last[out]] = packet
    links.last[out] = packet
    links.queued[out] += size
    links.peak[out] = max(links.peak[out], links.queued[out])
    send_next(world, law, out, now)
    return True


@compiled
def send_next(world: World, law: Law, link: int, now: int) -> None:
    """Send the first packet of a switch's queue unless the link is busy or paused."""
    links, packets = world.links, world.packets
    packet = links.first[link]
    if packet < 0 or links.is_busy[link] or links.is_paused[link]:
        return
    marks(world, law, link, packet)
    size = packets.length[packet]
    links.first[link] = packets.following[packet]
    if links.first[link] < 0:
        links.last[link] = -1
    links.queued[link] -= size
    let_go(world, law, world.path[packets.flow[packet], packets.hop[packet] - 1], size, now)
    put_on(world, link, packet, now)


@compiled
def put_on(world: World, link: int, packet: int, now: int) -> None:
    """A packet begins to leave on a link."""
    links = world.links
    links.is_busy[link] = True
    sent = now + int(world.packets.length[packet] * links.ps_per_byte[link] + 0.5)
    push(world, sent, SENT_OFF, link)
    push(world, sent + links.delay[link], ARRIVES, packet)


@compiled
def marks(world: World, law: Law, link: int, packet: int) -> None:
    """Mark a packet that leaves by the length of its queue."""
    links, queued = world.links, world.links.queued[link]
    low, high = links.mark_from[link], links.mark_to[link]
    if world.packets.is_marked[packet] or queued <= low:
        return
    if queued > high or chance(world) < law.mark_chance * (queued - low) / (high - low):
        world.packets.is_marked[packet] = True
        world.counters[MARKED] += 1


@compiled
def let_go(world: World, law: Law, link: int, size: int, now: int) -> None:
    """Bytes that came over ``link`` have left the switch at its end."""
    links = world.links
    world.used[links.end[link]] -= size
    links.held[link] -= size
    if links.is_asked[link] and (links.held[link] == 0 or links.held[link] + law.hysteresis <= allowance(world, link, law)):
        links.is_asked[link] = False
        push(world, now + links.delay[link], RESUME, link)


@compiled
def pause(world: World, link: int, now: int) -> None:
    """A pause has come to the sender of a link: what it has begun to send goes out, no more."""
    world.links.is_paused[link] = True
    world.links.paused_at[link] = now


@compiled
def resume(world: World, link: int, now: int) -> None:
    """The contrary."""
    links = world.links
    links.is_paused[link] = False
    links.paused_ps[link] += now - links.paused_at[link]

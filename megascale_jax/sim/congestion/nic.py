"""What NICs do: take turns among the flows that may send, hand packets out, answer what comes in.

Acknowledgements and CNPs have a class of their own that is never paused or queued, as RoCE networks give them; so they are events after the
delay of the way back, and no packets. A lost packet is made known to its sender after that delay, which no NIC does as well: losses are
counted, retransmission is not studied here.
"""

from megascale_jax.sim.compiled import compiled
from megascale_jax.sim.congestion.calendar import push
from megascale_jax.sim.congestion.laws import change_window, count_bytes, cut_rate, raise_rate
from megascale_jax.sim.congestion.state import ACKED, CNP, CNPS, FAULT, FREE, NO_PACKET_LEFT, OPEN, PACE, RATE, RECEIVED, SENT, Law, World
from megascale_jax.sim.congestion.switch import put_on


@compiled
def may_send(world: World, law: Law, flow: int, now: int) -> bool:
    """Whether the law lets a flow's next packet out now."""
    flows = world.flows
    if flows.sent[flow] >= flows.length[flow] or now < flows.send_at[flow]:
        return False
    if law.kind == RATE:
        return True
    return flows.flying[flow] == 0 or flows.flying[flow] + law.mtu <= flows.window[flow] * law.mtu


@compiled
def take_turn(world: World, law: Law, flow: int, now: int) -> None:
    """Have a flow wait for its turn, if it may send."""
    flows = world.flows
    if flows.is_ready[flow] or not may_send(world, law, flow, now):
        return
    host = flows.host[flow]
    flows.is_ready[flow] = True
    flows.following[flow] = -1
    if world.ready_first[host] < 0:
        world.ready_first[host] = flow
    else:
        flows.following[world.ready_last[host]] = flow
    world.ready_last[host] = flow


@compiled
def send_from(world: World, law: Law, host: int, now: int) -> None:
    """Send a packet of the flow whose turn it is, unless the NIC is busy or paused. A host's uplink has its number."""
    flows, links, packets, counters = world.flows, world.links, world.packets, world.counters
    flow = world.ready_first[host]
    if flow < 0 or links.is_busy[host] or links.is_paused[host]:
        return
    packet = counters[FREE]
    if packet < 0:
        counters[FAULT] = NO_PACKET_LEFT
        return
    counters[FREE] = packets.following[packet]
    world.ready_first[host] = flows.following[flow]
    flows.is_ready[flow] = False
    size = min(law.mtu, flows.length[flow] - flows.sent[flow])
    packets.flow[packet], packets.hop[packet], packets.is_marked[packet] = flow, 0, False
    packets.sent_at[packet], packets.length[packet] = now, size
    flows.sent[flow] += size
    flows.flying[flow] += size
    counters[SENT] += 1
    put_on(world, host, packet, now)
    if law.kind == RATE:
        raise_rate(flows, flow, law, now)
        count_bytes(flows, flow, law, size)
        flows.send_at[flow] = now + int(size / flows.rate[flow])
    elif flows.window[flow] < 1:
        flows.send_at[flow] = now + int(max(flows.delay[flow], flows.back[flow]) / flows.window[flow])
    if flows.sent[flow] < flows.length[flow] and flows.send_at[flow] > now:
        push(world, flows.send_at[flow], PACE, flow)
    take_turn(world, law, flow, now)


@compiled
def make_ready(world: World, law: Law, flow: int, now: int) -> None:
    """The same, and send at once when the NIC is free."""
    take_turn(world, law, flow, now)
    send_from(world, law, world.flows.host[flow], now)


@compiled
def receive(world: World, law: Law, packet: int, now: int) -> None:
    """A packet is where it was to go: count it, and answer as the law wants it."""
    flows, packets, counters = world.flows, world.packets, world.counters
    flow, size = packets.flow[packet], packets.length[packet]
    counters[RECEIVED] += 1
    flows.received[flow] += size
    if flows.received[flow] == flows.length[flow]:
        flows.finish[flow] = now
        counters[OPEN] -= 1
    if law.kind != RATE:
        push(world, now + flows.back[flow], ACKED, packet)
        return
    if packets.is_marked[packet] and now >= flows.cnp_at[flow] + law.cnp_gap:
        flows.cnp_at[flow] = now
        counters[CNPS] += 1
        push(world, now + flows.back[flow], CNP, flow)
    flows.flying[flow] -= size
    free(world, packet)


@compiled
def acknowledged(world: World, law: Law, packet: int, now: int) -> None:
    """The sender hears that a packet has come."""
    flows, packets = world.flows, world.packets
    flow, size = packets.flow[packet], packets.length[packet]
    flows.flying[flow] -= size
    change_window(flows, flow, law, now, now - packets.sent_at[packet], size, packets.is_marked[packet])
    free(world, packet)
    make_ready(world, law, flow, now)


@compiled
def lost(world: World, law: Law, packet: int, now: int) -> None:
    """The sender hears that a packet was dropped: it is to be sent again."""
    flows, packets = world.flows, world.packets
    flow, size = packets.flow[packet], packets.length[packet]
    flows.flying[flow] -= size
    flows.sent[flow] -= size
    free(world, packet)
    make_ready(world, law, flow, now)


@compiled
def congested(world: World, law: Law, flow: int, now: int) -> None:
    """A CNP has come to the sender."""
    cut_rate(world.flows, flow, law, now)


@compiled
def free(world: World, packet: int) -> None:
    """A packet's place can be used again."""
    world.packets.following[packet] = world.counters[FREE]
    world.counters[FREE] = packet

"""How a sender answers: DCQCN's rate, Swift's window, the hybrids' windows. One flow at a time, all state in `FlowStates`.

DCQCN's timers are not events: whatever they would have done is made up for when the flow's rate or alpha is next needed, which is exact,
since nothing else reads them.
"""

from math import sqrt

from megascale_jax.sim.compiled import compiled
from megascale_jax.sim.congestion.state import HYBRID, NSCC, FlowStates, Law


@compiled
def decay_alpha(flows: FlowStates, flow: int, law: Law, now: int) -> None:
    """All periods of alpha that have ended: alpha <- (1 - g) alpha, plus g for the one in which a CNP came."""
    periods = (now - flows.alpha_at[flow]) // law.alpha_period
    if periods < 1:
        return
    flows.alpha[flow] *= (1 - law.g) ** periods
    if flows.alpha_seen[flow]:  # it came in the first of them
        flows.alpha[flow] += law.g * (1 - law.g) ** (periods - 1)
        flows.alpha_seen[flow] = False
    flows.alpha_at[flow] += periods * law.alpha_period


@compiled
def raise_once(flows: FlowStates, flow: int, law: Law) -> None:
    """One round: half-way to the goal, which moves up after the fast rounds."""
    timer = flows.timer_rounds[flow]
    counter = flows.byte_rounds[flow] if law.byte_counter > 0 else timer
    if min(timer, counter) > law.fast_rounds:
        flows.goal[flow] += law.hyper_rate
    elif max(timer, counter) >= law.fast_rounds:
        flows.goal[flow] += law.additive_rate
    flows.goal[flow] = min(flows.goal[flow], law.line_rate)
    flows.rate[flow] = min((flows.rate[flow] + flows.goal[flow]) / 2, law.line_rate)


@compiled
def raise_rate(flows: FlowStates, flow: int, law: Law, now: int) -> None:
    """All rounds of the timer that have ended."""
    rounds = (now - flows.raise_at[flow]) // law.raise_period
    for _ in range(rounds):
        if flows.rate[flow] >= law.line_rate:
            break
        flows.timer_rounds[flow] += 1
        raise_once(flows, flow, law)
    flows.raise_at[flow] += rounds * law.raise_period


@compiled
def count_bytes(flows: FlowStates, flow: int, law: Law, size: int) -> None:
    """The same by bytes sent."""
    if law.byte_counter <= 0 or flows.rate[flow] >= law.line_rate:
        return
    flows.byte_count[flow] += size
    if flows.byte_count[flow] >= law.byte_counter:
        flows.byte_count[flow] -= law.byte_counter
        flows.byte_rounds[flow] += 1
        raise_once(flows, flow, law)


@compiled
def cut_rate(flows: FlowStates, flow: int, law: Law, now: int) -> None:
    """A CNP has come. Alpha is 1 at the first one, whenever that is: the NIC begins to look after a flow then."""
    raise_rate(flows, flow, law, now)
    if flows.cut_at[flow] < 0:
        flows.alpha_at[flow] = now
    decay_alpha(flows, flow, law, now)
    flows.alpha_seen[flow] = True
    if now < flows.cut_at[flow] + law.cut_gap:
        return
    flows.cut_at[flow] = now
    flows.goal[flow] = flows.rate[flow]
    flows.rate[flow] = max(flows.rate[flow] * (1 - flows.alpha[flow] / 2), law.least_rate)
    flows.timer_rounds[flow] = flows.byte_rounds[flow] = 0
    flows.byte_count[flow] = 0
    flows.raise_at[flow] = now


@compiled
def target_delay(flows: FlowStates, flow: int, law: Law) -> float:
    """Swift's target round-trip time of a flow, ps: base, hops, and more for a small window."""
    scaled = 0.0
    if law.scaling > 0:
        steep = law.scaling / (1 / sqrt(law.scaling_least) - 1 / sqrt(law.scaling_most))
        scaled = steep / sqrt(flows.window[flow]) - steep / sqrt(law.scaling_most)
        scaled = min(max(scaled, 0.0), law.scaling)
    return law.target + (flows.hops[flow] - 1) * law.hop + scaled


@compiled
def marked_share(flows: FlowStates, flow: int, law: Law, now: int, delay: int) -> float:
    """What is left of a hybrid's window after a marked packet: 1 - alpha / 2 as of DCQCN's rate, or all when it was
    cut in this round trip.
    """
    if flows.cnp_at[flow] < 0:
        flows.alpha_at[flow] = flows.cnp_at[flow] = now
    decay_alpha(flows, flow, law, now)
    flows.alpha_seen[flow] = True
    if now < flows.cut_at[flow] + delay:
        return 1.0
    flows.cut_at[flow] = now
    return 1 - flows.alpha[flow] / 2


@compiled
def change_window(flows: FlowStates, flow: int, law: Law, now: int, delay: int, size: int, is_marked: bool) -> None:
    """An acknowledgement of ``size`` bytes has come after ``delay`` ps."""
    flows.delay[flow] = delay
    window, target = flows.window[flow], target_delay(flows, flow, law)
    acked = size / law.mtu
    step = acked / window if window >= 1 else acked
    is_late = delay >= target
    if law.kind == NSCC and not is_late:
        window += 0.0 if is_marked else law.additive * step * max(1.0, law.fast * (target - delay) / target)
    elif law.kind == NSCC and not is_marked:
        window += law.slow * law.additive * step
    elif not is_late and not (law.kind == HYBRID and is_marked):
        window += law.additive * step
    elif is_late and now >= flows.cut_at[flow] + delay:
        window *= max(1 - law.beta * (delay - target) / delay, 1 - law.largest_cut)
        flows.cut_at[flow] = now
    if law.kind == HYBRID and is_marked:
        window *= marked_share(flows, flow, law, now, delay)
    flows.window[flow] = min(max(window, law.window_least), flows.window_most[flow])

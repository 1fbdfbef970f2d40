"""What becomes of nodes that compute slower than their peers in real steps (paper, section 6.3: ~10 % slower, clean in tests). Pure.

    windows --judged--> suspected --next checkpoint--> isolated --checks--> returned (a spare again), or archived (evicted)

A node is slow in a window if, in one pass or in all together, it takes longer than its peers by ``excess`` beyond what is usual for it, by
``deviations`` of such a difference, at a cost that matters, and waits less by part of that (`views/slow_devices.py` has the reasons). It
is suspected when it was in ``windows`` of the last ``of``. If most nodes are slow in a window it is the program, and nobody is.

With ``action: act`` the first save after that has its place taken by a spare: one node at a time, only while there is a spare
that was never suspected, within ``max_evictions`` in ``strike_window_s``, evictions counted. A node in which the checks find nothing is
returned; one that is isolated a second time, or found bad, is evicted for good.
"""

from collections.abc import Iterator
from statistics import median

from megascale_jax.cluster.lifecycle import NodeStatus, Phase
from megascale_jax.cluster.moves import alarmed, evicted, most_evictions, moved, recent, suspended
from megascale_jax.cluster.slow_windows import PassTimes, Window
from megascale_jax.cluster.state import SLOW_NODE, Governed, Judged, Profile, Rechecked, SlowPass, SlowWindow, State, Suspicion
from megascale_jax.config.cluster import ClusterConfig, SlowNodesConfig

LEAST_SHARE = 1e-3
"""Of a step that an excess must cost."""
LEAST_EVIDENCE = 0.3
"""Of its excess that a slow node must wait less than its peers."""
MOST_ISOLATIONS = 2


def judged(state: State, window: Window, config: SlowNodesConfig, at_s: float) -> Judged:
    """Which nodes were slow in a window of the present attempt, and what it teaches of those that are new."""
    slow: dict[str, SlowPass] = {}
    usual: dict[str, dict[str, float]] = {}
    for one in window.ranks:
        name = state.seats[one.rank] if one.rank < len(state.seats) else None
        if name is None:
            continue
        profile = _profile(state, name)
        if profile.windows < config.baseline:
            usual[name] = {what: round(times.excess, 4) for what, times in one.passes.items()}
            profile = _learned(profile, usual[name])
        found = _slow_passes(one.passes, profile, window.step_s, config)
        if worst := max(found, key=lambda this: this.cost_s, default=None):
            slow[name] = worst
    if 2 * len(slow) > len(state.seats):
        slow = {}
    return Judged(at_s=at_s, attempt=window.attempt, window=SlowWindow(first=window.first, end=window.end, slow=slow), usual=usual)


def with_window(state: State, event: Judged, config: SlowNodesConfig) -> State:
    """After a window: who is suspected now, and who no more."""
    profiles = dict(state.profiles)
    for name, excess in event.usual.items():
        if name in state.nodes:
            profiles[name] = _learned(_profile(state, name), excess)
    windows = (*state.slow_windows, event.window)[-config.of :]
    state = state.model_copy(update={"profiles": profiles, "slow_windows": windows})
    for name in dict.fromkeys((*event.window.slow, *state.slow)):
        count, known = sum(name in window.slow for window in windows), state.slow.get(name)
        if count >= config.windows and name in event.window.slow and name in state.seats and (known is None or known.stage == "returned"):
            evidence = described(name, windows)
            isolations = 0 if known is None else known.isolations
            state = _with(state, name, Governed(stage="suspected", since_s=event.at_s, evidence=evidence, isolations=isolations))
            if config.action != "act":
                state = _alarmed(state, name, evidence)
        elif known is not None and known.stage == "suspected" and count == 0:
            state = _cleared(state, name, event.at_s)
    return state


def isolated(state: State, at_s: float, config: ClusterConfig) -> State:
    """Have a spare take the place of the slowest suspected node, if that may be. Ask once a new checkpoint is on storage."""
    if config.slow_nodes.action != "act" or state.phase != Phase.RUNNING or any(one.stage == "isolated" for one in state.slow.values()):
        return state
    suspects = [name for name, one in state.slow.items() if one.stage == "suspected" and _trains(state, name)]
    if not suspects:
        return state
    name = max(suspects, key=lambda one: max(window.slow[one].cost_s if one in window.slow else 0.0 for window in state.slow_windows))
    known = state.slow[name]
    if not any(_is_clean_spare(state, spare) for spare in state.nodes):
        return _alarmed(state, name, f"{known.evidence}; it should be isolated, but there is no spare to take its place")
    before = recent(state.isolations_s, at_s, config)
    if len(before) + len(recent(state.evictions_s, at_s, config)) >= (most := most_evictions(state, config)):
        why = f"{most} nodes were isolated or evicted within {config.strike_window_s:.0f} s"
        return _alarmed(state, name, f"{known.evidence}; it should be isolated, but {why}; cordon it by hand")
    state = moved(state, name, NodeStatus.CORDONED, reason=f"isolated, since it is slow: {known.evidence}")
    update = {"stage": "isolated", "since_s": at_s, "isolations": known.isolations + 1}
    state = _with(state, name, known.model_copy(update=update)).model_copy(update={"isolations_s": (*before, at_s)})
    return suspended(state, at_s, (Suspicion(rule=SLOW_NODE, node=name, detail=known.evidence),), state.best_step)


def rechecked(state: State, event: Rechecked, config: ClusterConfig) -> State:
    """After the checks of an isolated node: a spare again, or evicted for good."""
    known, node = state.slow.get(event.node), state.nodes.get(event.node)
    if known is None or node is None or known.stage != "isolated" or known.isolations != event.isolation:
        return state
    is_again = known.isolations >= MOST_ISOLATIONS
    stage = "archived" if event.bad or is_again else "returned"
    known = known.model_copy(update={"stage": stage, "since_s": event.at_s, "findings": event.bad or event.findings})
    state = _with(_without_windows(state, event.node), event.node, known)
    if node.status != NodeStatus.CORDONED:
        return state
    if stage == "archived":
        why = f"slow, and {event.bad}" if event.bad else f"slow again after {known.isolations - 1} isolation(s)"
        return evicted(state, event.node, f"{why}: {known.evidence}", event.at_s, config)
    return moved(state, event.node, NodeStatus.READY if node.lost_at_s is None else NodeStatus.LOST, reason="")


def taken_back(state: State, name: str) -> State:
    """An operator has taken a node back, or another machine has its name: what was is no reason any more."""
    if name not in state.slow:
        return state
    state = _without_windows(state, name)
    return state.model_copy(update={"slow": {other: one for other, one in state.slow.items() if other != name}})


def released(state: State, at_s: float) -> State:
    """Too few nodes are left: those that are isolated may train all the same, slow and unchecked as they are."""
    for name, one in state.slow.items():
        node = state.nodes[name]
        if one.stage == "isolated" and node.status == NodeStatus.CORDONED and node.lost_at_s is None:
            findings = "not over; it is needed, since no other spare is left"
            state = _with(state, name, one.model_copy(update={"stage": "returned", "since_s": at_s, "findings": findings}))
            state = moved(state, name, NodeStatus.READY, reason="")
    return state


def to_recheck(state: State) -> str | None:
    """The isolated node whose checks are due: it has no place any more, and can be asked."""
    for name, one in state.slow.items():
        node = state.nodes[name]
        if one.stage == "isolated" and node.status == NodeStatus.CORDONED and node.lost_at_s is None and name not in state.seats:
            return name
    return None


def described(name: str, windows: tuple[SlowWindow, ...]) -> str:
    """The evidence of a node in words, by the windows in which it was slow."""
    slow = [window for window in windows if name in window.slow]
    worst = max((window.slow[name] for window in slow), key=lambda one: one.cost_s)
    excess = median(window.slow[name].excess for window in slow)
    return (
        f"{excess:.1%} longer in {worst.name} than its peers in {len(slow)} of {len(windows)} windows, steps {windows[0].first} to "
        f"{windows[-1].end - 1} (usual {worst.usual:.1%}; {1e3 * worst.cost_s:.3g} ms a step, waits less by {worst.waits_less:.0%} of it)"
    )


def _slow_passes(passes: dict[str, PassTimes], profile: Profile, step_s: float, config: SlowNodesConfig) -> Iterator[SlowPass]:
    for name, times in passes.items():
        usual = median(known) if (known := profile.excess.get(name)) else 0.0
        beyond = times.excess - min(max(usual, 0.0), config.excess / 2)
        if beyond < max(config.excess, config.deviations * times.deviation) or times.cost_s < LEAST_SHARE * step_s:
            continue
        if times.waits_less >= LEAST_EVIDENCE:
            yield SlowPass(name=name, excess=times.excess, usual=usual, cost_s=times.cost_s, waits_less=times.waits_less)


def _profile(state: State, name: str) -> Profile:
    known, machine = state.profiles.get(name), state.nodes[name].machine
    return known if known is not None and known.machine == machine else Profile(machine=machine)


def _learned(profile: Profile, excess: dict[str, float]) -> Profile:
    known = profile.excess | {name: (*profile.excess.get(name, ()), value) for name, value in excess.items()}
    return profile.model_copy(update={"windows": profile.windows + 1, "excess": known})


def _alarmed(state: State, name: str, text: str) -> State:
    """One alarm a node: the newest evidence."""
    start = f"{name} is slow: "
    others = tuple(alarm for alarm in state.alarms if not alarm.startswith(start) or alarm == start + text)
    return alarmed(state.model_copy(update={"alarms": others}), start + text)


def _with(state: State, name: str, governed: Governed) -> State:
    return state.model_copy(update={"slow": {**state.slow, name: governed}})


def _cleared(state: State, name: str, at_s: float) -> State:
    """It was not slow for a while: never isolated, it is as if nothing had been."""
    known = state.slow[name]
    if known.isolations:
        return _with(state, name, known.model_copy(update={"stage": "returned", "since_s": at_s}))
    return state.model_copy(update={"slow": {other: one for other, one in state.slow.items() if other != name}})


def _without_windows(state: State, name: str) -> State:
    """What it did before says nothing of it after."""
    windows = tuple(
        window.model_copy(update={"slow": {other: one for other, one in window.slow.items() if other != name}})
        for window in state.slow_windows
    )
    return state.model_copy(update={"slow_windows": windows})


def _trains(state: State, name: str) -> bool:
    node = state.nodes[name]
    return name in state.seats and node.status == NodeStatus.ASSIGNED and node.lost_at_s is None


def _is_clean_spare(state: State, name: str) -> bool:
    node = state.nodes[name]
    return node.status == NodeStatus.READY and node.lost_at_s is None and name not in state.slow

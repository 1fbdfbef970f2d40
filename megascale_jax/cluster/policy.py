"""What the driver decides, as pure functions of the job's state: `apply` an event, what a node is `desired` to do, the next `deadline`.

An event that no longer fits (of an older attempt, doubled, late) changes nothing, so every message may come twice or in another order.
Applying the journal's events to the first state gives the present one (paper section 4.1, figure 5).
"""

from collections.abc import Mapping

from megascale_jax.cluster.governance import isolated, rechecked, taken_back, with_window
from megascale_jax.cluster.lifecycle import ENDS, NodeStatus, Phase
from megascale_jax.cluster.messages import Assignment, Desired
from megascale_jax.cluster.moves import (
    EXIT_NO_PROGRESS,
    GROW,
    OPERATOR,
    busy,
    cause_nodes,
    evicted,
    is_busy,
    is_planned,
    moved,
    needs_no_diagnosis,
    reached,
    recent,
    suspended,
    to_phase,
    with_incident,
    with_node,
)
from megascale_jax.cluster.seats import seated, wait_s, waits_for_order
from megascale_jax.cluster.state import (
    CORRUPTION,
    Advanced,
    Anomaly,
    Diagnosed,
    Elapsed,
    Ended,
    Event,
    Idle,
    Joined,
    Judged,
    Lost,
    Node,
    Ordered,
    Rechecked,
    Restored,
    Shape,
    State,
    Suspicion,
)
from megascale_jax.config.cluster import ClusterConfig

ACTIVE = frozenset({Phase.RESTORING, Phase.RUNNING})
MISSED_BEATS = "missed_beats"
EXECUTOR_RESTARTED = "executor_restarted"
EXIT = "exit"
_OF_THE_NODE = frozenset({MISSED_BEATS, EXECUTOR_RESTARTED, CORRUPTION})
"""Rules that leave no doubt about which node it was."""


def first_state(shapes: tuple[Shape, ...]) -> State:
    """A job before its first node has come. ``shapes``: its full size, and smaller ones that it may shrink to."""
    return State(shapes=shapes, seats=(None,) * shapes[0].num_nodes)


def apply(state: State, event: Event, config: ClusterConfig) -> State:
    """The job after an event. Raises IllegalMoveError for a fault in this very module."""
    if state.phase in ENDS and not isinstance(event, Joined | Lost):
        return state
    match event:
        case Joined():
            state = _joined(state, event)
        case Lost():
            state = _lost(state, event, config)
        case Anomaly() if event.attempt == state.attempt and state.phase in ACTIVE:
            state = _found(state, event, config)
        case Idle() if event.attempt == state.attempt:
            state = state.model_copy(update={"idle": state.idle | {event.node}})
        case Diagnosed() if event.attempt == state.attempt and state.phase == Phase.DIAGNOSING:
            state = _diagnosed(state, event, config)
        case Advanced() if event.attempt == state.attempt and state.phase in ACTIVE:
            state = _advanced(state, event, config)
        case Ended() if event.attempt == state.attempt and state.phase in ACTIVE | {Phase.STOPPING}:
            state = _ended(state, event)
        case Elapsed() if event.phase == state.phase and event.since_s == state.since_s:
            state = _elapsed(state, event, config)
        case Restored() if event.node in state.nodes and state.nodes[event.node].status != NodeStatus.EVICTED:
            state = moved(state, event.node, state.nodes[event.node].status, is_out_of_service=False)
        case Judged() if event.attempt == state.attempt and state.phase == Phase.RUNNING:
            state = with_window(state, event, config.slow_nodes)
        case Rechecked():
            state = rechecked(state, event, config)
        case Ordered():
            state = _ordered(state, event, config)
        case _:
            return state
    return _onward(state, event.at_s, config)


def deadline(state: State, config: ClusterConfig) -> float | None:
    """When the present phase must be over, on the journal's axis; None: it has no limit, sections of the processes do."""
    limits = {
        Phase.SUSPENDED: config.save_s if is_planned(state) else config.stop_s,
        Phase.DIAGNOSING: config.diagnose_s,
        Phase.REPLACING: wait_s(state, config),
        Phase.STOPPING: config.save_s,
    }
    limit = limits.get(state.phase)
    return None if limit is None else state.since_s + limit


def looks_again_at(state: State, config: ClusterConfig) -> float | None:
    """When the grace of a lost node with a seat ends while seats are being filled, or the wait for the nodes of an order."""
    if state.phase != Phase.REPLACING:
        return None
    if (at_s := waits_for_order(state, config)) is not None:
        return at_s
    lost = [at_s for name in state.seats if name is not None and (at_s := state.nodes[name].lost_at_s) is not None]
    return min(lost) + config.grace_s if lost else None


def ranks_of(state: State) -> dict[str, int]:
    """Rank of each node that has a seat."""
    return {name: rank for rank, name in enumerate(state.seats) if name is not None}


def desired(state: State, name: str, config: ClusterConfig, ranks: Mapping[str, int] | None = None) -> Desired:
    """All of what a node should be doing. The diagnosis is added by the driver. ``ranks``: `ranks_of`, for who asks for many nodes."""
    ranks = ranks_of(state) if ranks is None else ranks
    grace_s = config.save_s if state.phase == Phase.STOPPING or (state.phase == Phase.SUSPENDED and is_planned(state)) else 0.0
    node = state.nodes[name]
    assignment = None
    if state.phase in ACTIVE and name in ranks:
        first = state.nodes[state.seats[0] or name]
        assignment = Assignment(
            attempt=state.attempt,
            rank=ranks[name],
            num_ranks=len(state.seats),
            coordinator=f"{first.address}:{first.ports[state.attempt % len(first.ports)]}",
            overrides=(*state.shapes[state.shape].overrides, *_rewinds(state)),
        )
    is_over = state.phase in ENDS
    leaves = is_over or node.status == NodeStatus.EVICTED
    warm = config.warm and not leaves
    return Desired(beat_s=config.beat_s, assignment=assignment, stop_grace_s=grace_s, warm=warm, leave=leaves, is_over=is_over)


def _rewinds(state: State) -> tuple[str, ...]:
    return (f"train.rewinds={[list(rewind) for rewind in state.rewinds]}".replace(" ", ""),) if state.rewinds else ()


# One function an event.


def _joined(state: State, event: Joined) -> State:
    old = state.nodes.get(event.node)
    fresh = {name: getattr(event, name) for name in ("incarnation", "address", "ports", "machine")} | {"lost_at_s": None, "reason": ""}
    if old is None:
        return with_node(state, event.node, Node(status=NodeStatus.READY, **fresh))
    has_seat, is_new = event.node in state.seats, event.incarnation != old.incarnation
    status = old.status
    if status in (NodeStatus.LOST, NodeStatus.READY, NodeStatus.ASSIGNED):
        status = NodeStatus.ASSIGNED if has_seat else NodeStatus.READY
    if status == NodeStatus.EVICTED and event.machine != old.machine:  # the engine has put another machine in its place
        state = with_node(taken_back(state, event.node), event.node, Node(status=NodeStatus.READY, **fresh))
    else:
        if status in (NodeStatus.CORDONED, NodeStatus.EVICTED):
            fresh["reason"] = old.reason
        state = moved(state, event.node, status, **fresh)
    if is_new and has_seat:
        if state.phase in ACTIVE:  # its processes died with the executor before
            suspicion = Suspicion(rule=EXECUTOR_RESTARTED, node=event.node, detail="its executor came back as another process")
            state = suspended(state, event.at_s, (suspicion,), state.best_step)
        state = state.model_copy(update={"idle": state.idle | {event.node}})
    return state


def _lost(state: State, event: Lost, config: ClusterConfig) -> State:
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation or node.lost_at_s is not None:
        return state
    if node.status == NodeStatus.EVICTED:
        return moved(state, event.node, NodeStatus.EVICTED, lost_at_s=event.at_s)
    status = node.status if node.status == NodeStatus.CORDONED else NodeStatus.LOST
    faults = (*recent(node.faults_s, event.at_s, config), event.at_s)
    state = moved(state, event.node, status, lost_at_s=event.at_s, reason=event.reason, faults_s=faults)
    if event.node in state.seats:
        if state.phase in ACTIVE:
            suspicion = Suspicion(rule=MISSED_BEATS, node=event.node, detail=event.reason)
            state = suspended(reached(state, event.step), event.at_s, (suspicion,), event.step)
        elif state.incident is not None and state.phase != Phase.REPLACING:
            suspicion = Suspicion(rule=MISSED_BEATS, node=event.node, detail=event.reason)
            state = with_incident(state, suspicions=(*state.incident.suspicions, suspicion))
    return state


def _found(state: State, event: Anomaly, config: ClusterConfig) -> State:
    may_rewind = len(state.rewinds) < config.max_rewinds
    suspicions = tuple(one for one in event.suspicions if may_rewind or one.rewind is None)
    if not suspicions and event.suspicions:
        return state
    return suspended(reached(state, event.step), event.at_s, suspicions, event.step)


def _diagnosed(state: State, event: Diagnosed, config: ClusterConfig) -> State:
    incident = state.incident
    assert incident is not None, "only an incident is diagnosed"
    gone = [one.node for one in incident.suspicions if one.rule in _OF_THE_NODE and one.is_primary and one.node is not None]
    named = tuple(dict.fromkeys((*gone, *event.bad))) if event.bad else cause_nodes(incident.suspicions)
    findings = event.findings | event.bad
    state = with_incident(state, named=named, diagnosed_s=event.at_s, findings=findings)
    state = _with_faults(state, event, config)
    for name, reason in event.bad.items():
        state = evicted(state, name, reason, event.at_s, config)
    if config.evict_on_corruption:
        for name in cause_nodes(tuple(one for one in incident.suspicions if one.rule == CORRUPTION)):
            state = evicted(state, name, "its copy of the training state was wrong", event.at_s, config)
    for name in _blamed(state, incident.suspicions):
        node = state.nodes.get(name)
        if node is not None and node.status != NodeStatus.EVICTED and len(recent(node.faults_s, event.at_s, config)) >= config.strikes:
            state = evicted(state, name, f"{config.strikes} faults within {config.strike_window_s:.0f} s", event.at_s, config)
    return to_phase(state, Phase.REPLACING, event.at_s)


def _with_faults(state: State, event: Diagnosed, config: ClusterConfig) -> State:
    """Count one against each node that is named and that no check found bad; a loss was counted when it came."""
    incident = state.incident
    assert incident is not None, "only an incident is diagnosed"
    blamed = _blamed(state, incident.suspicions)
    for suspicion in incident.suspicions:
        name = suspicion.node
        if name not in blamed or not suspicion.is_primary or name in event.bad or suspicion.rule == MISSED_BEATS or name not in state.nodes:
            continue
        faults = recent(state.nodes[name].faults_s, event.at_s, config)
        state = moved(state, name, state.nodes[name].status, faults_s=(*faults, event.at_s))
    return state


def _blamed(state: State, suspicions: tuple[Suspicion, ...]) -> tuple[str, ...]:
    """Nodes that the primary suspicions name, unless these are most of the job: then it is the program, its data or its storage."""
    named = cause_nodes(suspicions)
    return named if 2 * len(named) <= len(state.seats) else ()


def _advanced(state: State, event: Advanced, config: ClusterConfig) -> State:
    has_saved = event.saved_step > state.saved_step
    state = reached(state, event.step).model_copy(update={"saved_step": max(state.saved_step, event.saved_step)})
    if state.phase != Phase.RESTORING:
        return isolated(state, event.at_s, config) if has_saved else state
    if state.incident is not None:
        state = with_incident(state, restored_s=event.at_s, resumed_step=event.resumed_step)
    return to_phase(state, Phase.RUNNING, event.at_s)


def _ended(state: State, event: Ended) -> State:
    state = reached(state, event.step)
    if event.is_complete:
        if state.incident is not None:
            state = with_incident(state, restored_s=event.at_s, resumed_step=event.step)
        return to_phase(state, Phase.FINISHED, event.at_s, outcome=f"all {event.step} steps are done")
    if state.phase == Phase.STOPPING:
        return to_phase(state, Phase.STOPPED, event.at_s, outcome=f"stopped after step {event.step}")
    return suspended(state, event.at_s, (Suspicion(rule=EXIT, detail="all processes ended before the last step"),), event.step)


def _elapsed(state: State, event: Elapsed, config: ClusterConfig) -> State:
    limit = deadline(state, config)
    if limit is None or event.at_s < limit:
        return state
    if state.phase == Phase.SUSPENDED:
        for name in list(busy(state)):
            status = state.nodes[name].status
            kept = status if status in (NodeStatus.CORDONED, NodeStatus.EVICTED) else NodeStatus.LOST
            reason = "did not confirm in time that its processes are gone"
            state = moved(state, name, kept, lost_at_s=event.at_s - config.grace_s, reason=reason)
        return state
    if state.phase == Phase.DIAGNOSING:
        return _diagnosed(
            state, Diagnosed(at_s=event.at_s, attempt=state.attempt, bad={}, findings={"": "the diagnosis ran out of time"}), config
        )
    if state.phase == Phase.STOPPING:
        return to_phase(state, Phase.STOPPED, event.at_s, outcome=f"stopped after step {state.best_step}; not every process saved in time")
    return state  # REPLACING: `_onward` sees that time is up


def _ordered(state: State, event: Ordered, config: ClusterConfig) -> State:
    state = reached(state, event.step)
    if event.action == "stop":
        if state.phase in ACTIVE:
            return to_phase(state.model_copy(update={"idle": frozenset()}), Phase.STOPPING, event.at_s)
        if state.phase == Phase.SUSPENDED and is_planned(state):  # its processes are saving
            return to_phase(state, Phase.STOPPING, event.at_s)
        return state if state.phase == Phase.STOPPING else to_phase(state, Phase.STOPPED, event.at_s, outcome=f"stopped by {event.by}")
    if event.action in ("restart", "rewind"):
        if state.phase not in ACTIVE or (event.action == "rewind") != (event.rewind is not None):
            return state
        suspicion = Suspicion(rule=OPERATOR, detail=f"{event.action} by {event.by}", rewind=event.rewind)
        return suspended(state, event.at_s, (suspicion,), event.step)
    node = state.nodes.get(event.node or "")
    if node is None or event.node is None:
        return state
    if event.action == "uncordon":
        if node.status not in (NodeStatus.CORDONED, NodeStatus.EVICTED):
            return state
        has_seat = event.node in state.seats and node.status == NodeStatus.CORDONED
        status = NodeStatus.LOST if node.lost_at_s is not None else NodeStatus.ASSIGNED if has_seat else NodeStatus.READY
        return moved(taken_back(state, event.node), event.node, status, reason="", faults_s=())
    if event.action == "cordon":
        return state if node.status == NodeStatus.EVICTED else moved(state, event.node, NodeStatus.CORDONED, reason=f"by {event.by}")
    if node.status == NodeStatus.EVICTED:
        return state
    state = moved(state, event.node, NodeStatus.EVICTED, reason=f"by {event.by}", is_out_of_service=True)
    if event.node in state.seats and state.phase in ACTIVE:
        suspicion = Suspicion(rule=OPERATOR, node=event.node, detail=f"evicted by {event.by}")
        state = suspended(state, event.at_s, (suspicion,), event.step)
    return state


# What follows by itself.


def _onward(state: State, at_s: float, config: ClusterConfig) -> State:
    """Moves that need no further event."""
    if state.phase == Phase.SUSPENDED:
        if state.fruitless >= config.fruitless_recoveries:
            outcome = f"no step beyond {state.best_step} after {state.fruitless} recoveries"
            return to_phase(state, Phase.FAILED, at_s, outcome=outcome, exit_code=EXIT_NO_PROGRESS)
        if not is_busy(state):
            state = with_incident(state, suspended_s=at_s)
            state = to_phase(state, Phase.REPLACING if needs_no_diagnosis(state) else Phase.DIAGNOSING, at_s)
    if state.phase == Phase.STOPPING and not is_busy(state):
        return to_phase(state, Phase.STOPPED, at_s, outcome=f"stopped after step {state.best_step}; not every process saved")
    if state.phase == Phase.REPLACING:
        return seated(state, at_s, config)
    if state.phase == Phase.RUNNING and state.shape > 0 and _can_grow(state):
        suspicion = Suspicion(rule=GROW, detail=f"{state.shapes[0].num_nodes} nodes are there again")
        return suspended(state, at_s, (suspicion,), state.best_step)
    return state


def _can_grow(state: State) -> bool:
    usable = [node for node in state.nodes.values() if node.status in (NodeStatus.READY, NodeStatus.ASSIGNED)]
    return len(usable) >= state.shapes[0].num_nodes and state.incident is None

"""Small moves of a job's state, each checked against the tables of `lifecycle.py`; `policy.py` puts them together. Pure."""

from collections.abc import Iterator, Mapping

from megascale_jax.cluster.lifecycle import NodeStatus, Phase, check_phase, check_status
from megascale_jax.cluster.state import LOSS_SPIKE, SLOW_NODE, Incident, Node, State, Suspicion
from megascale_jax.config.cluster import ClusterConfig

GROW = "grow"
OPERATOR = "operator"
EXIT_NO_PROGRESS, EXIT_NO_NODES = 20, 21
"""Exit codes of a driver whose job failed; a supervisor should not start it again by itself."""

_NODES_AN_EVICTION = 192
"""Of 1,536 nodes in published fleets, a third bad one within an hour comes once to eight times in 54 days (`docs/forecast.md`)."""


def cause_nodes(suspicions: tuple[Suspicion, ...]) -> tuple[str, ...]:
    """Nodes that the primary suspicions name, in order, each once."""
    return tuple(dict.fromkeys(one.node for one in suspicions if one.is_primary and one.node is not None))


def suspended(state: State, at_s: float, suspicions: tuple[Suspicion, ...], step: int) -> State:
    """Begin an incident."""
    rewind = next((one.rewind for one in suspicions if one.rewind is not None), None)
    # what is given up by a rewind is not worth a save, and saving it would let retention take what the run is to go back to
    saves_first = rewind is None and any(one.rule in (OPERATOR, GROW, SLOW_NODE) for one in suspicions)
    incident = Incident(
        number=len(state.incidents) + 1,
        suspicions=suspicions,
        named=cause_nodes(suspicions),
        step=step,
        began_s=at_s,
        is_planned=saves_first,
        rewind=rewind,
    )
    fruitless = 0 if state.best_step > state.last_best_step else state.fruitless + (0 if saves_first else 1)
    update = {"incidents": (*state.incidents, incident), "fruitless": fruitless, "last_best_step": state.best_step, "idle": frozenset()}
    if rewind is not None:
        update["rewinds"] = (*state.rewinds, rewind)
    return to_phase(state.model_copy(update=update), Phase.SUSPENDED, at_s)


def evicted(state: State, name: str, reason: str, at_s: float, config: ClusterConfig) -> State:
    """Evict a node, unless too many were already: then a person is asked for."""
    node = state.nodes.get(name)
    if node is None or node.status == NodeStatus.EVICTED:
        return state
    before = recent(state.evictions_s, at_s, config)
    if len(before) >= most_evictions(state, config):
        why = f"{len(before)} nodes were within {config.strike_window_s:.0f} s"
        return alarmed(state, f"{name} should be evicted ({reason}), but {why}; evict it by hand")
    state = moved(state, name, NodeStatus.EVICTED, reason=reason, is_out_of_service=True)
    incident = state.incident
    if incident is not None:
        state = with_incident(state, evicted=(*incident.evicted, name))
    return state.model_copy(update={"evictions_s": (*before, at_s)})


def most_evictions(state: State, config: ClusterConfig) -> int:
    """How many nodes may be evicted or isolated within `strike_window_s`: bad ones come in proportion to all there are."""
    return max(2, len(state.seats) // _NODES_AN_EVICTION) if config.max_evictions is None else config.max_evictions


def alarmed(state: State, alarm: str) -> State:
    """With something that a person should look at; the same is said once."""
    return state if alarm in state.alarms else state.model_copy(update={"alarms": (*state.alarms, alarm)})


def busy(state: State) -> Iterator[str]:
    """Nodes with a seat that have not confirmed yet that they are idle, in the order of seats."""
    for name in state.seats:
        if name is not None and name not in state.idle and state.nodes[name].lost_at_s is None:
            yield name


def is_busy(state: State) -> bool:
    """Whether there is one: asked after each word of thousands of nodes, so that one suffices."""
    return next(busy(state), None) is not None


def is_planned(state: State) -> bool:
    """Whether the incident at hand is an operator's, the job growing back or a slow node: processes save first."""
    return state.incident is not None and state.incident.is_planned


def recent(times_s: tuple[float, ...], at_s: float, config: ClusterConfig) -> tuple[float, ...]:
    """Those within the window in which faults count."""
    return tuple(time for time in times_s if time > at_s - config.strike_window_s)


def reached(state: State, step: int) -> State:
    """With a step that was done."""
    return state if step <= state.best_step else state.model_copy(update={"best_step": step})


def rewound(state: State) -> State:
    """With what was reached after the step of the incident's rewind given up, if it has one."""
    if state.incident is None or state.incident.rewind is None:
        return state
    step = state.incident.rewind[0]
    return state.model_copy(update={name: min(getattr(state, name), step) for name in ("best_step", "last_best_step", "saved_step")})


def needs_no_diagnosis(state: State) -> bool:
    """Whether the incident at hand says nothing of any node: it is planned, or is only a loss that spikes."""
    return is_planned(state) or (state.incident is not None and all(one.rule == LOSS_SPIKE for one in state.incident.suspicions))


def to_phase(state: State, phase: Phase, at_s: float, outcome: str = "", exit_code: int = 0) -> State:
    """In another phase, from now on. Raises IllegalMoveError."""
    check_phase(state.phase, phase)
    return state.model_copy(update={"phase": phase, "since_s": at_s, "outcome": outcome, "exit_code": exit_code})


def moved(state: State, name: str, status: NodeStatus, **update: object) -> State:
    """With a node in another status, and more of it changed. Raises IllegalMoveError."""
    node = state.nodes[name]
    check_status(node.status, status)
    return with_node(state, name, node.model_copy(update={"status": status, **update}))


def with_node(state: State, name: str, node: Node) -> State:
    """With a node as it is now."""
    nodes: Mapping[str, Node] = {**state.nodes, name: node}
    return state.model_copy(update={"nodes": nodes})


def with_incident(state: State, **update: object) -> State:
    """With more known of the newest incident."""
    return state.model_copy(update={"incidents": (*state.incidents[:-1], state.incidents[-1].model_copy(update=update))})

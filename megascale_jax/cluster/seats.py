"""Which node gets which rank: survivors keep theirs, so that what their hosts hold in memory fits them; spares fill the holes."""

from functools import lru_cache

from megascale_jax.cluster.governance import released
from megascale_jax.cluster.lifecycle import NodeStatus, Phase
from megascale_jax.cluster.moves import EXIT_NO_NODES, rewound, to_phase, with_incident
from megascale_jax.cluster.node_order import natural
from megascale_jax.cluster.state import Node, Shape, State
from megascale_jax.config.cluster import ClusterConfig
from megascale_jax.config.schema import ParallelConfig


def fill(state: State, at_s: float, config: ClusterConfig) -> tuple[tuple[str | None, ...], bool]:
    """Seats of the next attempt, and whether a lost node's return is waited for.

    A lost node keeps its seat for ``grace_s``, in which it beats a spare: it has the state in memory. The full size is tried
    first, whatever the last one was.
    """
    if state.attempt == 0 and config.node_order:
        return _first_seats(state, at_s, config), False
    number = state.shapes[0].num_nodes if _usable(state) >= state.shapes[0].num_nodes else len(state.seats)
    seats = [*state.seats, *[None] * number][: max(number, len(state.seats))][:number]
    waits = False
    for rank, name in enumerate(seats):
        if name is None:
            continue
        node = state.nodes[name]
        if node.status == NodeStatus.LOST and node.lost_at_s is not None and at_s < node.lost_at_s + config.grace_s:
            waits = True
        elif node.status != NodeStatus.ASSIGNED:
            seats[rank] = None
    placed = set(seats)
    spares = sorted(
        (name for name, node in state.nodes.items() if name not in placed and node.status in (NodeStatus.READY, NodeStatus.ASSIGNED)),
        key=lambda name: (name in state.slow, len(state.nodes[name].faults_s), _place(state, name, config), natural(name)),
    )
    for rank, name in enumerate(seats):
        if name is None and spares:
            seats[rank] = spares.pop(0)
    if state.attempt == 0 and None not in seats:
        seats.sort(key=lambda name: natural(name or ""))
    return tuple(seats), waits


def _first_seats(state: State, at_s: float, config: ClusterConfig) -> tuple[str | None, ...]:
    """Seats by the order that was given: for ``wait_s`` each is kept for its node, then others take those of who did not come."""
    number = state.shapes[0].num_nodes
    usable = sorted(
        (name for name, node in state.nodes.items() if _is_usable(node)), key=lambda name: (_place(state, name, config), natural(name))
    )
    seats: list[str | None] = [None] * number
    others = list[str]()
    for name in usable:
        place = _place(state, name, config)
        if place < number and seats[place] is None:
            seats[place] = name
        else:
            others.append(name)
    if at_s >= state.since_s + config.wait_s:
        seats = [name or (others.pop(0) if others else None) for name in seats]
    return tuple(seats)


def waits_for_order(state: State, config: ClusterConfig) -> float | None:
    """When the first seats are no longer kept for the nodes of the order, while enough others are there; None:
    something else is waited for.
    """
    is_kept = state.attempt == 0 and config.node_order and None in state.seats and _usable(state) >= state.shapes[0].num_nodes
    return state.since_s + config.wait_s if is_kept else None


def _place(state: State, name: str, config: ClusterConfig) -> int:
    """Place of a node in the order, by the machine that it is on or by its own name; behind all others when it is not in it."""
    places = _places(config.node_order)
    return places.get(state.nodes[name].machine, places.get(name, len(places)))


@lru_cache(maxsize=4)
def _places(order: tuple[str, ...]) -> dict[str, int]:
    return {name: place for place, name in enumerate(order)}


def seated(state: State, at_s: float, config: ClusterConfig) -> State:
    """Fill the seats; on with the next attempt when all are taken, with fewer when the time is up and it may be."""
    seats, waits = fill(state, at_s, config)
    if None in seats and not waits and (others := released(state, at_s)) is not state:
        state = others
        seats, waits = fill(state, at_s, config)
    nodes, placed = dict(state.nodes), set(seats)
    for name, node in nodes.items():
        status = NodeStatus.ASSIGNED if name in placed else NodeStatus.READY
        if node.status != status and _is_usable(node):
            nodes[name] = node.model_copy(update={"status": status})
    shape = 0 if len(seats) == state.shapes[0].num_nodes else state.shape
    state = state.model_copy(update={"seats": seats, "nodes": nodes, "shape": shape})
    if waits or None in seats:
        limit_s = wait_s(state, config)
        if at_s < state.since_s + limit_s:
            return state
        usable = [name for name, node in nodes.items() if node.status in (NodeStatus.READY, NodeStatus.ASSIGNED)]
        smaller = [index for index, shape in enumerate(state.shapes) if shape.num_nodes <= len(usable)]
        if not (config.shrink and smaller):
            need = state.shapes[0].num_nodes if not config.shrink else state.shapes[-1].num_nodes
            outcome = f"{len(usable)} nodes are left after {limit_s:.0f} s, {need} are needed"
            return to_phase(state, Phase.FAILED, at_s, outcome=outcome, exit_code=EXIT_NO_NODES)
        kept = [name for name in seats if name in usable]
        taken = [*kept, *(name for name in sorted(usable) if name not in kept)][: state.shapes[smaller[0]].num_nodes]
        nodes = {
            name: node.model_copy(update={"status": NodeStatus.ASSIGNED if name in taken else NodeStatus.READY}) if name in usable else node
            for name, node in nodes.items()
        }
        state = state.model_copy(update={"shape": smaller[0], "seats": tuple(taken), "nodes": nodes})
    if state.incident is not None:
        state = with_incident(state, replaced_s=at_s)
    state = rewound(state).model_copy(update={"attempt": state.attempt + 1, "idle": frozenset()})
    return to_phase(state, Phase.RESTORING, at_s)


def wait_s(state: State, config: ClusterConfig) -> float:
    """Longest wait for enough nodes, seconds: at the very first start images are loaded and machines made."""
    return config.first_wait_s if state.attempt == 0 else config.wait_s


def shapes_of(num_nodes: int, parallel: ParallelConfig, rows: int, *, shrink: bool) -> tuple[Shape, ...]:
    """The full size and, with ``shrink``, smaller data-parallel sizes that keep the global batch, largest first.

    The mesh lies on ``num_nodes`` nodes; the ``rows`` of a step must divide by data size and micro-batch size, and the
    micro-batches of a rank by the pipeline stages (the schedule's rule).
    """
    replica, micro_batch_size = parallel.pipe * parallel.tensor, parallel.micro_batch_size
    shapes = [Shape(num_nodes=num_nodes)]
    per_node = parallel.data * replica // num_nodes
    for smaller in range(parallel.data - 1, 0, -1) if shrink else ():
        devices, (micro_batches, rest) = smaller * replica, divmod(rows, smaller * micro_batch_size)
        if rest == 0 and micro_batches % parallel.pipe == 0 and devices % per_node == 0 and devices // per_node < shapes[-1].num_nodes:
            shapes.append(Shape(num_nodes=devices // per_node, overrides=(f"parallel.data={smaller}",)))
    return tuple(shapes)


def _usable(state: State) -> int:
    return sum(_is_usable(node) for node in state.nodes.values())


def _is_usable(node: Node) -> bool:
    return node.status in (NodeStatus.READY, NodeStatus.ASSIGNED)

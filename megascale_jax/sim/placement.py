"""Which node gets which ranks: tensor groups inside a node, data groups under as few ToR sets as can be, stages in pods.

Rank ``r`` of the mesh (``tensor`` fastest, ``pipe`` slowest) is on node ``r // devices_per_node`` of an order of nodes, so an order is all
there is to choose. A *block* is the run of nodes of one pipeline stage, which holds its data groups. Whole blocks go under one ToR set
where one has room; the others take what is left, from one pod if that has enough, in as few pieces as can be. The result is compared with
the nodes by ToR set and with the order given, and the best by score is taken: a placement is never worse than what was there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megascale_jax.cluster.node_order import Hangs
from megascale_jax.config.layout import MeshShape
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import ConfigError
from megascale_jax.sim.traffic import step_edges


@dataclass(frozen=True)
class Crossing:
    """Bytes that one axis moves in a step, and what of them leaves a node, its ToR set, its pod."""

    axis: str
    total_bytes: float
    network_bytes: float
    across_tor_bytes: float
    across_pod_bytes: float
    groups_whole: float
    """Share of the axis's groups that lie under one ToR set."""


@dataclass(frozen=True)
class Score:
    """All axes of one order."""

    by_axis: tuple[Crossing, ...]

    @property
    def across_tor_bytes(self) -> float:
        """Of a step, over all axes."""
        return sum(one.across_tor_bytes for one in self.by_axis)

    @property
    def across_pod_bytes(self) -> float:
        """Of a step, over all axes."""
        return sum(one.across_pod_bytes for one in self.by_axis)

    @property
    def cost(self) -> float:
        """What a better order has less of: bytes over the aggregation layer, and once more those over the spines."""
        return self.across_tor_bytes + self.across_pod_bytes


@dataclass(frozen=True)
class Placement:
    """An order of nodes, the ones without ranks last, and what it and the order before cost."""

    order: tuple[str, ...]
    num_ranked: int
    score: Score
    naive: Score
    method: str
    """``blocks``, ``by tor`` or ``as given``."""


def nodes_needed(experiment: Experiment, devices_per_node: int) -> int:
    """Nodes of a mesh. Raises ConfigError when it does not fill whole nodes, or would split a tensor group over two."""
    mesh = MeshShape.of(experiment.parallel)
    if mesh.size % devices_per_node:
        raise ConfigError(f"a mesh of {mesh.size} devices does not fill nodes of {devices_per_node}; change parallel.data")
    if devices_per_node % mesh.tensor:
        raise ConfigError(
            f"parallel.tensor is {mesh.tensor}, expected a divisor of the {devices_per_node} devices of a node: tensor groups stay in one"
        )
    return mesh.size // devices_per_node


def place(experiment: Experiment, nodes: Sequence[str], sites: Mapping[str, Hangs], devices_per_node: int) -> Placement:
    """The best order found of all ``nodes``, given in the order that they would otherwise be used in.

    Raises ConfigError for too few nodes, a node twice, or one without a site.
    """
    needed = nodes_needed(experiment, devices_per_node)
    if len(nodes) < needed:
        raise ConfigError(f"got {len(nodes)} nodes, expected at least {needed} of {devices_per_node} devices for the mesh")
    if twice := sorted({name for name in nodes if nodes.count(name) > 1}) if len(set(nodes)) < len(nodes) else []:
        raise ConfigError(f"node {twice[0]} is there twice; expected every node once")
    if lost := [name for name in nodes if name not in sites]:
        raise ConfigError(f"no ToR set is known of {len(lost)} nodes, {lost[0]} among them; add them to the topology")
    mesh = MeshShape.of(experiment.parallel)
    stage_devices = mesh.data * mesh.tensor
    block = stage_devices // devices_per_node if stage_devices % devices_per_node == 0 else needed
    by_tor = sorted(nodes, key=lambda name: (sites[name].pod, sites[name].tor))
    candidates = {"blocks": _blocks(nodes, sites, block, needed // block), "by tor": by_tor, "as given": list(nodes)}
    scored = {name: score(experiment, order[:needed], sites, devices_per_node) for name, order in candidates.items()}
    best = min(scored, key=lambda name: scored[name].cost)
    return Placement(tuple(candidates[best]), needed, scored[best], scored["as given"], best)


def score(experiment: Experiment, order: Sequence[str], sites: Mapping[str, Hangs], devices_per_node: int) -> Score:
    """What a step's traffic crosses when the ranks lie in this order of nodes."""
    tor, pod = (np.unique([getattr(sites[name], field) for name in order], return_inverse=True)[1] for field in ("tor", "pod"))
    mesh = MeshShape.of(experiment.parallel)
    ranks = np.arange(mesh.size).reshape(mesh.pipe, mesh.data, mesh.tensor)
    found = list[Crossing]()
    for edges in step_edges(experiment):
        source, target = edges.source // devices_per_node, edges.target // devices_per_node
        dim = list(mesh.by_axis).index(edges.axis)
        tors = np.moveaxis(tor[ranks // devices_per_node], dim, 0)
        whole = float((tors == tors[0]).all(axis=0).mean())
        node, across_tor, across_pod = (
            float(edges.sent[where].sum()) for where in (source != target, tor[source] != tor[target], pod[source] != pod[target])
        )
        found.append(Crossing(edges.axis, float(edges.sent.sum()), node, across_tor, across_pod, whole))
    return Score(tuple(found))


def _blocks(nodes: Sequence[str], sites: Mapping[str, Hangs], size: int, number: int) -> list[str]:
    """An order in which each of ``number`` blocks of ``size`` nodes lies as near together as the free nodes allow; then the rest."""
    free: dict[str, dict[str, list[str]]] = {}
    for name in nodes:
        free.setdefault(sites[name].pod, {}).setdefault(sites[name].tor, []).append(name)
    blocks = _whole_blocks(free, size, number)
    while len(blocks) < number:
        left = {pod: sum(map(len, tors.values())) for pod, tors in free.items()}
        enough = [pod for pod in left if left[pod] >= size]
        block: list[str] = []
        for pod in [min(enough, key=lambda pod: left[pod])] if enough else sorted(left, key=lambda pod: -left[pod]):
            block += _gathered(free[pod], size - len(block))
        blocks.append(block)
    pods = {pod: index for index, pod in enumerate(free)}
    blocks.sort(key=lambda block: (pods[_most_common([sites[name].pod for name in block])], sites[block[0]].tor))
    taken = {name for block in blocks for name in block}
    return [name for block in blocks for name in block] + [name for name in nodes if name not in taken]


def _whole_blocks(free: dict[str, dict[str, list[str]]], size: int, number: int) -> list[list[str]]:
    """Blocks under one ToR set each, from the pods with the most of them, and there from the sets that they fill
    best; taken from ``free``.
    """
    blocks: list[list[str]] = []
    for tors in sorted(free.values(), key=lambda tors: -sum(len(names) // size for names in tors.values())):
        for names in sorted(tors.values(), key=lambda names: len(names) % size):
            while len(names) >= size and len(blocks) < number:
                blocks.append(names[:size])
                del names[:size]
    return blocks


def _gathered(tors: dict[str, list[str]], number: int) -> list[str]:
    """Up to ``number`` nodes of one pod in few pieces: the smallest ToR set that has all of the rest, else the largest one whole."""
    found: list[str] = []
    while len(found) < number and any(tors.values()):
        rest = number - len(found)
        enough = [names for names in tors.values() if len(names) >= rest]
        names = min(enough, key=len) if enough else max(tors.values(), key=len)
        found += names[:rest]
        del names[:rest]
    return found


def _most_common(values: Sequence[str]) -> str:
    return max(dict.fromkeys(values), key=values.count)

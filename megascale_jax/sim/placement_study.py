"""Placement of an experiment on fleets whose names say nothing of where nodes hang: what the order by name costs, and what a placement
saves.

Each seed is a fleet of its own: as many nodes as the job needs and a few more, filled into ToR sets of which some lack nodes, names drawn.
All numbers are simulated.
"""

from dataclasses import dataclass

import numpy as np

from megascale_jax.cluster.node_order import Hangs, natural
from megascale_jax.config.layout import MeshShape
from megascale_jax.config.network import NetworkConfig
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import ConfigError
from megascale_jax.sim.placement import Score, nodes_needed, place

SPARE_SHARE = 0.02
"""Further nodes, assumed."""
LARGEST_GAP = 4
"""Nodes that a ToR set lacks at most (broken, or another job's), assumed."""


@dataclass(frozen=True)
class Scores:
    """A score a seed, of the order by name and of the placement. ``ring_nodes``: nodes of one stage; 1 when data
    groups fill no whole nodes.
    """

    nodes: int
    ring_nodes: int
    by_name: list[Score]
    placed: list[Score]


def scores(experiment: Experiment, seeds: int) -> Scores:
    """Place an experiment on ``seeds`` fleets of its system. Raises ConfigError where the system has no network, or
    nodes of unknown size.
    """
    system = experiment.system
    if system.network is None or system.devices_per_node is None:
        raise ConfigError(f"system.network and system.devices_per_node of {system.device} are needed, and one of them is null")
    needed, devices = nodes_needed(experiment, system.devices_per_node), system.devices_per_node
    by_name, placed = list[Score](), list[Score]()
    for seed in range(seeds):
        sites = fleet(system.network, needed + int(np.ceil(SPARE_SHARE * needed)), np.random.default_rng([seed, needed]))
        found = place(experiment, sorted(sites, key=natural), sites, devices)
        by_name.append(found.naive)
        placed.append(found.score)
    mesh = MeshShape.of(experiment.parallel)
    stage = mesh.data * mesh.tensor
    return Scores(needed, stage // devices if stage % devices == 0 else 1, by_name, placed)


def fleet(config: NetworkConfig, nodes: int, generator: np.random.Generator) -> dict[str, Hangs]:
    """Where nodes ``node-0`` and so on hang."""
    names, found, tor = [f"node-{number}" for number in generator.permutation(nodes)], dict[str, Hangs](), 0
    while names:
        size = config.nodes_per_tor - int(generator.integers(0, LARGEST_GAP + 1))
        where = Hangs(f"set-{tor:04}", f"pod-{tor // config.tor_sets_per_pod:03}")
        found |= {names.pop(): where for _ in range(min(max(size, 1), len(names)))}
        tor += 1
    return found

"""A three-layer CLOS as numbers: which link a flow takes at each hop, given what the switches chose. No objects for switches or links.

Nodes are numbered set by set: node ``n`` is under ToR set ``n // nodes_per_tor``, its NIC of rail ``r`` under that set's switch ``r``.
Uplink ``j`` of every ToR switch goes to aggregation switch ``j`` of the pod, uplink ``k`` of that to spine ``k`` of plane ``j``. So a path
has two choices, ``j`` at the ToR and ``k`` at the aggregation switch, and the way down follows from them.
"""

from dataclasses import dataclass

import numpy as np

from megascale_jax.config.network import NetworkConfig

HOPS = 6
"""Links of the longest path: NIC, ToR up, aggregation up, aggregation down, ToR down, NIC."""
NO_LINK = -1
LAYERS = ("nic up", "tor up", "aggregation up", "aggregation down", "tor down", "nic down")


@dataclass(frozen=True)
class Clos:
    """The fabric of ``nodes`` nodes. Links are numbered layer by layer, in the order of `LAYERS`."""

    config: NetworkConfig
    nodes: int

    @property
    def tor_sets(self) -> int:
        """ToR sets that have nodes."""
        return -(-self.nodes // self.config.nodes_per_tor)

    @property
    def pods(self) -> int:
        """Pods that have nodes."""
        return -(-self.tor_sets // self.config.tor_sets_per_pod)

    @property
    def layer_sizes(self) -> tuple[int, ...]:
        """Links of each layer."""
        config = self.config
        nics = self.nodes * config.rails
        tors = self.tor_sets * config.rails * config.tor_uplinks
        aggregations = self.pods * config.tor_uplinks * config.aggregation_uplinks
        return nics, tors, aggregations, aggregations, tors, nics

    @property
    def layer_starts(self) -> np.ndarray:
        """int64[7]: number of the first link of each layer, and of all links."""
        return np.concatenate([[0], np.cumsum(self.layer_sizes)])

    @property
    def num_links(self) -> int:
        """Directed links."""
        return sum(self.layer_sizes)

    def capacity(self) -> np.ndarray:
        """float64[link]: Gbit/s."""
        config = self.config
        rates = (config.nic_gbit_s, *[config.uplink_gbit_s] * 4, config.nic_gbit_s)
        return np.repeat(rates, self.layer_sizes)

    def tor_of(self, node: np.ndarray) -> np.ndarray:
        """ToR set of each node."""
        return node // self.config.nodes_per_tor

    def pod_of(self, node: np.ndarray) -> np.ndarray:
        """Pod of each node."""
        return node // self.config.nodes_per_pod

    def tor_switch(self, node: np.ndarray, rail: np.ndarray) -> np.ndarray:
        """Number of the ToR switch of a NIC."""
        return self.tor_of(node) * self.config.rails + rail

    def aggregation_switch(self, node: np.ndarray, uplink: np.ndarray) -> np.ndarray:
        """Number of the aggregation switch that a ToR's uplink leads to."""
        return self.pod_of(node) * self.config.tor_uplinks + uplink

    def paths(self, flows: "Flows", tor_choice: np.ndarray, aggregation_choice: np.ndarray) -> np.ndarray:
        """int64[flow, HOPS]: links of each flow, `NO_LINK` where a shorter path has none.

        ``tor_choice`` and ``aggregation_choice``: int[flow], the uplinks that the switches of the source chose; unread where not needed.
        """
        config, starts = self.config, self.layer_starts
        same_switch = (self.tor_of(flows.source) == self.tor_of(flows.target)) & (flows.source_rail == flows.target_rail)
        same_pod = self.pod_of(flows.source) == self.pod_of(flows.target)

        def aggregation(node: np.ndarray) -> np.ndarray:
            return self.aggregation_switch(node, tor_choice) * config.aggregation_uplinks + aggregation_choice

        layers = (
            flows.source * config.rails + flows.source_rail,
            np.where(same_switch, NO_LINK, self.tor_switch(flows.source, flows.source_rail) * config.tor_uplinks + tor_choice),
            np.where(same_pod, NO_LINK, aggregation(flows.source)),
            np.where(same_pod, NO_LINK, aggregation(flows.target)),
            np.where(same_switch, NO_LINK, self.tor_switch(flows.target, flows.target_rail) * config.tor_uplinks + tor_choice),
            flows.target * config.rails + flows.target_rail,
        )
        links = np.stack(layers, axis=1)
        return np.where(links == NO_LINK, NO_LINK, links + starts[:HOPS])


@dataclass(frozen=True)
class Flows:
    """Flows between NICs, all int64[flow]. ``source_port``: UDP source port, all that tells flows of one pair of NICs apart in RoCE."""

    source: np.ndarray
    source_rail: np.ndarray
    target: np.ndarray
    target_rail: np.ndarray
    source_port: np.ndarray

    @property
    def number(self) -> int:
        """Flows."""
        return len(self.source)

    @classmethod
    def on_one_rail(cls, source: np.ndarray, target: np.ndarray, rail: np.ndarray, source_port: np.ndarray) -> "Flows":
        """Flows between NICs of equal rails, as collectives over rails have them."""
        return cls(source, rail, target, rail, source_port)

    def split(self, number: int, generator: np.random.Generator) -> "Flows":
        """Each flow as so many, one after the other, with source ports of their own: several queue pairs a connection."""
        ports = generator.integers(49152, 65536, self.number * number)
        source, source_rail, target, target_rail = (
            np.repeat(one, number) for one in (self.source, self.source_rail, self.target, self.target_rail)
        )
        return Flows(source, source_rail, target, target_rail, ports)

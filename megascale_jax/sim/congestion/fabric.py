"""A small part of a rail: hosts under some ToR switches, and the spines between these. One rail is a network of its own.

A switch of which only some ports are simulated has that share of its buffer. Two layers stand for the three of the whole fabric: what the
third would add is one more place for queues, and 2 us.
"""

from dataclasses import dataclass

import numpy as np

from megascale_jax.config.network import NetworkConfig
from megascale_jax.errors import ConfigError
from megascale_jax.sim.network.hashing import five_tuple, mixed_hash
from megascale_jax.sim.network.topology import Clos, Flows


@dataclass(frozen=True)
class Fabric:
    """Leaf and spine. Links: host up, leaf up (leaf by leaf), spine down (spine by spine), host down. Switches: leaves, then spines."""

    config: NetworkConfig
    hosts: int
    leaves: int

    def __post_init__(self) -> None:
        """Raises ConfigError where hosts do not divide over leaves, or leaves have no uplink."""
        if self.hosts % self.leaves:
            raise ConfigError(f"got {self.hosts} hosts under {self.leaves} ToR switches, expected a multiple of that")
        if self.spines < 1:
            raise ConfigError(f"{self.hosts_per_leaf} hosts to a ToR switch do not fill one uplink; give more hosts or fewer switches")

    @property
    def hosts_per_leaf(self) -> int:
        """Hosts under one ToR switch."""
        return self.hosts // self.leaves

    @property
    def spines(self) -> int:
        """As many as make the uplinks of a leaf as fast as its hosts."""
        return int(self.hosts_per_leaf * self.config.nic_gbit_s / self.config.uplink_gbit_s)

    @property
    def num_links(self) -> int:
        """Directed links."""
        return 2 * self.hosts + 2 * self.leaves * self.spines

    @property
    def num_switches(self) -> int:
        """Leaves and spines."""
        return self.leaves + self.spines

    def rates(self) -> np.ndarray:
        """float64[link]: Gbit/s."""
        config, between = self.config, self.leaves * self.spines
        return np.repeat([config.nic_gbit_s, config.uplink_gbit_s, config.nic_gbit_s], [self.hosts, 2 * between, self.hosts])

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """int64[link] each: the switch that sends on a link and the one at its end; -1 for a host."""
        host, leaf, spine = np.arange(self.hosts), np.arange(self.leaves), np.arange(self.spines)
        nobody = np.full(self.hosts, -1)
        leaf_of_host = host // self.hosts_per_leaf
        up = np.repeat(leaf, self.spines), np.tile(self.leaves + spine, self.leaves)
        down = np.repeat(self.leaves + spine, self.leaves), np.tile(leaf, self.spines)
        return np.concatenate([nobody, up[0], down[0], leaf_of_host]), np.concatenate([leaf_of_host, up[1], down[1], nobody])

    def buffers(self) -> np.ndarray:
        """float64[switch]: bytes."""
        ports = self.config.nodes_per_tor, 2 * self.config.tor_uplinks
        leaf, spine = self.hosts_per_leaf / ports[0], self.leaves / ports[1]
        return np.repeat([leaf, spine], [self.leaves, self.spines]) * self.config.buffer_mb * 1e6

    def paths(self, source: np.ndarray, target: np.ndarray, spine: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64[flow, 4] links and int64[flow] how many of them; ``spine`` is unread for flows within a leaf."""
        leaf, other = source // self.hosts_per_leaf, target // self.hosts_per_leaf
        between = self.leaves * self.spines
        last = self.hosts + 2 * between + target
        up, down = self.hosts + leaf * self.spines + spine, self.hosts + between + spine * self.leaves + other
        is_local = leaf == other
        links = np.stack([source, np.where(is_local, last, up), np.where(is_local, -1, down), np.where(is_local, -1, last)], axis=1)
        return links, np.where(is_local, 2, 4)

    def hashed_spines(self, source: np.ndarray, target: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """int64[flow]: spines by ECMP, source ports and the leaves' seeds drawn."""
        clos = Clos(self.config.model_copy(update={"rails": 1}), self.hosts)
        zero = np.zeros(len(source), np.int64)
        flows = Flows.on_one_rail(source, target, zero, generator.integers(49152, 65536, len(source)))
        seeds = generator.integers(0, 2**32, self.leaves, dtype=np.uint32)
        hashed = mixed_hash(five_tuple(clos, flows), seeds[source // self.hosts_per_leaf])
        return (hashed % np.uint32(self.spines)).astype(np.int64)

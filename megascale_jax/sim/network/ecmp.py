"""What hashing costs: uplinks of one ToR switch, polarisation over two tiers, and the data rings of a whole job. All numbers are simulated.

Rates are max-min shares over that of a NIC: 1 is what the hardware gives. A ring is as slow as its slowest flow.
"""

from dataclasses import dataclass

import numpy as np

from megascale_jax.config.network import NetworkConfig
from megascale_jax.sim.network import closed_forms
from megascale_jax.sim.network.flows import loads, max_min_rates
from megascale_jax.sim.network.hashing import Hash, Seeds, ecmp_paths, mixed_hash
from megascale_jax.sim.network.topology import Clos, Flows

LOADS = (1.0, 0.5, 0.25, 0.125)
_FIRST_PORT, _END_PORT = 49152, 65536
"""UDP source ports of RoCE flows are drawn from the dynamic range (RFC 6335)."""


@dataclass(frozen=True)
class UplinkRow:
    """Flows of one ToR switch at a share of its full load, hashed onto its uplinks."""

    split: bool
    load: float
    flows: int
    delivered: float
    delivered_exact: float
    delivered_error: float
    """Standard error of the mean over trials."""
    overload: float
    overload_exact: float
    slowest: float


def uplinks(config: NetworkConfig, trials: int, seed: int) -> list[UplinkRow]:
    """Monte Carlo beside the closed form, with and without the split, at `LOADS`."""
    rows = list[UplinkRow]()
    for fabric in (config.without_split(), config) if config.port_split > 1 else (config,):
        for load in LOADS:
            flows = round(load * fabric.nodes_per_tor / fabric.tor_oversubscription)
            rows.append(_uplink_row(fabric, load, flows, trials, np.random.default_rng([seed, fabric.port_split, flows])))
    return rows


def _uplink_row(config: NetworkConfig, load: float, flows: int, trials: int, generator: np.random.Generator) -> UplinkRow:
    links, flow, link = config.tor_uplinks, config.nic_gbit_s, config.uplink_gbit_s
    fields = generator.integers(0, 256, (trials * flows, 13), dtype=np.uint8)
    seeds = np.repeat(generator.integers(0, 2**32, trials, dtype=np.uint32), flows)
    choice = (mixed_hash(fields, seeds) % np.uint32(links)).astype(np.int64)
    bins = np.repeat(np.arange(trials), flows) * links + choice
    number = np.bincount(bins, minlength=trials * links).reshape(trials, links)
    arrived = np.minimum(number * flow, link).sum(axis=1) / (flows * flow)
    most = number.max(axis=1)
    exact = closed_forms.delivered(flows, links, flow, link), 1 - closed_forms.no_overload(flows, links, flow, link)
    return UplinkRow(
        split=config.port_split > 1,
        load=load,
        flows=flows,
        delivered=float(arrived.mean()),
        delivered_exact=exact[0],
        delivered_error=float(arrived.std(ddof=1) / np.sqrt(trials)),
        overload=float((most * flow > link * (1 + 1e-12)).mean()),
        overload_exact=exact[1],
        slowest=float(np.minimum(link / (most * flow), 1.0).mean()),
    )


@dataclass(frozen=True)
class FabricRow:
    """Flows over a whole fabric, for one seed: shares of a NIC's rate, and of the spine-ward links that are used at all."""

    mean: float
    slowest: float
    ring: float
    """Mean over rings of the slowest flow of each."""
    used_aggregation_uplinks: float


def permutation(clos: Clos, generator: np.random.Generator) -> Flows:
    """Every NIC sends to one NIC of its rail and receives from one: full load on every layer, nearly all of it over spines."""
    nodes, rails = np.arange(clos.nodes), clos.config.rails
    target = generator.permutation(clos.nodes)
    return _on_all_rails(nodes, target, rails, generator)


def ring_flows(clos: Clos, order: np.ndarray, ring_nodes: int, generator: np.random.Generator) -> Flows:
    """Data rings over consecutive ``ring_nodes`` nodes of an order, on every rail: each NIC sends to the next node of its ring."""
    rings = order.reshape(-1, ring_nodes)
    return _on_all_rails(rings.ravel(), np.roll(rings, -1, axis=1).ravel(), clos.config.rails, generator)


def fabric_row(clos: Clos, flows: Flows, seeds: Seeds, method: Hash = "mixed", *, queue_pairs: int = 1, ring_flows: int = 1) -> FabricRow:
    """Rates of flows on a fabric. ``queue_pairs``: as how many each of them was `split`; ``ring_flows``: how many are one ring."""
    paths = ecmp_paths(clos, flows, seeds, method)
    rate = max_min_rates(paths, clos.capacity()).reshape(-1, queue_pairs).sum(axis=1) / clos.config.nic_gbit_s
    starts = clos.layer_starts
    upward = loads(paths, clos.num_links)[starts[2] : starts[3]]
    slowest = rate.reshape(-1, clos.config.rails).reshape(-1, ring_flows, clos.config.rails).min(axis=1)
    return FabricRow(float(rate.mean()), float(rate.min()), float(slowest.mean()), float((upward > 0).mean()))


def polarisation(config: NetworkConfig, nodes: int, seeds: int) -> dict[str, list[FabricRow]]:
    """A permutation of all NICs under four ways to hash: a row a seed."""
    clos, found = Clos(config, nodes), dict[str, list[FabricRow]]()
    methods: tuple[Hash, ...] = ("mixed", "crc")
    for method in methods:
        for reused in (False, True):
            rows = found.setdefault(f"{method}, {'one seed for all' if reused else 'a seed each'}", [])
            for seed in range(seeds):
                generator = np.random.default_rng([seed, nodes])
                flows = permutation(clos, generator)
                drawn = Seeds.reused(clos, seed) if reused else Seeds.drawn(clos, generator)
                rows.append(fabric_row(clos, flows, drawn, method))
    return found


def rings(
    config: NetworkConfig, nodes: int, ring_nodes: int, seeds: int, queue_pairs: tuple[int, ...] = (1, 4, 16)
) -> dict[str, list[FabricRow]]:
    """Data rings placed ToR by ToR and scattered over the fabric, with and without the split, with some queue pairs: a row a seed."""
    found: dict[str, list[FabricRow]] = {}
    fabrics = {"split": config, "no split": config.without_split()} if config.port_split > 1 else {"no split": config}
    used = nodes - nodes % ring_nodes
    for name, fabric in fabrics.items():
        clos = Clos(fabric, nodes)
        for where in ("scattered", "placed"):
            for pairs in queue_pairs:
                rows = found.setdefault(f"{name}, {where}, {pairs} queue pair{'s' if pairs > 1 else ''}", [])
                for seed in range(seeds):
                    generator = np.random.default_rng([seed, ring_nodes])
                    order = generator.permutation(nodes)[:used] if where == "scattered" else np.arange(used)
                    flows = ring_flows(clos, order, ring_nodes, generator).split(pairs, generator)
                    rows.append(fabric_row(clos, flows, Seeds.drawn(clos, generator), queue_pairs=pairs, ring_flows=ring_nodes))
    return found


def _on_all_rails(source: np.ndarray, target: np.ndarray, rails: int, generator: np.random.Generator) -> Flows:
    rail = np.tile(np.arange(rails), len(source))
    ports = generator.integers(_FIRST_PORT, _END_PORT, len(rail))
    return Flows.on_one_rail(np.repeat(source, rails), np.repeat(target, rails), rail, ports)

"""ECMP: a switch picks an uplink by a hash of a packet's 5-tuple, so all packets of a flow take one path.

Two hashes. ``mixed``: SplitMix64's finalizer (Steele et al., OOPSLA 2014), in which a seed changes everything. ``crc``: CRC-32, as switch
chips compute it, linear over GF(2): another seed (start value) XORs a constant onto every hash, so flows that agreed in the low bits at one
switch agree at the next whatever the seeds. Either way, one seed at all tiers *polarises*: a ToR's choice decides the aggregation switch's.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megascale_jax.sim.network.topology import Clos, Flows

Hash = Literal["mixed", "crc"]
ROCE_PORT, UDP = 4791, 17
"""Destination port of RoCEv2 and protocol number of UDP (IANA)."""
_FIRST, _SECOND, _GOLDEN = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)
_CRC_POLYNOMIAL = 0xEDB88320
"""Of CRC-32 (IEEE 802.3), reflected."""


@dataclass(frozen=True)
class Seeds:
    """A start value for every switch: uint32[ToR switch] and uint32[aggregation switch]."""

    tor: np.ndarray
    aggregation: np.ndarray

    @classmethod
    def drawn(cls, clos: Clos, generator: np.random.Generator) -> "Seeds":
        """Each switch its own."""
        tors, aggregations = _switches(clos)
        return cls(generator.integers(0, 2**32, tors, dtype=np.uint32), generator.integers(0, 2**32, aggregations, dtype=np.uint32))

    @classmethod
    def reused(cls, clos: Clos, seed: int) -> "Seeds":
        """One for all, as switches come from the factory."""
        tors, aggregations = _switches(clos)
        return cls(np.full(tors, seed, np.uint32), np.full(aggregations, seed, np.uint32))


def ecmp_paths(clos: Clos, flows: Flows, seeds: Seeds, method: Hash = "mixed") -> np.ndarray:
    """int64[flow, HOPS]: links of each flow, as `Clos.paths` gives them, with the switches' choices by hash."""
    fields = five_tuple(clos, flows)
    hashed = {"mixed": mixed_hash, "crc": crc_hash}[method]
    tor_seed = seeds.tor[clos.tor_switch(flows.source, flows.source_rail)]
    tor_choice = (hashed(fields, tor_seed) % np.uint32(clos.config.tor_uplinks)).astype(np.int64)
    aggregation_seed = seeds.aggregation[clos.aggregation_switch(flows.source, tor_choice)]
    aggregation_choice = (hashed(fields, aggregation_seed) % np.uint32(clos.config.aggregation_uplinks)).astype(np.int64)
    return clos.paths(flows, tor_choice, aggregation_choice)


def five_tuple(clos: Clos, flows: Flows) -> np.ndarray:
    """uint8[flow, 13]: source and target address (10.0.0.0/8, a NIC's number), protocol, source and target port, in network order."""
    rails = clos.config.rails
    source, target = (
        (10 << 24) + node * rails + rail for node, rail in ((flows.source, flows.source_rail), (flows.target, flows.target_rail))
    )
    fixed = np.full(flows.number, 0, np.int64)
    columns = [(source >> shift) & 255 for shift in (24, 16, 8, 0)] + [(target >> shift) & 255 for shift in (24, 16, 8, 0)]
    columns += [fixed + UDP, flows.source_port >> 8, flows.source_port & 255, fixed + (ROCE_PORT >> 8), fixed + (ROCE_PORT & 255)]
    return np.stack(columns, axis=1).astype(np.uint8)


def mixed_hash(fields: np.ndarray, seed: np.ndarray) -> np.ndarray:
    """uint32[flow] of uint8[flow, 13], with a seed for each flow."""
    words = np.zeros((len(fields), 16), np.uint8)
    words[:, : fields.shape[1]] = fields
    low, high = words.view(np.uint64).T
    with np.errstate(over="ignore"):
        state = _finalized(seed.astype(np.uint64) * _GOLDEN + _GOLDEN)
        state = _finalized(state ^ low)
        state = _finalized(state ^ high)
    return (state >> np.uint64(32)).astype(np.uint32)


def crc_hash(fields: np.ndarray, seed: np.ndarray) -> np.ndarray:
    """uint32[flow]: CRC-32 of uint8[flow, 13], its start value the seed (XOR all ones; seed 0 is the CRC of zlib)."""
    state = seed ^ np.uint32(0xFFFFFFFF)
    for column in fields.T:
        state = _CRC_TABLE[(state ^ column) & np.uint32(255)] ^ (state >> np.uint32(8))
    return state ^ np.uint32(0xFFFFFFFF)


def _finalized(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


def _crc_table() -> np.ndarray:
    state = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        state = np.where(state & 1, (state >> 1) ^ np.uint32(_CRC_POLYNOMIAL), state >> 1).astype(np.uint32)
    return state


_CRC_TABLE = _crc_table()


def _switches(clos: Clos) -> tuple[int, int]:
    return clos.tor_sets * clos.config.rails, clos.pods * clos.config.tor_uplinks

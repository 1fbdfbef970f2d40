"""Who sends to whom: an incast, an all-to-all, a victim beside an incast, two jobs over shared spines. Starts and paths differ by seed."""

import numpy as np

from megascale_jax.errors import ConfigError
from megascale_jax.sim.congestion.engine import Load
from megascale_jax.sim.congestion.fabric import Fabric

JITTER_S = 1e-6
"""Flows of a collective start within this, assumed: as exactly as kernels on many GPUs do at best."""


def incast(fabric: Fabric, senders: int, size_bytes: int, generator: np.random.Generator) -> Load:
    """Hosts chosen at random send to host 0 at once."""
    if not 0 < senders < fabric.hosts:
        raise ConfigError(f"got an incast of {senders} hosts, expected 1 to {fabric.hosts - 1}")
    source = 1 + generator.permutation(fabric.hosts - 1)[:senders]
    return _load(fabric, source, np.zeros(senders, np.int64), size_bytes, generator)


def all_to_all(fabric: Fabric, size_bytes: int, generator: np.random.Generator) -> Load:
    """Every host sends ``size_bytes`` to every other one, all at once."""
    source, target = np.divmod(np.arange(fabric.hosts**2), fabric.hosts)
    apart = source != target
    return _load(fabric, source[apart], target[apart], size_bytes, generator)


def all_to_all_incast(fabric: Fabric, size_bytes: int, generator: np.random.Generator) -> Load:
    """The same bytes, but to one host after the other, and all hosts in the same order: an incast of all on one that moves on. A host goes
    on to the next target when it could have sent everything to the last one, whether or not it has.
    """
    load = all_to_all(fabric, size_bytes, generator)
    turn_s = size_bytes * 8 / (fabric.config.nic_gbit_s * 1e9)
    order = generator.permutation(fabric.hosts)
    start_s = load.start_s + order[load.target] * turn_s
    return Load(load.source, load.target, load.spine, load.size, start_s)


def victim(fabric: Fabric, senders: int, size_bytes: int, generator: np.random.Generator) -> Load:
    """An incast on host 0 from the other ToR switches, and as flow 0 one that has nothing to do with it: between two ToR switches as well,
    from a host that takes no part, to host 1, over the first spine, which the incast uses, too.
    """
    others = np.arange(fabric.hosts_per_leaf, fabric.hosts)
    if not 0 < senders < len(others):
        raise ConfigError(f"got an incast of {senders} hosts, expected 1 to {len(others) - 1}")
    chosen = generator.permutation(others)[: senders + 1]
    target = np.zeros(senders + 1, np.int64)
    target[0] = 1
    load = _load(fabric, chosen, target, size_bytes, generator)
    load.spine[0] = 0
    load.spine[1:] = np.arange(senders) % fabric.spines
    return load


def two_jobs(fabric: Fabric, size_bytes: int, generator: np.random.Generator) -> Load:
    """Rings of two jobs whose hosts alternate, so that all of their flows go over the same spines: host i sends to i + hosts per leaf, at
    two sizes. The first half of the flows is one job's.
    """
    hosts = np.arange(fabric.hosts)
    ordered = np.concatenate([hosts[0::2], hosts[1::2]])
    load = _load(fabric, ordered, (ordered + fabric.hosts_per_leaf) % fabric.hosts, size_bytes, generator)
    load.size[fabric.hosts // 2 :] *= 2
    return load


def _load(fabric: Fabric, source: np.ndarray, target: np.ndarray, size_bytes: int, generator: np.random.Generator) -> Load:
    start_s = generator.uniform(0, JITTER_S, len(source))
    spine = fabric.hashed_spines(source, target, generator)
    return Load(source, target, spine, np.full(len(source), size_bytes, np.int64), start_s)

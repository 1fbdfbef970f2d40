"""Hashes of 5-tuples, and what one seed for all switches does."""

import zlib

import numpy as np

from megascale_jax.config.load import load_system
from megascale_jax.sim.network import ecmp
from megascale_jax.sim.network.hashing import crc_hash, five_tuple, mixed_hash
from megascale_jax.sim.network.topology import Clos

CONFIG = load_system("a100").network


def test_crc_is_that_of_zlib():
    fields = np.random.default_rng(0).integers(0, 256, (50, 13), dtype=np.uint8)
    assert crc_hash(fields, np.zeros(50, np.uint32)).tolist() == [zlib.crc32(row.tobytes()) for row in fields]


def test_another_seed_only_turns_a_crc_but_draws_a_mixed_hash_anew():
    fields = np.random.default_rng(1).integers(0, 256, (4000, 13), dtype=np.uint8)
    turned = crc_hash(fields, np.zeros(4000, np.uint32)) ^ crc_hash(fields, np.full(4000, 77, np.uint32))
    assert len(set(turned.tolist())) == 1
    mixed = mixed_hash(fields, np.zeros(4000, np.uint32)) ^ mixed_hash(fields, np.full(4000, 77, np.uint32))
    assert len(set(mixed.tolist())) > 3990


def test_mixed_hash_fills_links_evenly():
    fields = np.zeros((32_000, 13), np.uint8)
    fields[:, 9:11] = np.arange(32_000)[:, None] >> np.array([8, 0])
    counts = np.bincount(mixed_hash(fields, np.zeros(32_000, np.uint32)) % 32, minlength=32)
    chi_squared = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_squared < 70, "31 degrees of freedom: 1 in 10,000"


def test_five_tuple_has_the_fields_in_network_order():
    clos = Clos(CONFIG, 64)
    flows = ecmp.permutation(clos, np.random.default_rng(0))
    first = five_tuple(clos, flows)[9]
    assert first[:4].tolist() == [10, 0, 0, 9] and first[8] == 17
    assert int(first[9]) * 256 + int(first[10]) == flows.source_port[9]
    assert int(first[11]) * 256 + int(first[12]) == 4791


def test_one_seed_at_all_tiers_polarises():
    found = ecmp.polarisation(CONFIG, 768, 2)
    mean = {name: np.mean([row.mean for row in rows]) for name, rows in found.items()}
    used = {name: np.mean([row.used_aggregation_uplinks for row in rows]) for name, rows in found.items()}
    for method in ("mixed", "crc"):
        assert used[f"{method}, one seed for all"] <= 1 / 32, "an aggregation switch sends all over one uplink"
        assert mean[f"{method}, one seed for all"] < 0.6 * mean[f"{method}, a seed each"]
    assert used["crc, a seed each"] < used["mixed, a seed each"], "seeds do not part what a linear hash has joined"

"""Balls in bins: hashed flows against closed forms within three standard errors, and these against small cases counted out."""

from itertools import product

import numpy as np
import pytest

from megascale_jax.config.load import load_system
from megascale_jax.sim.network import ecmp
from megascale_jax.sim.network.closed_forms import collision_free, delivered, mean_used, no_overload
from megascale_jax.sim.network.hashing import mixed_hash

CONFIG = load_system("a100").network
TRIALS = 4000


@pytest.mark.parametrize(("flows", "links", "rate"), [(3, 3, 1.0), (4, 3, 0.5), (5, 2, 0.4)])
def test_closed_forms_count_out(flows, links, rate):
    loads = [np.bincount(choice, minlength=links) for choice in product(range(links), repeat=flows)]
    assert collision_free(flows, links) == pytest.approx(np.mean([load.max() == 1 for load in loads]))
    assert mean_used(flows, links) == pytest.approx(np.mean([(load > 0).sum() for load in loads]))
    assert delivered(flows, links, rate, 1.0) == pytest.approx(
        np.mean([np.minimum(load * rate, 1).sum() for load in loads]) / (flows * rate)
    )
    assert no_overload(flows, links, rate, 1.0) == pytest.approx(np.mean([load.max() * rate <= 1 + 1e-12 for load in loads]))


@pytest.mark.parametrize("flows", [4, 8, 16])
def test_collisions_and_used_links_by_hash(flows):
    generator = np.random.default_rng(flows)
    fields = generator.integers(0, 256, (TRIALS * flows, 13), dtype=np.uint8)
    choice = (mixed_hash(fields, generator.integers(0, 2**32, TRIALS * flows, dtype=np.uint32)) % 32).reshape(TRIALS, flows)
    used = np.array([len(set(row.tolist())) for row in choice])
    for drawn, exact in ((used == flows, collision_free(flows, 32)), (used, mean_used(flows, 32))):
        assert abs(drawn.mean() - exact) < 3 * drawn.std(ddof=1) / np.sqrt(TRIALS)


def test_delivered_throughput_and_overload_by_hash_and_the_split_helps_at_every_load():
    rows = ecmp.uplinks(CONFIG, TRIALS, 0)
    assert len(rows) == 8
    for row in rows:
        assert abs(row.delivered - row.delivered_exact) < 3 * row.delivered_error
        chance = row.overload_exact
        assert abs(row.overload - chance) <= 3 * np.sqrt(chance * (1 - chance) / TRIALS) + 1e-9
    whole, split = ([row.delivered_exact for row in rows if row.split == kind] for kind in (False, True))
    assert all(b > a for a, b in zip(whole, split, strict=True))
    assert (whole[0], split[0]) == (pytest.approx(0.638, abs=5e-4), pytest.approx(0.734, abs=5e-4))

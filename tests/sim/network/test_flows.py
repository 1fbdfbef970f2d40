"""Max-min shares: what defines them, and known cases."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from megascale_jax.config.load import load_system
from megascale_jax.sim.network import ecmp
from megascale_jax.sim.network.flows import loads, max_min_rates
from megascale_jax.sim.network.hashing import Seeds
from megascale_jax.sim.network.topology import Clos

CONFIG = load_system("a100").network


def test_the_flow_of_a_chain_gives_way_to_those_of_single_links():
    paths = np.array([[0, 1], [0, -1], [1, -1], [1, -1]])
    assert max_min_rates(paths, np.array([1.0, 1.0])) == pytest.approx([1 / 3, 2 / 3, 1 / 3, 1 / 3])


def test_demand_frees_what_it_does_not_take():
    paths = np.zeros((3, 1), int)
    assert max_min_rates(paths, np.array([9.0]), np.array([1.0, 10.0, 10.0])) == pytest.approx([1, 4, 4])
    assert max_min_rates(np.array([[-1]]), np.array([1.0]), np.array([5.0])) == pytest.approx([5])


@st.composite
def problems(draw):
    links = draw(st.integers(1, 8))
    capacity = np.array(draw(st.lists(st.floats(0.5, 10), min_size=links, max_size=links)))
    path = st.lists(st.integers(0, links - 1), min_size=1, max_size=3, unique=True)
    paths = draw(st.lists(path, min_size=1, max_size=12))
    padded = np.full((len(paths), 3), -1)
    for row, one in enumerate(paths):
        padded[row, : len(one)] = one
    return padded, capacity


@given(problems())
def test_every_flow_has_a_full_link_on_which_nobody_gets_more(problem):
    paths, capacity = problem
    rate = max_min_rates(paths, capacity)
    used = loads(paths, len(capacity), rate)
    assert (used <= capacity * (1 + 1e-6)).all()
    for flow, path in enumerate(paths):
        own = path[path >= 0]
        is_bottleneck = [
            used[link] >= capacity[link] * (1 - 1e-6) and rate[(paths == link).any(axis=1)].max() <= rate[flow] * (1 + 1e-6) for link in own
        ]
        assert any(is_bottleneck), (paths, capacity, rate)


def test_a_whole_job_is_solved_and_no_link_carries_too_much():
    clos, generator = Clos(CONFIG, 1536), np.random.default_rng(0)
    flows = ecmp.permutation(clos, generator)
    assert flows.number == 12_288
    row = ecmp.fabric_row(clos, flows, Seeds.drawn(clos, generator))
    assert 0.5 < row.mean < 0.7 and 0 < row.slowest < row.mean


def test_placed_rings_are_faster_than_scattered_ones_and_split_ports_than_whole_ones():
    found = {name: np.mean([row.ring for row in rows]) for name, rows in ecmp.rings(CONFIG, 512, 64, 2, (1,)).items()}
    assert found["split, placed, 1 queue pair"] == 1.0
    assert found["split, scattered, 1 queue pair"] < 0.6
    assert found["no split, scattered, 1 queue pair"] < found["split, scattered, 1 queue pair"]

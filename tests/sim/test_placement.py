"""Ranks on nodes: groups kept together, scores counted out."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from megascale_jax.cluster.node_order import Hangs, natural
from megascale_jax.config.layout import MeshShape
from megascale_jax.config.load import load_experiment
from megascale_jax.errors import ConfigError
from megascale_jax.sim.collectives import gathered_bytes
from megascale_jax.sim.costs import data_bytes, message_bytes
from megascale_jax.sim.placement import nodes_needed, place, score
from megascale_jax.sim.placement_study import fleet, scores
from megascale_jax.sim.traffic import step_edges
from megascale_jax.sim.work import Work

LARGE = load_experiment("gpt-175b", ["system=a100"])
SMALL = load_experiment(
    "gpt-175b", ["system=a100", "parallel.pipe=4", "parallel.data=6", "parallel.virtual_stages=null", "train.global_batch_size=48"]
)
"""24 nodes: 4 stages of 6, so few micro-batches that the data groups send most."""


def sites_of(sizes, pods=1):
    """So many nodes to each ToR set, names dealt out in turn, so that an order by name scatters neighbours."""
    names, found = iter(range(sum(sizes))), {}
    left = list(sizes)
    while any(left):
        for tor, size in enumerate(left):
            if size:
                found[f"n{next(names)}"] = Hangs(f"t{tor}", f"p{tor * pods // len(sizes)}")
                left[tor] -= 1
    return found


def test_edges_are_rings_over_data_and_tensor_and_neighbours_over_pipe():
    edges = {one.axis: one for one in step_edges(SMALL)}
    mesh, work = MeshShape.of(SMALL.parallel), Work.of(SMALL)
    for one in edges.values():
        dim = ("pipe", "data", "tensor").index(one.axis)
        for source, target in zip(one.source[::7], one.target[::7], strict=True):
            a, b = mesh.coordinates(int(source)), mesh.coordinates(int(target))
            apart = [i for i in range(3) if a[i] != b[i]]
            assert apart == [dim]
    assert edges["data"].sent.sum() == pytest.approx(mesh.size * 2 * gathered_bytes(mesh.data, data_bytes(work)))
    chunks = edges["pipe"].sent.sum() / (2 * message_bytes(work) * SMALL.num_micro_batches * mesh.data * mesh.tensor)
    assert round(chunks) == pytest.approx(chunks) and (round(chunks) + 1) % mesh.pipe == 0, (
        "every boundary of virtual stages once in each direction, none after the last"
    )


def test_groups_are_put_whole_under_tor_sets_that_have_room():
    sites = sites_of([8, 8, 8, 8], pods=2)
    found = place(SMALL, sorted(sites, key=natural), sites, 8)
    assert found.method == "blocks" and found.num_ranked == 24 and sorted(found.order) == sorted(sites)
    for stage in range(4):
        assert len({sites[name].tor for name in found.order[6 * stage : 6 * stage + 6]}) == 1
    by_axis = {one.axis: one for one in found.score.by_axis}
    assert by_axis["data"].across_tor_bytes == 0 and by_axis["data"].groups_whole == 1
    assert by_axis["tensor"].network_bytes == 0 and by_axis["tensor"].groups_whole == 1
    assert found.naive.across_tor_bytes > 2 * found.score.across_tor_bytes
    pods = [sites[found.order[6 * stage]].pod for stage in range(4)]
    assert pods == sorted(pods), "stages that follow each other share a pod"


def test_what_does_not_fit_whole_is_put_into_few_pieces():
    sites = sites_of([9, 9, 9])
    found = place(SMALL, sorted(sites, key=natural), sites, 8)
    pieces = [len({sites[name].tor for name in found.order[6 * stage : 6 * stage + 6]}) for stage in range(4)]
    assert sorted(pieces) == [1, 1, 1, 2]


def test_a_score_is_what_crosses_counted_edge_by_edge():
    sites = sites_of([5, 7, 6, 6], pods=2)
    order = sorted(sites, key=natural)
    found = {one.axis: one for one in score(SMALL, order, sites, 8).by_axis}
    for edges in step_edges(SMALL):
        where = [(sites[order[a // 8]], sites[order[b // 8]]) for a, b in zip(edges.source, edges.target, strict=True)]
        across = sum(sent for sent, (a, b) in zip(edges.sent, where, strict=True) if a.tor != b.tor)
        pods = sum(sent for sent, (a, b) in zip(edges.sent, where, strict=True) if a.pod != b.pod)
        assert found[edges.axis].across_tor_bytes == pytest.approx(across) and found[edges.axis].across_pod_bytes == pytest.approx(pods)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) >= 24), st.integers(1, 3), st.randoms())
@settings(deadline=None, max_examples=40)
def test_a_placement_is_an_order_of_all_nodes_and_never_worse_than_the_one_given(sizes, pods, random):
    sites = sites_of(sizes, pods)
    given_order = sorted(sites)
    random.shuffle(given_order)
    found = place(SMALL, given_order, sites, 8)
    assert sorted(found.order) == sorted(given_order)
    assert found.score.cost <= found.naive.cost
    assert found.naive == score(SMALL, given_order[:24], sites, 8) and found.score == score(SMALL, found.order[:24], sites, 8)
    assert {one.axis: one.network_bytes for one in found.score.by_axis}["tensor"] == 0


def test_the_largest_job_of_the_paper_is_placed_on_a_fleet_with_gaps():
    sites = fleet(LARGE.system.network, 1567, np.random.default_rng(0))
    assert len(sites) == 1567 and max(sum(one.tor == tor for one in sites.values()) for tor in {one.tor for one in sites.values()}) <= 64
    found = scores(LARGE, 2)
    assert (found.nodes, found.ring_nodes) == (1536, 192)
    for placed, naive in zip(found.placed, found.by_name, strict=True):
        assert placed.across_tor_bytes < 0.25 * naive.across_tor_bytes


def test_wrong_fleets_and_meshes_are_refused():
    sites = sites_of([12, 12])
    names = sorted(sites)
    with pytest.raises(ConfigError, match="got 23 nodes, expected at least 24 of 8 devices"):
        place(SMALL, names[1:], sites, 8)
    with pytest.raises(ConfigError, match="node n1 is there twice"):
        place(SMALL, [*names, "n1"], sites, 8)
    with pytest.raises(ConfigError, match="no ToR set is known of 1 nodes, other among them"):
        place(SMALL, [*names, "other"], sites, 8)
    with pytest.raises(ConfigError, match="does not fill nodes of 5"):
        nodes_needed(SMALL, 5)
    with pytest.raises(ConfigError, match=r"parallel\.tensor is 8, expected a divisor of the 4 devices"):
        nodes_needed(SMALL, 4)

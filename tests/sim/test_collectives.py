"""Collectives: bytes, latencies, levels; the volumes that HPN printed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_jax.sim.collectives import Group, all_reduce_seconds, gather_seconds, gathered_bytes, message_seconds, ring_seconds
from megascale_jax.sim.costs import data_bytes, message_bytes
from megascale_jax.sim.validation.published import HPN_DATA_BYTES, HPN_PIPE_BYTES
from tests.sim.test_predict import DEVICE, WORK

RANKS, BYTES = st.integers(2, 4096), st.floats(1, 1e11)


def test_ring_of_eight_on_the_node_link():
    seconds = ring_seconds(DEVICE.node_link, 8, 50e6)
    assert seconds == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 50e6 * 7 / 8 / 220e9)


def test_groups_know_how_many_of_them_share_a_node():
    assert Group.of(8, 1, 8) == Group(8, 8)
    assert Group.of(192, 8, 8) == Group(192, 1)
    assert Group.of(64, 1, 8) == Group(64, 8) and Group(64, 8).nodes == 8


@given(RANKS, BYTES)
def test_an_all_reduce_is_no_quicker_than_its_bytes_and_no_slower_than_two_rings(ranks, size):
    group = Group.of(ranks, 1, 8)
    seconds = all_reduce_seconds(DEVICE, group, size)
    assert seconds <= 2 * gather_seconds(DEVICE, group, size)
    link = DEVICE.node_link if group.nodes == 1 else DEVICE.network_link
    assert seconds >= gathered_bytes(group.nodes if group.nodes > 1 else ranks, size) / (group.in_node * link.bytes_per_s)


def test_eight_ports_of_a_node_carry_a_gather_together():
    seconds = gather_seconds(DEVICE, Group(32, 8), 1e9)
    assert seconds == pytest.approx(8.4e-6 + 3 * 14e-6 + 7 * 3.4e-6 + 1e9 * 3 / 4 / (8 * 21.5e9))


def test_the_slower_level_decides():
    slow_inside = replace(DEVICE, node_link=replace(DEVICE.node_link, bytes_per_s=1e9))
    assert gather_seconds(slow_inside, Group(32, 8), 1e9) == pytest.approx(1e9 * 7 / 8 / 1e9, rel=1e-3)


def test_short_messages_among_many_go_by_trees():
    group = Group(512, 1)
    assert all_reduce_seconds(DEVICE, group, 1e3) < gather_seconds(DEVICE, group, 1e3)
    few = Group(8, 1)
    assert all_reduce_seconds(DEVICE, few, 1e10) == pytest.approx(2 * gather_seconds(DEVICE, few, 1e10), rel=1e-3)


def test_nothing_moves_in_a_group_of_one():
    assert gather_seconds(DEVICE, Group(1, 1), 1e9) == 0 == all_reduce_seconds(DEVICE, Group(1, 1), 1e9)


def test_volumes_are_those_of_hpn():
    """175 B parameters, tensor 8, pipe 8: HPN, SIGCOMM '24, Table 3, prints 6 MB and 5.5 GB."""
    work = replace(WORK, micro_batch_size=1)
    assert message_bytes(work) == pytest.approx(HPN_PIPE_BYTES, rel=1e-3)
    assert data_bytes(work) == pytest.approx(HPN_DATA_BYTES, rel=5e-3)


def test_messages_in_a_node_take_its_link():
    assert message_seconds(DEVICE, 1e6, in_node=True) < message_seconds(DEVICE, 1e6, in_node=False) == pytest.approx(22e-6 + 1e6 / 21.5e9)

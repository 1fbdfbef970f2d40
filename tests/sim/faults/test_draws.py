"""Failures as chance has them."""

import numpy as np
import pytest

from megascale_jax.sim.faults.case import DAY_NS
from megascale_jax.sim.faults.draws import Batch, draw
from tests.sim.faults.made_case import SLOW, made_case

KINDS = {"often": {"failures_per_1000_node_days": 300.0, "heals": 0.25}, "rare": {"failures_per_1000_node_days": 100.0, "found": 0.5}}


def test_kinds_come_as_often_as_their_rates_say():
    case = made_case(KINDS)
    days = 2000
    drawn = draw(case, 3, days * DAY_NS)
    for kind, event in enumerate(case.events):
        expected = event.per_second * days * 86_400
        assert abs((drawn.kinds == kind).sum() - expected) < 4 * expected**0.5
    assert drawn.heals[drawn.kinds == 0].mean() == pytest.approx(0.25, abs=0.03)
    assert drawn.found[drawn.kinds == 1].mean() == pytest.approx(0.5, abs=0.05)
    assert set(drawn.ranks) == set(range(case.nodes))
    gaps = np.diff(drawn.times_ns)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "no memory"


def test_a_corrupt_copy_is_seen_at_the_next_comparison_of_states():
    exits, corrupts = made_case({"a": {"shows": "exit"}}), made_case({"a": {"shows": "corrupt"}})
    later = draw(corrupts, 5, 300 * DAY_NS).times_ns - draw(exits, 5, 300 * DAY_NS).times_ns
    assert later.min() >= 0 and later.max() <= corrupts.digest_ns == 200 * 10**9
    assert later.mean() == pytest.approx(corrupts.digest_ns / 2, rel=0.2)


def test_a_job_without_rates_has_no_failures_and_slow_nodes_are_drawn():
    case = made_case({"gpu": {"failures_per_1000_node_days": 0.0}}, nodes=2000, slow_nodes=SLOW)
    drawn = draw(case, 1, DAY_NS)
    assert drawn.times_ns.size == 0
    assert drawn.slow.mean() == pytest.approx(0.2, abs=0.04)
    assert Batch.of(case, [drawn]).is_slow.tolist() == [True]


def test_a_switch_takes_neighbours_of_one_group():
    tor = {"tor": {"events_per_1000_group_days": 500.0, "group_nodes": 4, "outage_s": 60.0, "source": "made"}}
    case = made_case({"gpu": {"failures_per_1000_node_days": 0.0}}, nodes=12, correlated=tor)
    assert set(draw(case, 2, 60 * DAY_NS).ranks.tolist()) == {0, 4, 8}

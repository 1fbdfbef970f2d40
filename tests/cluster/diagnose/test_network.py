"""Pairs in rounds: the bad node is named and its peer is not, whatever the counts, the switches and the order of results."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.cluster.diagnose.network import MOST_ROUNDS, Scale, blame, pairs


def run(nodes, bad, scale, rate=10.0, bad_rate=None):
    """All rounds on nodes of which some are bad; the blame, and how many rounds it took."""
    rounds = []
    while chosen := pairs(nodes, scale, rounds):
        assert len(rounds) < MOST_ROUNDS
        assert len({node for pair in chosen for node in pair}) == 2 * len(chosen), "a node in two pairs at a time"
        rounds.append({pair: bad_rate if bad & set(pair) else rate for pair in chosen})
    return blame(nodes, scale, rounds), len(rounds)


def names(count):
    return [f"node-{index}" for index in range(count)]


@st.composite
def fleets(draw, smallest, most_bad):
    nodes = names(draw(st.integers(smallest, 64)))
    bad = draw(st.sets(st.sampled_from(nodes), min_size=0, max_size=most_bad))
    switches = {node: f"s{draw(st.integers(0, 4))}" for node in nodes} if draw(st.booleans()) else {}
    return nodes, bad, switches


@given(fleets(4, 1))
@settings(max_examples=200, deadline=None)
def test_one_bad_node_is_named_in_two_rounds(fleet):
    nodes, bad, switches = fleet
    found, rounds = run(nodes, bad, Scale(switches))
    assert set(found.bad) == bad and not found.suspects and not found.links and rounds <= (3 if len(nodes) == 5 else 2)


@given(fleets(4, 2))
@settings(max_examples=300, deadline=None)
def test_two_bad_nodes_are_named_and_no_healthy_one(fleet):
    nodes, bad, switches = fleet
    found, _ = run(nodes, bad, Scale(switches))
    assert set(found.bad) == bad and not found.suspects


@given(st.one_of(fleets(4, 1), fleets(6, 2)), st.floats(0.1, 0.7))
@settings(max_examples=200, deadline=None)
def test_slow_nodes_are_named_like_dead_ones(fleet, share):
    nodes, bad, _ = fleet
    found, _ = run(nodes, bad, Scale({}), bad_rate=10.0 * share)
    assert set(found.bad) == bad and not found.suspects


@given(fleets(2, 64))
@settings(max_examples=200, deadline=None)
def test_a_healthy_node_is_never_named_however_many_are_bad(fleet):
    nodes, bad, switches = fleet
    found, _ = run(nodes, bad, Scale(switches))
    assert set(found.bad) <= bad
    if len(nodes) - len(bad) < 2:
        assert not found.bad


@given(st.integers(4, 64), st.data())
@settings(max_examples=200, deadline=None)
def test_noise_of_a_fifth_names_nobody(count, data):
    nodes, rounds = names(count), []
    while chosen := pairs(nodes, Scale({}), rounds):
        rounds.append({pair: data.draw(st.floats(8.1, 10.0)) for pair in chosen})
    found = blame(nodes, Scale({}), rounds)
    assert not found.bad and not found.suspects and not found.untested and len(rounds) == 1 + count % 2


def test_one_node_has_no_pair():
    assert pairs(["a"], Scale({}), []) == () and blame(["a"], Scale({}), []).untested == ("a",)


def test_of_two_nodes_both_are_suspects():
    found, rounds = run(["a", "b"], {"b"}, Scale({}))
    assert not found.bad and set(found.suspects) == {"a", "b"} and rounds == 1


def test_of_three_nodes_one_bad_is_named_in_three_rounds_and_two_never():
    for bad in ("a", "b", "c"):
        found, rounds = run(["a", "b", "c"], {bad}, Scale({}))
        assert set(found.bad) == {bad} and not found.suspects and rounds <= 3
    found, _ = run(["a", "b", "c"], {"a", "c"}, Scale({}))
    assert not found.bad and set(found.suspects) == {"a", "b", "c"}


def test_neighbours_are_under_the_same_switch_and_the_slow_meet_the_fastest():
    scale = Scale({"a": "s1", "b": "s2", "c": "s1", "d": "s2"})
    assert pairs(["a", "b", "c", "d"], scale, []) == (("a", "c"), ("b", "d"))
    flat = Scale({})
    first = {("a", "b"): 2.0, ("c", "d"): 9.0, ("e", "f"): 10.0}
    assert pairs(list("abcdef"), flat, [first]) == (("a", "e"), ("b", "f"))


@given(st.lists(st.sampled_from([None, "s1", "s2", "s3"]), max_size=64))
@settings(max_examples=200, deadline=None)
def test_in_the_first_round_as_many_as_possible_meet_under_their_own_switch(of_nodes):
    switches = dict(zip(names(len(of_nodes)), of_nodes, strict=True))
    chosen = pairs(list(switches), Scale({node: switch for node, switch in switches.items() if switch is not None}), [])
    alike = [switches[one] for one, other in chosen if switches[one] == switches[other]]
    for switch in ("s1", "s2", "s3"):
        assert alike.count(switch) == of_nodes.count(switch) // 2
    assert len(chosen) == len(of_nodes) // 2


def test_a_slow_way_between_two_good_nodes_blames_neither():
    rounds = [{("a", "b"): 2.0, ("c", "d"): 10.0}, {("a", "c"): 10.0, ("b", "d"): 10.0}]
    found = blame(list("abcd"), Scale({}), rounds)
    assert not found.bad and not found.suspects and set(found.links) == {("a", "b")}
    assert pairs(list("abcd"), Scale({}), rounds) == ()


def test_a_longer_way_across_switches_is_not_slow():
    scale = Scale({"a": "s1", "b": "s1", "c": "s2", "d": "s3"})
    found = blame(list("abcd"), scale, [{("a", "b"): 10.0, ("c", "d"): 4.0}])
    assert not found.suspects and not found.bad


@pytest.mark.parametrize(("baseline", "suspects"), [(None, set()), (10.0, {"a", "b"})])
def test_a_lone_pair_is_judged_by_a_baseline_only(baseline, suspects):
    assert set(blame(["a", "b"], Scale({}, baseline=baseline), [{("a", "b"): 5.0}]).suspects) == suspects

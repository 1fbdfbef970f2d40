"""The choice among what ranks report: where each gets its part of a state in memory, first to last."""

from megascale_jax.checkpoint.tiers import LOCAL, Report, memory_states

HERE, THERE = ("10.0.0.1", 1), ("10.0.0.2", 2)


def reports(first, second):
    """Two ranks on two hosts; each has its own states, and copies of the other's."""
    own = [[(step, "launch", slot) for slot, step in enumerate(steps)] for steps, _ in (first, second)]
    copies = [[(1, step, "launch", "mark") for step in first[1]], [(0, step, "launch", "mark") for step in second[1]]]
    return [Report("mark", name, address, own[n], copies[n]) for n, (name, address) in enumerate((("a", HERE), ("b", THERE)))]


def test_own_memory_comes_first_and_copies_on_other_hosts_after_it():
    (state,) = memory_states(reports(([7], [7]), ([7], [7])))
    assert state.places == ((LOCAL, THERE), (LOCAL, HERE)) and state.tier == "local"
    left = state.without([1])
    assert left.places == ((LOCAL, THERE), (HERE,)) and left.tier == "peer"
    assert left.without([0]).places == ((THERE,), (HERE,))
    assert left.without([1]) is None, "rank 1 has no other"


def test_state_that_one_rank_cannot_get_is_none():
    assert [state.step for state in memory_states(reports(([3, 7], [3]), ([3], [])))] == [3]
    (state,) = memory_states(reports(([], []), ([7], [7])))
    assert state.places == ((THERE,), (LOCAL,)) and state.tier == "peer"

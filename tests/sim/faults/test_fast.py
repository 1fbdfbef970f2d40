"""All seeds at once: sums, sameness, monotony, and single stories that can be reckoned by hand."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from megascale_jax.config.cluster import ClusterConfig
from megascale_jax.observe.booked import KINDS
from megascale_jax.sim.faults.case import DAY_NS, SECOND_NS, Case
from megascale_jax.sim.faults.draws import Batch, Draws, draw
from megascale_jax.sim.faults.fast import simulate
from megascale_jax.sim.faults.outcome import Outcome
from tests.sim.faults.made_case import SLOW, made_case

HORIZON = 3 * DAY_NS
TOR = {"tor": {"events_per_1000_group_days": 200.0, "group_nodes": 4, "outage_s": 400.0, "source": "made"}}


def of(case: Case, draws: list[Draws], end_ns: int = HORIZON, **more) -> Outcome:
    return simulate(case, Batch.of(case, draws), end_ns, **more)


def failures(case: Case, *at_s: float, heals: bool = True, found: bool = True, kind: int = 0) -> Draws:
    count = len(at_s)
    times = (np.array(at_s) * SECOND_NS).astype(np.int64)
    column = np.zeros(count, np.int64)
    slow = np.zeros(case.nodes + case.spares, bool)
    return Draws(0, times, column + kind, column, np.full(count, heals), np.full(count, found), slow)


def booked_s(outcome: Outcome) -> dict[str, float]:
    return {kind: int(spent[0]) / SECOND_NS for kind, spent in outcome.booked_ns.items() if spent[0]}


def test_a_job_without_failures_trains_and_saves():
    case = made_case({"gpu": {"failures_per_1000_node_days": 0.0}})
    outcome = of(case, [draw(case, 0, HORIZON)], 91 * SECOND_NS + 10 * 603 * SECOND_NS)
    assert booked_s(outcome) == {"training": 6000.0, "checkpoint": 30.0, "compile": 11.0, "restart": 80.0}
    assert outcome.steps[0] == 3000


def test_what_is_lost_is_the_training_since_the_newest_save_that_is_safe():
    case = made_case(upload_s=40.0)
    # trains from 91 s on; saves end at 694 and 1297 s; the second one's upload ends at 1337 s
    before, after = (booked_s(of(case, [failures(case, at)], 1400 * SECOND_NS)) for at in (1336.0, 1338.0))
    assert before["recomputed"] == 1336 - 91 - 3 * 2 - 600
    assert after["recomputed"] == 1338 - 91 - 3 * 2 - 1200
    assert before["idle"] == 10 and before["diagnosis"] == 30 and before["checkpoint"] == 6


def test_a_found_node_takes_a_spare_and_the_job_waits_when_there_is_none():
    case = made_case(spares=1, recovery={"spare_supply_s": 700.0}, cluster=ClusterConfig(wait_s=10_000.0))
    outcome = of(case, [failures(case, 1000.0, 1300.0, heals=False)], 3000 * SECOND_NS)
    # struck at 1300 s and stopped by 1345 s; the node of the first failure is there again 700 s after 1000 s
    assert outcome.waited_ns[0] == (1700 - 1345) * SECOND_NS
    assert outcome.replaced[0] == 2 and outcome.gave_up[0] == 0


def test_a_wait_beyond_the_limit_calls_a_person():
    case = made_case(spares=0, cluster=ClusterConfig(wait_s=100.0))
    outcome = of(case, [failures(case, 1000.0, heals=False)], 20_000 * SECOND_NS)
    # 7,200 s for another machine are longer than 100 s and a person's 1,800 s
    assert outcome.gave_up[0] == 1 and booked_s(outcome)["idle"] == 10 + 7200 - 45 - 100


def test_a_failure_that_is_not_found_comes_back_until_its_node_is_evicted():
    case = made_case()
    outcome = of(case, [failures(case, 1000.0, heals=False, found=False)], 5000 * SECOND_NS)
    assert outcome.incidents[0] == case.cluster.strikes and outcome.replaced[0] == 1
    spent = booked_s(outcome)
    assert spent["idle"] == 3 * 10 and spent["diagnosis"] == 3 * 30 and spent["compile"] == 4 * 11


def test_a_failure_while_no_process_runs_strikes_when_the_next_attempt_starts():
    case = made_case()
    outcome = of(case, [failures(case, 1000.0, 1020.0)], 3000 * SECOND_NS)
    spent = booked_s(outcome)
    assert outcome.incidents[0] == 2
    assert spent["restart"] == 2 * 80 + 2 * 5 and spent["compile"] == 2 * 11, "the second attempt never began to restore"


def test_a_slow_node_makes_steps_longer_and_none_of_the_time_lost():
    case = made_case({"gpu": {"failures_per_1000_node_days": 0.0}}, slow_nodes=SLOW | {"share": 1.0})
    outcome = of(case, [draw(case, 0, HORIZON)])
    even = made_case({"gpu": {"failures_per_1000_node_days": 0.0}})
    usual = of(even, [draw(even, 0, HORIZON)])
    assert outcome.steps[0] == pytest.approx(usual.steps[0] / 1.05, rel=1e-3)
    assert outcome.mean_goodput == pytest.approx(usual.mean_goodput, rel=1e-3)


CASES = st.builds(
    lambda rate, heals, found, spares, interval_s, shows, tor: made_case(
        {"a": {"failures_per_1000_node_days": rate, "heals": heals, "found": found, "shows": shows}, "b": {"shows": "exit"}},
        spares=spares,
        interval_s=interval_s,
        correlated=TOR if tor else {},
    ),
    st.floats(0.0, 900.0),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 3),
    st.sampled_from([60.0, 600.0, 5000.0]),
    st.sampled_from(["exit", "hang", "silent", "corrupt"]),
    st.booleans(),
)


@settings(deadline=None, max_examples=40)
@given(CASES, st.integers(0, 1000))
def test_every_nanosecond_is_booked_once_and_a_seed_gives_the_same_again(case, seed):
    draws = [draw(case, seed + number, HORIZON) for number in range(4)]
    outcome, again = of(case, draws), of(case, draws[2:3])
    assert np.array_equal(sum(outcome.booked_ns[kind] for kind in KINDS), outcome.wall_ns)
    assert (outcome.wall_ns == HORIZON).all() and all((spent >= 0).all() for spent in outcome.booked_ns.values())
    for kind in KINDS:
        assert outcome.booked_ns[kind][2] == again.booked_ns[kind][0], "whatever other seeds there are"
    assert outcome.total_ns() == {kind: int(outcome.booked_ns[kind].sum()) for kind in KINDS}


@settings(deadline=None, max_examples=40)
@given(CASES, st.integers(0, 1000), st.randoms(use_true_random=False))
def test_more_failures_never_raise_the_goodput(case, seed, random):
    whole = draw(case, seed, HORIZON)
    whole = Draws(seed, whole.times_ns, whole.kinds, whole.ranks, whole.heals | ~whole.found, whole.found, whole.slow)
    fewer = whole.without(np.array([random.random() < 0.3 for _ in whole.times_ns], bool))
    outcome = of(case, [whole, fewer])
    assert outcome.goodput[0] <= outcome.goodput[1]


def test_a_longer_horizon_goes_on_where_a_shorter_one_ends():
    case = made_case({"gpu": {}, "wrong": {"shows": "silent"}})
    short, long = draw(case, 7, 10 * HORIZON), draw(case, 7, 20 * HORIZON)
    count = short.times_ns.size
    assert count > 20 and np.array_equal(short.times_ns, long.times_ns[:count]) and np.array_equal(short.kinds, long.kinds[:count])


def test_the_wanted_steps_are_done_and_not_one_more():
    case = made_case()
    draws = [draw(case, seed, 30 * DAY_NS) for seed in range(20)]
    outcome = of(case, draws, 30 * DAY_NS, need_steps=40_000)
    assert outcome.is_finished.all() and outcome.steps == pytest.approx(40_000)
    assert not of(case, draws, DAY_NS, need_steps=1e9).is_finished.any()

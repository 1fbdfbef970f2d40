"""What both fault simulations are told: rates, times, and how a run is split into what counts and what is lost."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from megascale_jax.cluster.limits import Limits
from megascale_jax.config.cluster import ClusterConfig
from megascale_jax.errors import ConfigError
from megascale_jax.sim.faults.case import SECOND_NS, CheckpointCosts, case_of, detection_s, run_until, split_run
from tests.sim.faults.made_case import made_case, made_fleet

TIMES = st.integers(0, 10**6)


def test_rates_are_those_of_the_whole_job():
    case = made_case(
        {"gpu": {"failures_per_1000_node_days": 50.0}, "link": {"failures_per_1000_node_days": 75.0}},
        nodes=16,
        correlated={"tor": {"events_per_1000_group_days": 10.0, "group_nodes": 5, "outage_s": 60.0, "source": "made"}},
    )
    singles, groups = 125.0 * 16 / 1000, 10.0 * 4 / 1000  # 4 groups hold 16 nodes
    assert case.per_second * 86_400 == pytest.approx(singles + groups)
    assert case.mtbf_s == pytest.approx(86_400 / (singles + groups))
    assert [event.takes for event in case.events] == [1, 1, 5]


def test_a_hang_is_noticed_when_the_drivers_own_limit_is_over():
    config = ClusterConfig()
    limits = Limits.of(config)
    limits.learn({"step": 6.0, "compile": 100.0})
    assert detection_s("hang", config, 6.0) == limits.limit_s("step", {"step": 100}) + config.settle_s == 30.5
    assert detection_s("hang", config, 1.0) == config.floors.step + config.settle_s
    assert detection_s("silent", config, 6.0) == config.lost_after_s


def test_a_documents_own_detection_is_taken_and_null_is_the_drivers():
    case = made_case({"own": {"detect_s": None, "shows": "hang"}, "given": {"detect_s": 600.0, "shows": "hang"}})
    assert [event.detect_ns / SECOND_NS for event in case.events] == [10.5, 600.0]


@pytest.mark.parametrize(("changed", "setting"), [({"suspend_s": 21.0}, "stop_s"), ({"diagnose_s": 121.0}, "diagnose_s")])
def test_times_with_which_no_recovery_would_end_are_refused(changed, setting):
    with pytest.raises(ConfigError, match=f"raise cluster.{setting}"):
        made_case(recovery=changed)


def test_an_interval_below_a_step_is_refused():
    with pytest.raises(ConfigError, match="shorter than a step"):
        made_case(interval_s=1.0)


def test_an_upload_that_is_longer_than_an_interval_holds_up_the_next_save():
    assert made_case(interval_s=100.0, blocking_s=3.0, upload_s=150.0).blocking_ns == 50 * SECOND_NS
    assert made_case(interval_s=100.0, blocking_s=3.0, upload_s=102.0).blocking_ns == 3 * SECOND_NS


def test_a_copy_on_another_host_outlives_one_node_and_not_a_switch():
    tor = {"tor": {"events_per_1000_group_days": 1.0, "group_nodes": 4, "outage_s": 60.0, "source": "made"}}
    case = made_case(upload_s=40.0, copy_s=5.0, correlated=tor)
    assert [event.lag_ns // SECOND_NS for event in case.events] == [5, 40]


@given(TIMES, st.integers(1, 1000), st.integers(0, 100), TIMES)
def test_a_run_is_split_without_rest_and_keeps_whole_intervals_only(ran, interval, blocking, lag):
    trained, saved, safe = (int(one) for one in split_run(np.array(ran), np.array(interval), blocking, np.array(lag)))
    assert trained + saved == ran and 0 <= safe <= trained
    assert safe % interval == 0
    saves = safe // interval
    assert saves == 0 or saves * (interval + blocking) + lag <= ran, "its copy was safe by then"
    assert (saves + 1) * (interval + blocking) + lag > ran, "the one after it was not"


@given(st.integers(1, 10**6), st.integers(1, 1000), st.integers(0, 100))
def test_a_run_of_the_time_until_some_training_is_done_has_done_it(train, interval, blocking):
    ran = run_until(np.array(train), np.array(interval), blocking)
    assert split_run(ran, np.array(interval), blocking, np.array(0))[0] == train
    assert split_run(ran - 1, np.array(interval), blocking, np.array(0))[0] == train - 1


def test_start_of_processes_goes_by_the_size_of_the_job():
    def restore_s(nodes: int) -> float:
        fleet = made_fleet(recovery={"init_s": {"64": 100.0, "128": 200.0}, "load_s": 0.0})
        costs = CheckpointCosts(600, 3, 40)
        args = {"gpus_per_node": 8, "spares": 0, "step_s": 2.0, "costs": costs, "load_s": 0.0, "digest_every": None}
        return case_of(fleet, ClusterConfig(), nodes=nodes, **args).restore_ns / SECOND_NS

    assert [restore_s(nodes) for nodes in (8, 12, 16, 32, 1)] == [100.0, 150.0, 200.0, 400.0, 12.5]


@pytest.mark.parametrize(("changed", "incidents"), [({}, 3), ({"strike_window_s": 300.0}, None), ({"strikes": 9}, None)])
def test_how_often_a_hidden_failure_strikes_until_the_rules_evict_its_node(changed, incidents):
    case = made_case(cluster=ClusterConfig(**changed))
    assert case.incidents_until_evicted(case.events[0]) == incidents

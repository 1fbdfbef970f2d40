"""Verdicts over nodes from outcomes alone: who is bad, who is suspect, what the exit code is."""

import itertools

import pytest

from megascale_jax.cluster.diagnose.checks import Number, Outcome, not_run, outcome
from megascale_jax.cluster.diagnose.fleet import EXIT_CODES, judge_all, no_answer, plan_round
from megascale_jax.cluster.diagnose.nic import Baseline
from megascale_jax.cluster.diagnose.request import Node, switch_of

NODES = {name: Node(address=f"10.0.0.{index}", ports=(2001, 2002, 2003)) for index, name in enumerate("abcde")}
FINE = Outcome(check="memory", status="pass")


def everywhere(**changed):
    """A passed check on all nodes but those that are given something else."""
    return {name: changed.get(name, [FINE]) for name in NODES}


def judge(outcomes, **baseline):
    return judge_all({name: NODES[name] for name in outcomes}, outcomes, Baseline(**baseline))


def test_a_node_that_cannot_run_what_most_can_is_a_suspect():
    verdict = judge({name: [FINE, not_run("gemm", "no JAX") if name == "c" else Outcome(check="gemm", status="pass")] for name in "abc"})
    assert [finding.node for finding in verdict.suspects] == ["c"] and not verdict.bad and verdict.exit_code == 16
    half = judge({name: [FINE, not_run("gemm", "no JAX") if name in "cd" else Outcome(check="gemm", status="pass")] for name in "abcd"})
    assert not half.suspects and half.exit_code == 0


def rate(check, *values, kind="H100"):
    numbers = [Number(name="m", value=value, unit="TFLOP/s", part=f"GPU {index}") for index, value in enumerate(values)]
    return [outcome(check, numbers=numbers, facts={"device": kind})]


def test_all_fine_is_0_and_nothing_at_all_is_16():
    assert judge(everywhere()).exit_code == 0
    assert judge({name: [not_run("memory", "no /proc")] for name in NODES}).exit_code == 16
    silent = judge(everywhere(c=[]))
    assert silent.bad_nodes == ("c",) and silent.exit_code == 16


def test_a_warning_or_a_check_that_did_not_run_is_no_fault():
    verdict = judge(everywhere(a=[outcome("clock", [("warn", "w")]), FINE], b=[not_run("gpu_nvlink", "n"), FINE]))
    assert verdict.exit_code == 0 and len(verdict.warnings) == 1 and verdict.not_run[0].node == "b"


@pytest.mark.parametrize(
    ("check", "code"),
    [("disk", 10), ("gpu_memory", 11), ("nic_link", 12), ("gemm", 13), ("all_to_all", 14), ("corruption", 15)],
)
def test_each_class_has_its_exit_code(check, code):
    verdict = judge(everywhere(b=[outcome(check, [("fail", "broken")])]))
    assert (verdict.bad_nodes, verdict.exit_code) == (("b",), code)


def test_of_several_faults_the_most_severe_one_counts():
    one_of_each = {
        "corruption": "corruption",
        "gpu": "gpu_free",
        "host": "disk",
        "nic": "nic_link",
        "network": "all_to_all",
        "slow": "copy",
    }
    for first, second in itertools.combinations(one_of_each, 2):
        verdict = judge(everywhere(a=[outcome(one_of_each[second], [("fail", "x")])], b=[outcome(one_of_each[first], [("fail", "x")])]))
        assert verdict.exit_code == EXIT_CODES[first], "EXIT_CODES is in the order of severity"


def test_a_slow_device_is_named_among_those_of_its_kind():
    verdict = judge({"a": rate("gemm", 600, 602, 450), "b": rate("gemm", 601, 599), "c": rate("gemm", 300, 301, 302, kind="A100")})
    assert (
        verdict.bad_nodes == ("a",)
        and verdict.exit_code == 13
        and "GPU 2" in verdict.bad[0].reason
        and "25% below" in verdict.bad[0].reason
    )


def test_virtual_devices_share_cores_so_only_much_slower_ones_are_named():
    cpus = {name: rate("gemm", value, kind="cpu") for name, value in zip("abcd", (1.0, 1.1, 0.7, 1.0), strict=True)}
    assert judge(cpus).exit_code == 0
    assert judge(cpus | {"e": rate("gemm", 0.3, kind="cpu")}).bad_nodes == ("e",)


def test_two_nodes_need_a_baseline():
    two = {"a": rate("gemm", 600), "b": rate("gemm", 400)}
    verdict = judge(two)
    assert verdict.exit_code == 0 and "too few" in verdict.warnings[0].reason
    assert judge(two, rates={"gemm": 600.0}).bad_nodes == ("b",)


def software(**facts):
    return [outcome("software", facts=facts)]


def test_versions_unlike_the_majority_are_named():
    alike = {name: software(driver="580", kernel="6.8") for name in "abc"}
    assert judge(alike).exit_code == 0
    verdict = judge(alike | {"d": software(driver="570", kernel="6.8")})
    assert verdict.bad_nodes == ("d",) and verdict.bad[0].reason == "driver 570, others have 580" and verdict.exit_code == 10
    assert judge(alike | {"d": software(kernel="6.8")}).bad[0].reason == "driver none, others have 580"
    assert judge(alike | {"d": software(driver="580", kernel="6.9")}).exit_code == 0


def test_two_versions_on_two_nodes_are_suspects():
    verdict = judge({"a": software(driver="580"), "b": software(driver="570")})
    assert not verdict.bad and {finding.node for finding in verdict.suspects} == {"a", "b"} and verdict.exit_code == 10


def product(digest, case="512"):
    return [outcome("corruption", facts={"digest": digest, "case": case})]


def test_other_bits_name_the_node_or_raise_suspicion():
    three = {"a": product("x"), "b": product("x"), "c": product("y")}
    assert judge(three).bad_nodes == ("c",) and judge(three).exit_code == 15
    two = judge({"a": product("x"), "b": product("y")})
    assert not two.bad and len(two.suspects) == 2 and two.exit_code == 15
    assert judge({"a": product("x"), "b": product("y", case="4096")}).exit_code == 0


def meet(outcomes, tasks, works):
    for node, task in tasks.items():
        is_fine = works(node, task.peer)
        rates = [Number(name="all-reduce", value=10.0, unit="GB/s")]
        outcomes[node].append(outcome("pair", numbers=rates, facts=task.facts) if is_fine else no_answer("pair", task))


def test_rounds_of_pairs_name_the_bad_node_and_not_its_peer():
    outcomes = {name: [FINE] for name in NODES}
    rounds = 0
    while tasks := plan_round(NODES, outcomes, Baseline()):
        rounds += 1
        assert {task.peer for task in tasks.values()} == set(tasks) and {task.round for task in tasks.values()} == {rounds}
        for node, task in tasks.items():
            host = node if task.index == 0 else task.peer
            assert task.coordinator == f"{NODES[host].address}:{2000 + rounds}" and tasks[task.peer].index == 1 - task.index
        meet(outcomes, tasks, lambda *names: "b" not in names)
    verdict = judge_all(NODES, outcomes, Baseline())
    assert verdict.bad_nodes == ("b",) and verdict.exit_code == 14 and not verdict.suspects and 2 <= rounds <= 3


def test_a_pair_that_one_side_calls_failed_has_failed():
    nodes = {name: NODES[name] for name in "ab"}
    outcomes = {name: [FINE] for name in nodes}
    tasks = plan_round(nodes, outcomes, Baseline())
    meet(outcomes, {"a": tasks["a"]}, lambda *_: True)
    meet(outcomes, {"b": tasks["b"]}, lambda *_: False)
    assert not plan_round(nodes, outcomes, Baseline())
    verdict = judge_all(nodes, outcomes, Baseline())
    assert {finding.node for finding in verdict.suspects} == {"a", "b"} and not verdict.bad and verdict.exit_code == 14


def test_a_node_that_cannot_take_part_blames_nobody():
    outcomes = {name: [FINE] for name in NODES}
    while tasks := plan_round(NODES, outcomes, Baseline()):
        for node, task in tasks.items():
            if node == "b":
                outcomes[node].append(not_run("pair", "no JAX").model_copy(update={"facts": task.facts}))
            else:
                meet(outcomes, {node: task}, lambda *names: "b" not in names)
    verdict = judge_all(NODES, outcomes, Baseline())
    assert not verdict.bad and [finding.node for finding in verdict.not_run] == ["b"]
    assert [(finding.node, finding.fault) for finding in verdict.suspects] == [("b", "unable")]


def test_a_bad_node_is_not_a_suspect_too():
    outcomes = {name: [outcome("disk", [("fail", "full")]) if name == "a" else FINE] for name in "ab"}
    nodes = {name: NODES[name] for name in "ab"}
    meet(outcomes, plan_round(nodes, outcomes, Baseline()), lambda *_: False)
    verdict = judge_all(nodes, outcomes, Baseline())
    assert verdict.bad_nodes == ("a",) and [finding.node for finding in verdict.suspects] == ["b"] and verdict.exit_code == 10


def test_an_address_of_version_6_is_bracketed():
    nodes = {name: Node(address="fd00::1", ports=(2001,)) for name in "ab"}
    assert plan_round(nodes, {}, Baseline())["a"].coordinator == "[fd00::1]:2001"


@pytest.mark.parametrize(
    ("environment", "switch"),
    [
        ({}, None),
        ({"SLURM_TOPOLOGY_ADDR": "s0.s4.node-7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}, "s0.s4"),
        ({"SLURM_TOPOLOGY_ADDR": "node-7", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, None),
        ({"MEGASCALE_SWITCH": "rack-3", "SLURM_TOPOLOGY_ADDR": "s0.node-7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}, "rack-3"),
    ],
)
def test_the_switch_of_a_node(environment, switch):
    assert switch_of(environment) == switch

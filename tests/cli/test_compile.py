"""`megascale compile` as a user calls it: which plans it compiles, and what it says about them. Nothing is compiled here."""

import pytest
from typer.testing import CliRunner

from megascale_jax.cli.compile import resolve, split_overrides
from megascale_jax.cli.main import app
from megascale_jax.errors import UsageError


def run(*arguments):
    return CliRunner().invoke(app, ["compile", *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("overrides", "target", "nodes", "message"),
    [
        (["system=a100"], "h100", None, "system=a100 and --target h100 decide the same thing; leave one of them out"),
        (["system.device=X"], "h100", None, "system.device=X and --target h100 decide the same thing"),
        (["parallel.remat=full", "parallel.data=96"], None, 1536, "parallel.data=96 and --nodes 1536 decide the same thing"),
    ],
)
def test_override_that_an_option_would_undo_is_refused(overrides, target, nodes, message):
    with pytest.raises(UsageError, match=message):
        resolve("gpt-175b", overrides, target, nodes)


def test_overrides_that_no_option_decides_stay():
    plan = resolve("gpt-175b", ["system=h100", "system.devices_per_node=16", "parallel.data=96"], None, None)
    assert (plan.system.device, plan.system.devices_per_node, plan.parallel.data) == ("NVIDIA H100 80GB HBM3", 16, 96)
    assert resolve("gpt-175b", ["system.devices_per_node=16"], "h100", None).system.devices_per_node == 16


@pytest.mark.parametrize(
    ("overrides", "nodes", "nearest"),
    [
        ([], 3, "8, 16"),
        ([], 39, "32, 48"),  # 40 are whole replicas, but their data axis of 5 does not divide the batch
        ([], 9999, "6144"),
        (["parallel.tensor=6"], 8, "6, 12"),
        (["train.global_batch_size=7"], 3, "none for this batch: change train.global_batch_size"),
    ],
)
def test_nodes_that_hold_no_whole_replicas_are_refused_with_good_ones(overrides, nodes, nearest):
    with pytest.raises(UsageError, match=rf"--nodes {nodes} are {8 * nodes} devices, not divisible by .*; nearest: {nearest}$"):
        resolve("gpt-175b", overrides, "h100", nodes)


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("parallel.remat=full  model.block=serial", ["parallel.remat=full", "model.block=serial"]),
        ("model.window=[768, full] parallel.remat=full", ["model.window=[768, full]", "parallel.remat=full"]),
        ("'model.window=[768, full]' parallel.remat=full", ["model.window=[768, full]", "parallel.remat=full"]),
        ("full", ["full"]),
    ],
)
def test_overrides_of_the_other_plan_are_split_as_a_shell_does(text, overrides):
    assert split_overrides(text) == overrides


def test_quote_that_does_not_end_is_refused():
    with pytest.raises(UsageError, match="No closing quotation; expected overrides such as"):
        split_overrides("model.window='[768, full]")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "h100", "--compare", "system=a100"), "system=a100 and --target h100 decide the same thing"),
        (("--nodes", "1536", "--compare", "parallel.data=96"), "parallel.data=96 and --nodes 1536 decide the same thing"),
        (("--compare", "parallel.remat=none"), "--compare 'parallel.remat=none' changes nothing"),
    ],
)
def test_plan_is_not_compared_with_itself(arguments, message):
    with pytest.raises(UsageError, match=message):
        run("gpt-175b", *arguments)

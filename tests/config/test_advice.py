"""Advice for a plan that is too large: what is still to be had, in values that are accepted."""

import pytest

from megascale_jax.config.advice import advice_on_memory
from megascale_jax.config.load import load_experiment

LARGEST = [
    "parallel.pipe=1",
    "parallel.data=8",
    "parallel.tensor=4",
    "train.global_batch_size=8",
    "parallel.remat=full",
    "parallel.micro_batch_size=1",
]


def advice(name, *overrides):
    return advice_on_memory(load_experiment(name, overrides))


def test_advice_is_built_from_the_plan():
    assert advice("gpt-1b", "parallel.micro_batch_size=6", "train.global_batch_size=96") == [
        "parallel.remat=selective or full (residuals)",
        "parallel.micro_batch_size=4 (residuals and activations)",
        "parallel.tensor=2 (everything, on 16 devices)",
        "parallel.pipe=2 (all of the state, on 16 devices)",
        "parallel.data=16 (masters and moments, on 16 devices)",
    ]


def test_nothing_is_advised_that_the_plan_has_already():
    assert advice("quickstart", *LARGEST) == []
    assert advice("gpt-1b", "parallel.remat=selective")[0] == "parallel.remat=full (residuals)"
    assert "remat" not in "".join(advice("gpt-1b", "parallel.remat=full"))
    assert "tensor" not in "".join(advice("gpt-175b", "system=h100")), "all devices of a node are taken"


@pytest.mark.parametrize(
    "overrides", [["system=h100"], ["system=h100", "parallel.pipe=2", "parallel.micro_batch_size=4", "system.memory_gib=999"]]
)
def test_every_advice_is_accepted(overrides):
    given = advice("gpt-175b", *overrides)
    assert len(given) >= 3
    for line in given:
        changes = line.partition(" (")[0].replace("selective or ", "").split()
        load_experiment("gpt-175b", [*overrides, *changes])

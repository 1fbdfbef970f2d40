"""Operators follow the target of a run, not this host; an explicit one that cannot run there is refused."""

from typing import Any

import pytest

from megascale_jax.config.schema import KernelConfig, SystemConfig
from megascale_jax.errors import ConfigError
from megascale_jax.kernels.dispatch import attention_choices, select
from megascale_jax.kernels.target import Target
from tests.build import experiment

GPU = SystemConfig(platform="gpu", device="NVIDIA H100", compute_capability=90)


@pytest.mark.parametrize("chosen", ["auto", "triton", "reference"])
def test_operators_are_bound_to_the_target_and_the_choice(chosen):
    kernels = KernelConfig(**dict.fromkeys(("attention", "norm", "activation", "loss"), chosen), max_documents=4)
    operators = select(experiment().model, GPU.model_copy(update={"kernels": kernels}))
    names = ("attention_forward", "attention_backward", "add_norm", "activate", "activate_backward", "loss_statistics", "loss_gradient")
    bound: list[Any] = [getattr(operators, name) for name in names]
    for operator in bound:
        assert operator.keywords["target"] == Target("gpu", 90, 4)
        assert operator.keywords["implementation"] == (None if chosen == "auto" else chosen)


@pytest.mark.parametrize(
    ("operator", "chosen", "reason"),
    [
        ("attention", "cudnn", "cuDNN runs on GPUs"),
        ("attention", "triton", "Triton kernels run on GPUs"),
        ("norm", "triton", "TRITON_INTERPRET=1"),
    ],
)
def test_explicit_operator_that_cannot_run_on_the_target_is_refused(monkeypatch, operator, chosen, reason):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    system = SystemConfig(platform="cpu", device="CPU", kernels=KernelConfig(**{operator: chosen}))
    with pytest.raises(ConfigError, match=f"system.kernels.{operator} is {chosen}, which cannot run on CPU: .*{reason}"):
        select(experiment().model, system)


def test_each_window_of_a_model_has_its_own_choice(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = experiment(1, 1, head_size=64, window=(3, "full"), train={"compute_dtype": "bfloat16"})
    assert attention_choices(config.model_copy(update={"system": GPU})) == {3: "triton", None: "cudnn"}
    assert attention_choices(config) == {3: "reference", None: "reference"}

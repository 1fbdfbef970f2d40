"""Settings for GPUs: each taken by the installed jaxlib, none forced on what the user has set."""

import jax
import pytest

from megascale_jax.comm import flags
from megascale_jax.comm.flags import (
    Setting,
    known_step_options,
    nccl_variables,
    prepare_process,
    process_flags,
    refused_flags,
    step_settings,
)
from megascale_jax.config.schema import LimitsConfig, SystemConfig
from megascale_jax.train.step import _compiles

CPU, GPU = SystemConfig(platform="cpu", device="CPU"), SystemConfig(platform="gpu", device="H100", limits=LimitsConfig(execution_s=1700))
STRANGE = Setting("xla_gpu_no_such_flag", 1, "to be refused")


def test_nothing_is_set_for_cpus():
    environment = {"XLA_FLAGS": "--xla_x"}
    assert prepare_process(CPU, environment) == () and environment == {"XLA_FLAGS": "--xla_x"}
    assert known_step_options(CPU, _compiles) == {}


def test_installed_jaxlib_takes_every_flag_and_says_which_it_does_not_know():
    assert refused_flags([*process_flags(GPU), STRANGE]) == {STRANGE.name}


def test_installed_jaxlib_takes_every_step_option():
    assert known_step_options(GPU, _compiles) == {setting.name: setting.value for setting in step_settings(GPU)}


def test_unknown_settings_are_left_out_with_their_reason(monkeypatch):
    first = step_settings(GPU)[0].name
    with pytest.warns(UserWarning, match=f"does not take {first}, left out; what it is for: moves starts"):
        assert first not in known_step_options(GPU, lambda options: first not in options)
    monkeypatch.setattr(flags, "refused_flags", lambda flags: {"xla_gpu_execution_terminate_timeout"})
    environment = {}
    with pytest.warns(UserWarning, match="xla_gpu_execution_terminate_timeout"):
        prepare_process(GPU, environment)
    assert "execution_terminate" not in environment["XLA_FLAGS"] and "nccl_init_max_rank" in environment["XLA_FLAGS"]


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setattr(flags, "refused_flags", lambda flags: set())
    environment = {"XLA_FLAGS": "--xla_gpu_execution_terminate_timeout=60s", "NCCL_IB_TIMEOUT": "18"}
    done = {setting.name for setting in prepare_process(GPU, environment)}
    assert environment["XLA_FLAGS"].startswith("--xla_gpu_execution_terminate_timeout=60s --xla_gpu_first")
    assert environment["XLA_FLAGS"].count("execution_terminate_timeout") == 1
    assert environment["NCCL_IB_TIMEOUT"] == "18" and environment["NCCL_IB_RETRY_CNT"] == "7"
    assert done.isdisjoint({"xla_gpu_execution_terminate_timeout", "NCCL_IB_TIMEOUT"})


def test_step_options_that_the_user_has_set_are_left_to_the_environment():
    first, *others = [setting.name for setting in step_settings(GPU)]
    tried = []
    environment = {"XLA_FLAGS": f"--xla_x --{first}=false --{others[0]}_longer=1"}
    assert list(known_step_options(GPU, lambda options: tried.append(set(options)) or True, environment)) == others
    assert tried == [set(others)]
    everything = {"XLA_FLAGS": " ".join(setting.as_flag for setting in step_settings(GPU))}
    assert known_step_options(GPU, _compiles, everything) == {}


def test_limits_of_the_system_file_reach_the_flags():
    assert "--xla_gpu_execution_terminate_timeout=1700s" in [flag.as_flag for flag in process_flags(GPU)]
    assert {variable.name: variable.value for variable in nccl_variables(GPU)}["NCCL_IB_TIMEOUT"] == 22
    assert all(len(setting.reason) > 20 for setting in (*step_settings(GPU), *process_flags(GPU), *nccl_variables(GPU)))


def test_child_that_fails_for_another_reason_refuses_all(monkeypatch):
    monkeypatch.setattr(flags.sys, "executable", "/bin/false")
    assert refused_flags(process_flags(GPU)) == {flag.name for flag in process_flags(GPU)}


def test_a_failing_compiler_is_not_taken_for_an_unknown_option(monkeypatch):
    def broken(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: no driver")

    monkeypatch.setattr(jax.stages.Lowered, "compile", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no driver"):
        known_step_options(GPU, _compiles)

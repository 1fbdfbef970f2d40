"""The checks that compute, on this process's virtual CPU devices, and a pair of real processes."""

import threading

import jax.numpy as jnp
import pytest

from megascale_jax.cluster.diagnose import on_devices
from megascale_jax.cluster.diagnose.checks import DIGEST
from megascale_jax.cluster.diagnose.request import Options, PairTask
from megascale_jax.cluster.diagnose.run import run_checks
from megascale_jax.cluster.ports import free_ports


@pytest.mark.parametrize(("check", "unit"), [(on_devices.gemm, "TFLOP/s"), (on_devices.copy, "GB/s"), (on_devices.all_to_all, "GB/s")])
def test_rates_are_positive_and_name_their_device(check, unit):
    found = check()
    assert found.status == "pass" and found.facts["device"] == "cpu"
    assert all(number.value > 0 and number.unit == unit for number in found.numbers)


def product(a, b):
    return jnp.matmul(a, b).astype(jnp.int32)


def test_the_bits_of_the_product_are_the_same_in_any_order_of_summation():
    first = on_devices.corruption()
    half = 200  # sums two parts one after the other

    def in_parts(a, b):
        return (jnp.matmul(a[:, half:], b[half:]) + jnp.matmul(a[:, :half], b[:half])).astype(jnp.int32)

    second = on_devices.corruption(in_parts)
    assert first.status == second.status == "pass" and first.facts[DIGEST] == second.facts[DIGEST]


def test_one_wrong_bit_of_a_product_is_found_and_so_is_one_that_comes_and_goes():
    always = on_devices.corruption(lambda a, b: product(a, b).at[7, 9].add(1))
    assert always.status == "fail" and "1 of 512 rows of a product are wrong" in always.reason and "differ" not in always.reason
    calls = []

    def at_times(a, b):
        calls.append(1)
        return product(a, b).at[7, 9].add(1 if len(calls) == 4 else 0)

    rare = on_devices.corruption(at_times)
    assert rare.status == "fail" and "1 of 10 repetitions of a product differ" in rare.reason and "wrong" not in rare.reason


def test_the_platform_follows_the_driver_and_the_environment(tmp_path):
    assert on_devices.platform_here({}, tmp_path) == "cpu"
    (tmp_path / "nvidiactl").touch()
    assert on_devices.platform_here({}, tmp_path) == "cpu"
    (tmp_path / "nvidia0").touch()
    assert on_devices.platform_here({}, tmp_path) == "gpu" and on_devices.platform_here({"JAX_PLATFORMS": "cpu"}, tmp_path) == "cpu"


def test_two_processes_reduce_over_gloo_and_a_lone_one_is_ended_at_its_limit(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    coordinator = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    found = {}

    def run(index, limit_s):
        task = PairTask.model_validate({"round": 1, "index": index, "peer": "ab"[1 - index], "coordinator": coordinator})
        (found[index],) = run_checks(["pair"], Options(pair=task, cpu_devices=1), limit_s=limit_s)

    threads = [threading.Thread(target=run, args=(index, 90)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [found[index].status for index in (0, 1)] == ["pass", "pass"], found
    assert found[0].facts == {"device": "cpu", "round": "1", "peer": "b"} and found[0].numbers[0].unit == "GB/s"
    run(0, 4)
    assert found[0].status == "fail" and "did not end within 4 s" in found[0].reason and found[0].facts["peer"] == "b"

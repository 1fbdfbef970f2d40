"""The checklist of a deployment, against numbers reckoned by other ways."""

from math import exp, factorial

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megascale_jax.config.fleet import Fleet
from megascale_jax.config.load import load_document, load_experiment
from megascale_jax.config.memory import GIB, state_bytes
from megascale_jax.model.flops import count_parameters
from megascale_jax.sim.capacity import checklist, checkpoint_bytes, spares_for
from megascale_jax.sim.forecast import Wanted, case_for

FLEET = load_document("fleet", "megascale", Fleet)
WANTED = Wanted(days=10, step_s=6.34, spares=16)


def answers(*overrides: str, host_memory_gib: float | None = None, spares: int = 16):
    experiment = load_experiment("gpt-175b", list(overrides))
    case = case_for(experiment, FLEET, Wanted(days=10, step_s=6.34, spares=spares), 6.34)
    return experiment, {one.question: one for one in checklist(experiment, FLEET, case, host_memory_gib)}


def test_sizes_are_those_of_the_state():
    experiment, found = answers()
    size = 12 * count_parameters(experiment.model)
    assert checkpoint_bytes(experiment) == size
    assert found["size of a checkpoint"].value == pytest.approx(size / 1e9)
    left = found["device memory left for buffers"]
    activations = left.inputs["activations_gib"]
    assert isinstance(activations, float) and activations > 1
    assert left.value == pytest.approx(79.2 - state_bytes(experiment).total / GIB - activations) and left.is_ok
    assert answers("system.memory_gib=20")[1]["device memory left for buffers"].is_ok is False
    assert found["room for checkpoints on storage"].value == pytest.approx(3 * size / 1e12)
    assert answers("train.checkpoint.keep_every=1000")[1]["room for checkpoints on storage"].value == pytest.approx((3 + 23) * size / 1e12)


def test_host_memory_is_checked_only_when_it_is_known():
    name = "host memory of a node for two-stage checkpoints"
    experiment, found = answers()
    assert found[name].value * GIB == pytest.approx(4 * checkpoint_bytes(experiment) / 1536)
    assert found[name].is_ok is None
    assert answers(host_memory_gib=1000.0)[1][name].is_ok is True
    assert answers(host_memory_gib=1.0)[1][name].is_ok is False


def test_storage_must_take_a_save_before_the_next_one():
    experiment, found = answers()
    save = found["write bandwidth of the storage, least"]
    assert save.value == pytest.approx(checkpoint_bytes(experiment) / 634 / 1e9) and save.is_ok
    assert answers("train.checkpoint.every=5")[1]["write bandwidth of the storage, least"].is_ok is False


def test_broadcast_reads_once_what_a_data_group_shares():
    experiment, found = answers()
    once = found["restore from storage, one reader of each data group"].value
    assert once == pytest.approx(checkpoint_bytes(experiment) / 40e9)
    assert found["the same if every rank reads what its group shares"].value == pytest.approx(192 * once)


def test_every_answer_has_its_formula_and_inputs():
    _, found = answers()
    assert len(found) == 13
    assert all(one.formula and one.inputs and one.unit for one in found.values())


def test_too_few_spares_are_said():
    name = "spares so that one is there 99 % of the time"
    enough = answers()[1][name]
    assert enough.is_ok and answers(spares=int(enough.value))[1][name].is_ok
    assert answers(spares=int(enough.value) - 1)[1][name].is_ok is False


@given(st.floats(0.01, 60.0), st.floats(0.5, 0.999))
def test_spares_are_the_quantile_of_a_poisson_number(mean, availability):
    def chance(most: int) -> float:
        return sum(exp(-mean) * mean**k / factorial(k) for k in range(most + 1))

    spares = spares_for(mean, availability)
    assert chance(spares) >= availability - 1e-12
    assert spares == 0 or chance(spares - 1) < availability + 1e-12


def test_spares_of_huge_fleets_go_on_without_a_jump():
    assert spares_for(0.0, 0.99) == 0
    assert abs(spares_for(501.0, 0.99) - spares_for(499.0, 0.99)) <= 4


def test_network_volumes_follow_the_layout():
    def volume(*overrides: str) -> dict[str, float]:
        return {question.split()[0]: one.value for question, one in answers(*overrides)[1].items() if "volume" in question}

    base, serial = volume(), volume("model.block=serial")
    assert serial["tensor-parallel"] == pytest.approx(2 * base["tensor-parallel"], rel=1e-6)
    assert serial["pipeline"] == base["pipeline"]
    # 32 rows a device, 6 chunks, 2,048 x 12,288 x 2 bytes over 8 tensor ranks, both passes
    assert base["pipeline"] == pytest.approx(2 * 32 * 6 * 2048 * 12288 * 2 / 8 / 1e9)
    assert base["data-parallel"] == pytest.approx(count_parameters(load_experiment("gpt-175b").model) / 64 * 6 * 191 / 192 / 1e9, rel=1e-3)

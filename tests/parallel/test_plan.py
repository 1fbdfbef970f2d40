"""The plan: devices, stored form, initial values that no layout changes, collectives that we wrote and no others."""

import re

import jax
import numpy as np
import pytest

from megascale_jax.config.layout import MeshShape
from megascale_jax.config.schema import KernelConfig, SystemConfig
from megascale_jax.errors import ConfigError, DataError
from megascale_jax.parallel.mesh import make_mesh
from megascale_jax.train.saved import named_arrays, named_state
from megascale_jax.train.state import abstract_state, initial_state
from megascale_jax.train.step import make_steps, place_batch
from tests.build import experiment, logical, plan_of, random_batch


def test_mesh_larger_than_the_devices_is_refused():
    with pytest.raises(ConfigError, match=r"pipe 1 x data 3 x tensor 4 needs 12 devices, found 8"):
        make_mesh(MeshShape(1, 3, 4), jax.devices())


def test_tensor_neighbours_are_adjacent_devices():
    mesh = make_mesh(MeshShape(1, 2, 4), jax.devices())
    assert [[device.id for device in row] for row in mesh.devices[0]] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture(scope="module")
def states():
    made = {}
    for mesh in [(1, 1, 1), (1, 4, 2), (2, 2, 2)]:
        pipe, data, tensor = mesh
        layers = (2, 1) if pipe == 2 else None
        config = experiment(
            data, tensor, num_layers=3, window=3, parallel={"pipe": pipe, "layers": layers}, train={"global_batch_size": 16}
        )
        plan = plan_of(config)
        optimizer = make_steps(config, plan).optimizer
        made[mesh] = plan, optimizer, initial_state(plan, optimizer, 0)
    return made


def test_initial_values_are_the_same_on_every_mesh(states):
    one, *others = (logical(plan, state.params) for plan, _, state in states.values())
    for many in others:
        assert one.keys() == many.keys()
        for name, value in one.items():
            np.testing.assert_allclose(value, many[name], rtol=1e-6, atol=1e-7)
    assert np.std(one["q"]) == pytest.approx(0.2, rel=0.1)
    assert np.std(one["o"]) == pytest.approx(0.2 / 6**0.5, rel=0.1)
    assert not np.array_equal(one["k"], one["v"])
    assert not np.array_equal(one["q"][0], one["q"][1])


@pytest.mark.parametrize("mesh", [(1, 4, 2), (2, 2, 2)], ids=["one-stage", "uneven-stages"])
def test_logical_form_has_no_pads_and_returns_to_the_same_arrays(states, mesh):
    plan, _, state = states[mesh]
    logical = jax.jit(plan.to_logical)(state.params)
    assert logical["embedding"].shape == (61, 34)
    assert logical["q"].shape == (3, 34, 8, 4)
    back = jax.jit(plan.from_logical)(logical)
    jax.tree.map(np.testing.assert_array_equal, back, state.params)


@pytest.mark.parametrize("mesh", [(1, 4, 2), (2, 2, 2)], ids=["one-stage", "uneven-stages"])
def test_named_arrays_make_the_same_state(states, mesh):
    plan, optimizer, state = states[mesh]
    back = named_state(plan, optimizer, named_arrays(state))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_abstract_state_describes_the_real_one(states):
    plan, optimizer, state = states[1, 4, 2]
    jax.tree.map(
        lambda wanted, leaf: np.testing.assert_equal(
            (wanted.shape, wanted.dtype, wanted.sharding), (leaf.shape, leaf.dtype, leaf.sharding)
        ),
        abstract_state(plan, optimizer),
        state,
    )


def collectives_of_evaluation(num_layers):
    """Gathers and scatters of whole activations in the program of a forward pass, one chunk of so many layers."""
    config = experiment(1, 2, num_layers=num_layers, window=tuple(range(2, 2 + num_layers)))
    plan = plan_of(config)
    steps = make_steps(config, plan)
    batch = {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in random_batch(config).items()}
    text = steps.evaluate.lower(abstract_state(plan, steps.optimizer).params, batch).as_text()
    tokens, width = config.parallel.micro_batch_size * config.model.sequence_length, config.model.hidden_size
    gathered = re.findall(rf"stablehlo\.all_gather.*?-> tensor<1x{tokens}x{width}xf32>", text)
    scattered = re.findall(rf'"stablehlo\.reduce_scatter".*?-> tensor<1x{tokens // 2}x{width}xf32>', text, re.DOTALL)
    return len(gathered), len(scattered)


def test_forward_pass_has_one_gather_and_one_scatter_of_activations_per_parallel_block():
    """Beside the block's: the head's gather, the embedding's scatter, and both of the first input, which is made before all ticks."""
    assert collectives_of_evaluation(1) == (1 + 1 + 1, 1 + 1 + 1)
    assert collectives_of_evaluation(3) == (3 + 1 + 1, 3 + 1 + 1)


def test_rows_of_more_documents_than_the_target_has_room_for_are_refused():
    config = experiment(1, 2, head_size=8, train={"compute_dtype": "bfloat16"})
    kernels = KernelConfig(attention="cudnn", max_documents=2)
    system = SystemConfig(platform="gpu", device="NVIDIA H100", kernels=kernels, compute_capability=90)
    plan = plan_of(config.model_copy(update={"system": system}))
    batch = random_batch(config)
    with pytest.raises(DataError, match=r"a row holds \d+ documents, cuDNN attention has room for 2; raise system.kernels.max_documents"):
        place_batch(plan, batch)
    batch["segment_ids"] = np.minimum(batch["segment_ids"], 2)
    assert place_batch(plan, batch)["tokens"].shape == batch["tokens"].shape

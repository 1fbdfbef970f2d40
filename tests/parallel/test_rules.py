"""The sharding table and the layouts derived from it."""

import pytest
from jax.sharding import PartitionSpec as P

from megascale_jax import axes
from megascale_jax.config.layout import Layout, MeshShape
from megascale_jax.errors import ConfigError
from megascale_jax.model.parameters import parameter_specs
from megascale_jax.parallel.rules import RULES, array_layout, axes_of
from tests.build import experiment


def layout_of(config):
    return Layout.of(config.model, config.parallel)


def test_one_axis_for_two_dims_is_refused():
    with pytest.raises(ConfigError, match="mesh axis 'tensor' for two dims"):
        axes_of((axes.HEADS, axes.MLP))
    with pytest.raises(ConfigError, match="mesh axis 'data'"):
        axes_of((axes.EMBED, axes.HEAD_DIM), dict(RULES) | {axes.HEAD_DIM: (axes.DATA,)})


def test_layer_parameter_is_stacked_and_split_over_all_axes():
    config = experiment(4, 2)
    array = array_layout(parameter_specs(config.model)["q"], layout_of(config))
    assert array.shape == (1, 2, 2, 36, 8, 4), "two chunks of the window pattern's two layers"
    assert array.partition == P(("pipe",), None, None, ("data",), ("tensor",), None)
    assert array.local_shape({"pipe": 1, "data": 4, "tensor": 2}) == (1, 2, 2, 9, 4, 4)


def test_vocabulary_and_width_are_padded_to_what_splits_them():
    config = experiment(4, 2)
    array = array_layout(parameter_specs(config.model)["embedding"], layout_of(config))
    assert array.shape == (62, 36), "61 ids to tensor x pipe = 2, width 34 to data 4"
    assert array.mesh_axes == {"pipe", "data", "tensor"}


def test_coordinates_count_tensor_fastest():
    mesh = MeshShape(pipe=2, data=3, tensor=4)
    assert list(mesh.by_axis.items()) == [("pipe", 2), ("data", 3), ("tensor", 4)]
    assert [mesh.coordinates(rank) for rank in (0, 1, 4, 12, 23)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 2, 3)]

"""The device mesh: ``pipe`` outermost, ``tensor`` innermost, so that a tensor group stays inside one node."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from megascale_jax import axes
from megascale_jax.config.layout import MeshShape
from megascale_jax.errors import ConfigError


def make_mesh(shape: MeshShape, devices: Sequence[Any]) -> Mesh:
    """A mesh over the first ``shape.size`` of ``devices`` (``jax.devices()``, or those of a topology), in their order.

    Raises ConfigError when there are fewer devices than the mesh needs.
    """
    if len(devices) < shape.size:
        raise ConfigError(
            f"mesh pipe {shape.pipe} x data {shape.data} x tensor {shape.tensor} needs {shape.size} devices, "
            f"found {len(devices)}; lower parallel.data or start more processes"
        )
    grid = np.array(devices[: shape.size], dtype=object).reshape(shape.pipe, shape.data, shape.tensor)
    return Mesh(grid, axes.MESH_AXES, axis_types=(AxisType.Auto,) * len(axes.MESH_AXES))

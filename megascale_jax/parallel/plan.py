"""From a configuration to a step: the one place where the techniques are put together, in this order.

1. mesh      ``pipe x data x tensor`` over the given devices;
2. ZeRO-2    fp32 masters sharded over ``data``; weights gathered before use, gradients scattered after;
3. tensor    layers get the two fused operations of the tensor axis, and widths of one rank;
4. pipeline  the executor runs the micro-batches through this rank's chunks, keeping or recomputing their activations.

All of it runs inside one ``jax.shard_map`` that is manual over all three axes: every collective of the compiled
program is one that this package wrote.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megascale_jax import axes
from megascale_jax.config.layout import Layout
from megascale_jax.config.schema import Experiment
from megascale_jax.config.stages import EMPTY
from megascale_jax.kernels.clock.api import Clock
from megascale_jax.kernels.dispatch import attention_choices, select
from megascale_jax.kernels.target import Target
from megascale_jax.model.transformer import Transformer
from megascale_jax.parallel.mesh import make_mesh
from megascale_jax.parallel.pipeline.interleaved import Pipeline
from megascale_jax.parallel.ring import RingTensorParallel
from megascale_jax.parallel.tensor import TensorParallel
from megascale_jax.parallel.zero import ZeroSharding

BATCH_PARTITION = PartitionSpec(None, axes.DATA, None)
"""Batches are ``[m, B, S]``: rows split over ``data``, the same for all tensor and pipe ranks of one data index."""
DEVICE_PARTITION = PartitionSpec(axes.MESH_AXES)
"""One number, or row of numbers, per device."""


@dataclass(frozen=True)
class Plan:
    """The parallel parts of a run, ready to be joined with an optimizer."""

    experiment: Experiment
    layout: Layout
    mesh: Mesh
    zero: ZeroSharding
    executor: Pipeline

    @cached_property
    def most_documents(self) -> int | None:
        """Documents of a row that attention has room for; ``None``: any number."""
        packed = "cudnn" in attention_choices(self.experiment).values()
        return self.experiment.system.kernels.max_documents if packed else None

    def sharding(self, partition: PartitionSpec) -> NamedSharding:
        """A partition on this plan's mesh."""
        return NamedSharding(self.mesh, partition)

    def shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """``function`` of local shards as a function of global arrays, manual over all axes."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def initial_parameters(self, key: jax.Array) -> dict[str, jax.Array]:
        """Initial fp32 parameters as padded, stacked global arrays; inside ``jit``.

        Values depend on the key, the parameter's name and the layer's number, not on the mesh (but for the last bit, where
        another sharding is compiled to other instructions).
        """
        values = {}
        for name, spec in self.zero.specs.items():
            shape = self.logical_shape(name)
            if spec.init == "normal":
                values[name] = spec.std * jax.random.normal(jax.random.fold_in(key, _stable_number(name)), shape, jnp.float32)
            else:
                values[name] = jnp.full(shape, 1.0 if spec.init == "ones" else 0.0, jnp.float32)
        return self.from_logical(values)

    def logical_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter as it is stored: layers in order in front, no pads."""
        spec = self.zero.specs[name]
        return (self.experiment.model.num_layers, *spec.shape) if spec.per_layer else spec.shape

    def logical_partition(self, name: str) -> PartitionSpec:
        """How the stored form is spread while it is written or read: as the step's, where the sizes divide."""
        spec, sizes = self.zero.specs[name], dict(self.mesh.shape)
        entries = []
        for size, dim_axes in zip(spec.shape, self.zero.arrays[name].dim_axes[-len(spec.shape) :], strict=True):
            ways = math.prod(sizes[axis] for axis in dim_axes)
            entries.append(dim_axes or None if size % ways == 0 else None)
        return PartitionSpec(*([None] if spec.per_layer else []), *entries)

    def to_logical(self, tree: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Padded, stacked arrays as they are stored: ``[layer, ...]`` without pads; inside ``jit``."""
        result = {}
        for name, value in tree.items():
            spec = self.zero.specs[name]
            if spec.per_layer:
                value = value.reshape(-1, *value.shape[3:])[self._places]
            value = jax.lax.slice(value, (0,) * value.ndim, self.logical_shape(name))
            result[name] = jax.lax.with_sharding_constraint(value, self.sharding(self.logical_partition(name)))
        return result

    def from_logical(self, tree: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The inverse of `to_logical`; pads are zero."""
        result = {}
        for name, value in tree.items():
            array = self.zero.arrays[name]
            if self.zero.specs[name].per_layer:
                stacked = jnp.zeros((math.prod(self.layout.stack_shape), *value.shape[1:]), value.dtype).at[self._places].set(value)
                value = stacked.reshape(*self.layout.stack_shape, *value.shape[1:])
            padding = [(0, whole - size) for size, whole in zip(value.shape, array.shape, strict=True)]
            result[name] = jax.lax.with_sharding_constraint(jnp.pad(value, padding), self.sharding(array.partition))
        return result

    @property
    def _places(self) -> np.ndarray:
        """Of every layer, in order, its place in the flattened ``[stage, chunk, layer]``."""
        table = np.array(self.layout.stages.table).ravel()
        return np.argsort(table, kind="stable")[np.count_nonzero(table == EMPTY) :]

    @property
    def data_indices(self) -> tuple[int, ...]:
        """Data-parallel indices whose rows this process feeds."""
        mine = {index[1] for index, device in np.ndenumerate(self.mesh.devices) if device.process_index == jax.process_index()}
        return tuple(sorted(mine))


def make_plan(experiment: Experiment, devices: Sequence[Any]) -> Plan:
    """The plan of a checked experiment on ``devices``.

    Raises ConfigError when the mesh needs more devices, or other ones than the target's, or an operator cannot run on the target.
    """
    target = Target.of(experiment.system)
    target.check(devices)
    model, parallel = experiment.model, experiment.parallel
    layout = Layout.of(model, parallel)
    mesh = make_mesh(layout.mesh, devices)
    zero = ZeroSharding(model, layout, jnp.dtype(experiment.train.compute_dtype))
    communication = RingTensorParallel() if parallel.tensor_overlap == "ring" else TensorParallel()
    transformer = Transformer(model, select(model, experiment.system), communication, zero.columns)
    clock = Clock(target, axes.MESH_AXES) if experiment.train.events.enabled and experiment.train.events.stamps else None
    return Plan(experiment, layout, mesh, zero, Pipeline(transformer, layout, parallel, zero, clock))


def _stable_number(name: str) -> int:
    """A number below 2**31 that identifies a parameter name for ever."""
    value = 0
    for byte in name.encode():
        value = (value * 257 + byte) % (2**31 - 1)
    return value

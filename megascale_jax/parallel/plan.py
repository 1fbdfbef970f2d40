"""From a configuration to a step: the one place where the techniques are put together, in this order.

1. mesh      ``pipe x data x tensor`` over the given devices;
2. ZeRO-2    fp32 masters sharded over ``data``; weights gathered before use, gradients scattered after;
3. tensor    layers get the two fused operations of the tensor axis, and widths of one rank;
4. remat     a block's activations are kept or recomputed;
5. pipeline  the executor runs the micro-batches through this rank's chunks.

All of it runs inside one ``jax.shard_map`` that is manual over all three axes: every collective of the compiled
program is one that this package wrote.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megascale_jax import axes
from megascale_jax.config.layout import Layout
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import ConfigError
from megascale_jax.kernels.dispatch import select
from megascale_jax.model.transformer import Transformer
from megascale_jax.parallel.mesh import make_mesh
from megascale_jax.parallel.pipeline.executor import OneStage
from megascale_jax.parallel.tensor import TensorParallel
from megascale_jax.parallel.zero import ZeroSharding

BATCH_PARTITION = PartitionSpec(None, axes.DATA, None)
"""Batches are ``[m, B, S]``: rows split over ``data``, the same for all tensor and pipe ranks of one data index."""
VOTE_PARTITION = PartitionSpec(axes.MESH_AXES)
"""One number per device."""


@dataclass(frozen=True)
class Plan:
    """The parallel parts of a run, ready to be joined with an optimizer."""

    experiment: Experiment
    layout: Layout
    mesh: Mesh
    zero: ZeroSharding
    executor: OneStage

    def sharding(self, partition: PartitionSpec) -> NamedSharding:
        """A partition on this plan's mesh."""
        return NamedSharding(self.mesh, partition)

    def shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """``function`` of local shards as a function of global arrays, manual over all axes."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def initial_parameters(self, key: jax.Array) -> dict[str, jax.Array]:
        """Initial fp32 parameters as padded, stacked global arrays; inside ``jit``.

        Values depend on the key, the parameter's name and the layer's number alone, not on the mesh.
        """
        return {name: self._initial(name, jax.random.fold_in(key, _stable_number(name))) for name in self.zero.specs}

    def _initial(self, name: str, key: jax.Array) -> jax.Array:
        spec, array = self.zero.specs[name], self.zero.arrays[name]
        pipe, chunks, depth = self.layout.stack_shape
        lead = (chunks, pipe, depth) if spec.per_layer else ()
        if spec.init == "normal":
            value = spec.std * jax.random.normal(key, lead + spec.shape, jnp.float32)
        else:
            value = jnp.full(lead + spec.shape, 1.0 if spec.init == "ones" else 0.0, jnp.float32)
        value = value.swapaxes(0, 1) if spec.per_layer else value
        padding = [(0, whole - size) for size, whole in zip(value.shape, array.shape, strict=True)]
        return jax.lax.with_sharding_constraint(jnp.pad(value, padding), self.sharding(array.partition))


def make_plan(experiment: Experiment, devices: Sequence[jax.Device]) -> Plan:
    """The plan of a checked experiment on ``devices``.

    Raises ConfigError when the mesh needs more devices, an operator cannot run on the target, or ``pipe`` exceeds 1.
    """
    model, parallel = experiment.model, experiment.parallel
    if parallel.pipe > 1:
        raise ConfigError(
            f"parallel.pipe is {parallel.pipe}: this version runs one pipeline stage; set parallel.pipe=1 "
            "parallel.virtual_stages=1 and use tensor and data"
        )
    layout = Layout.of(model, parallel)
    mesh = make_mesh(layout.mesh, devices)
    zero = ZeroSharding(model, layout, jnp.dtype(experiment.train.compute_dtype))
    transformer = Transformer(
        model, select(model, experiment.system), TensorParallel(), zero.columns, remat=parallel.remat == "full"
    )
    return Plan(experiment, layout, mesh, zero, OneStage(transformer))


def _stable_number(name: str) -> int:
    """A number below 2**31 that identifies a parameter name for ever."""
    value = 0
    for byte in name.encode():
        value = (value * 257 + byte) % (2**31 - 1)
    return value

"""ZeRO-2: fp32 masters sharded over ``data``, whole weights only while a step computes, gradients scattered back.

``gather`` turns this rank's logical shards into the fused operands of the model (cast to the compute type first, so
half the bytes travel); ``scatter`` adds up the operands' gradients over the ranks and cuts them back into logical
shards. Both exist for everything at once, for the small operands alone, and piece by piece for the *matrices* of the
layers, nearly all of the bytes: a matrix of one layer is ``[n, L]`` there, ``n`` data ranks' rows, each flattened to ``L``
elements (rows times columns), so that any range of ``L`` can move by itself.

The sums of squares count every logical element once, whatever is stacked, padded, fused or replicated:
pads are zero from the start and stay zero, since their gradients are.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from megascale_jax import axes
from megascale_jax.config.layout import Layout
from megascale_jax.config.schema import ModelConfig
from megascale_jax.model.parameters import FusedGroup, end_groups, fused_groups, parameter_specs
from megascale_jax.parallel.rules import array_layout

Shards = dict[str, jax.Array]


class ZeroSharding:
    """The map between logical shards and compute weights; every method but the constructor runs inside ``shard_map``."""

    def __init__(self, model: ModelConfig, layout: Layout, compute_dtype: jnp.dtype):
        self.model, self.layout, self.compute_dtype = model, layout, compute_dtype
        self.specs = parameter_specs(model)
        self.arrays = {name: array_layout(spec, layout) for name, spec in self.specs.items()}
        self.layer_groups, self.end_groups = fused_groups(model), end_groups(model)
        self.local_shapes = {name: array.local_shape(layout.mesh.by_axis) for name, array in self.arrays.items()}

    @property
    def partitions(self) -> dict[str, PartitionSpec]:
        """Partition of every logical parameter."""
        return {name: array.partition for name, array in self.arrays.items()}

    @property
    def columns(self) -> dict[str, int]:
        """One tensor rank's width of every layer parameter."""
        return {name: spec.columns(self.local_shapes[name][3:]) for name, spec in self.specs.items() if spec.per_layer}

    @property
    def matrices(self) -> dict[str, FusedGroup]:
        """The layers' groups that move chunk by chunk."""
        return {group.name: group for group in self.layer_groups if group.has_embed and group.name != "vectors"}

    def gather(self, params: Shards) -> dict[str, Shards]:
        """Compute weights of this rank: ``{"ends": {...}, "layers": {group: [chunk, layer, D, F]}}``."""
        weights = self.gather_small(params)
        return weights | {"layers": weights["layers"] | {name: self._gather_layers(g, params) for name, g in self.matrices.items()}}

    def gather_small(self, params: Shards) -> dict[str, Shards]:
        """`gather` without the matrices."""
        return {
            "ends": {group.name: self._gather_end(group, params) for group in self.end_groups},
            "layers": {group.name: self._gather_layers(group, params) for group in self.layer_groups if group.name not in self.matrices},
        }

    def shards(self, params: Shards) -> Shards:
        """This rank's shards of the matrices in the compute type, ``{group: [chunk, layer, L]}``."""
        return {name: self._fuse(group, params).reshape(*self.layout.stack_shape[1:], -1) for name, group in self.matrices.items()}

    def scatter(self, gradients: Mapping[str, Shards]) -> Shards:
        """Gradients of the logical shards, fp32, added up over all ranks that computed a part of them."""
        scattered = {name: self._scatter_rows(gradients["layers"][name], axis=2) for name in self.matrices}
        return self.scatter_small(gradients) | self.logical(scattered)

    def scatter_small(self, gradients: Mapping[str, Shards]) -> Shards:
        """`scatter` without the matrices."""
        shards: Shards = {}
        for group in self.end_groups:
            shards |= self._scatter_end(group, gradients["ends"][group.name])
        for group in self.layer_groups:
            if group.name not in self.matrices:
                gradient = gradients["layers"][group.name]
                shards |= self._unfuse(group, self._scatter_rows(gradient, axis=2) if group.has_embed else gradient)
        return {name: self._sum_over_replicas(name, shard) for name, shard in shards.items()}

    def logical(self, scattered: Shards) -> Shards:
        """Logical shards from those of the matrices, ``[chunk, layer, L]`` or with rows and columns apart."""
        shards: Shards = {}
        for name, group in self.matrices.items():
            rows = scattered[name].reshape(*self.layout.stack_shape[1:], -1, sum(self.columns[member] for member in group.members))
            shards |= self._unfuse(group, rows)
        return {name: self._sum_over_replicas(name, shard) for name, shard in shards.items()}

    @staticmethod
    def gather_flat(shard: jax.Array) -> jax.Array:
        """``[n, ...]`` from every data rank's ``[...]``."""
        return jax.lax.all_gather(shard, axes.DATA)

    @staticmethod
    def scatter_flat(gradient: jax.Array) -> jax.Array:
        """The sum over the data ranks of what they have for this one: ``[...]`` from ``[n, ...]``."""
        return jax.lax.psum_scatter(gradient, axes.DATA, scatter_dimension=0)

    def sums_of_squares(self, shards: Shards) -> Shards:
        """Sum of squares of every logical parameter: a scalar for an end, ``[1, chunk, layer]`` for a layer parameter."""
        own: Shards = {}
        for name, shard in shards.items():
            stacked = 3 if self.specs[name].per_layer else 0
            total = jnp.square(shard.astype(jnp.float32)).sum(tuple(range(stacked, shard.ndim)))
            for axis in self._replica_axes(name):
                total = jnp.where(jax.lax.axis_index(axis) == 0, total, 0.0)
            own[name] = total
        layers = {name: total for name, total in own.items() if self.specs[name].per_layer}
        ends = {name: total for name, total in own.items() if name not in layers}
        return jax.lax.psum(layers, (axes.DATA, axes.TENSOR)) | jax.lax.psum(ends, axes.MESH_AXES)

    def norms(self, shards: Shards) -> Shards:
        """Euclidean norm per logical parameter and layer, with trailing dims of 1 so that it multiplies the shard."""
        sums = self.sums_of_squares(shards)
        return {name: jnp.sqrt(s).reshape(s.shape + (1,) * (shards[name].ndim - s.ndim)) for name, s in sums.items()}

    def global_norm(self, shards: Shards) -> jax.Array:
        """Norm over all logical parameters, equal on every rank."""
        sums = self.sums_of_squares(shards)
        layers = sum((total.sum() for name, total in sums.items() if self.specs[name].per_layer), jnp.float32(0))
        ends = sum((total for name, total in sums.items() if not self.specs[name].per_layer), jnp.float32(0))
        return jnp.sqrt(jax.lax.psum(layers, axes.PIPE) + ends)

    def _replica_axes(self, name: str) -> tuple[str, ...]:
        candidates = (axes.DATA, axes.TENSOR) if self.specs[name].per_layer else axes.MESH_AXES
        return tuple(axis for axis in candidates if axis not in self.arrays[name].mesh_axes)

    def _sum_over_replicas(self, name: str, shard: jax.Array) -> jax.Array:
        replica_axes = self._replica_axes(name)
        return jax.lax.psum(shard, replica_axes) if replica_axes else shard

    def _dtype(self, group: FusedGroup) -> jnp.dtype:
        return jnp.dtype(jnp.float32) if group.name.endswith("vectors") else self.compute_dtype

    def _fuse(self, group: FusedGroup, params: Shards) -> jax.Array:
        lead = (*self.layout.stack_shape[1:], -1) if group.has_embed else self.layout.stack_shape[1:]
        pieces = []
        for name in group.members:
            shard = params[name][0]
            pieces.append(shard.reshape(*shard.shape[: len(lead)], -1))
        return jnp.concatenate(pieces, -1).astype(self._dtype(group))

    def _unfuse(self, group: FusedGroup, fused: jax.Array) -> Shards:
        shards, offset = {}, 0
        for name in group.members:
            width = self.columns[name]
            shards[name] = fused[..., offset : offset + width].reshape(self.local_shapes[name])
            offset += width
        return shards

    def _gather_layers(self, group: FusedGroup, params: Shards) -> jax.Array:
        fused = self._fuse(group, params)
        if not group.has_embed:
            return fused
        return jax.lax.all_gather(fused, axes.DATA, axis=2, tiled=True)[:, :, : self.model.hidden_size]

    def _scatter_rows(self, gradient: jax.Array, axis: int) -> jax.Array:
        pad = [(0, 0)] * gradient.ndim
        pad[axis] = (0, self.layout.padded_embed - self.model.hidden_size)
        return jax.lax.psum_scatter(jnp.pad(gradient, pad), axes.DATA, scatter_dimension=axis, tiled=True)

    def _gather_end(self, group: FusedGroup, params: Shards) -> jax.Array:
        if group.name == "final_vectors":
            stacked = jnp.stack([params[name] for name in group.members], -1)
            return jax.lax.all_gather(stacked, axes.DATA, axis=0, tiled=True)[: self.model.hidden_size]
        table = params[group.name].astype(self.compute_dtype)
        if not group.has_embed:
            return table
        return jax.lax.all_gather(table, axes.DATA, axis=1, tiled=True)[:, : self.model.hidden_size]

    def _scatter_end(self, group: FusedGroup, gradient: jax.Array) -> Shards:
        if group.name == "final_vectors":
            shard = self._scatter_rows(gradient, axis=0)
            return {name: shard[:, index] for index, name in enumerate(group.members)}
        return {group.name: self._scatter_rows(gradient, axis=1) if group.has_embed else gradient}

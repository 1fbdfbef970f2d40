"""Sharding is a table: logical dim to mesh axes.

Adding a strategy edits this table, never the model. A spec that would use one mesh axis twice is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from megascale_jax import axes
from megascale_jax.config.layout import Layout
from megascale_jax.errors import ConfigError
from megascale_jax.model.parameters import ParameterSpec

RULES: Mapping[str, tuple[str, ...]] = {
    axes.STAGE: (axes.PIPE,),
    axes.CHUNK: (),
    axes.LAYER: (),
    axes.EMBED: (axes.DATA,),
    axes.HEADS: (axes.TENSOR,),
    axes.KV_HEADS: (axes.TENSOR,),
    axes.HEAD_DIM: (),
    axes.MLP: (axes.TENSOR,),
    axes.VOCAB: (axes.PIPE, axes.TENSOR),
    axes.POSITION: (),
}
"""``embed`` over ``data`` is ZeRO: it holds for the fp32 state only, the step gathers it before use."""

STACK_DIMS = (axes.STAGE, axes.CHUNK, axes.LAYER)


@dataclass(frozen=True)
class ArrayLayout:
    """How one logical parameter lies in memory: padded global shape, stack in front, and mesh axes of each dim."""

    shape: tuple[int, ...]
    dim_axes: tuple[tuple[str, ...], ...]

    @property
    def partition(self) -> PartitionSpec:
        """The same for JAX."""
        return PartitionSpec(*(entry or None for entry in self.dim_axes))

    @property
    def mesh_axes(self) -> frozenset[str]:
        """Mesh axes that split this parameter."""
        return frozenset(axis for entry in self.dim_axes for axis in entry)

    def local_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape on one rank of a mesh with these axis sizes."""
        local = []
        for size, entry in zip(self.shape, self.dim_axes, strict=True):
            for axis in entry:
                size //= sizes[axis]
            local.append(size)
        return tuple(local)


def axes_of(dims: tuple[str, ...], rules: Mapping[str, tuple[str, ...]] = RULES) -> tuple[tuple[str, ...], ...]:
    """Mesh axes of each dim. Raises ConfigError when one axis would split two dims."""
    entries = tuple(rules[dim] for dim in dims)
    used = [axis for entry in entries for axis in entry]
    for axis in used:
        if used.count(axis) > 1:
            raise ConfigError(f"sharding rules use mesh axis {axis!r} for two dims of {dims}; give one of them another axis")
    return entries


def array_layout(spec: ParameterSpec, layout: Layout) -> ArrayLayout:
    """Padded shape and partition of a logical parameter; layers are stacked as ``[stage, chunk, layer, ...]``."""
    padded = {axes.VOCAB: layout.padded_vocab, axes.EMBED: layout.padded_embed}
    shape = tuple(padded.get(dim, size) for dim, size in zip(spec.dims, spec.shape, strict=True))
    dims = STACK_DIMS + spec.dims if spec.per_layer else spec.dims
    return ArrayLayout(layout.stack_shape + shape if spec.per_layer else shape, axes_of(dims))

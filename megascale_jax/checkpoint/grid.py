"""How a state is cut into blocks: the same cut for memory, disk and network. Plain values, no device is touched.

A *stored array* is a logical array (``params.q`` is ``[layers, D, H, K]``, no pads, layers in order), cut by a regular grid
whose chunks are exactly what one device holds of it: ``[layers of a chunk, D / data, H / tensor, K]``. So a rank saves its
memory as it lies, without a message and without a copy in another order, and the last chunk of a dim that does not divide
carries the same zeros that pad the shard. A *block* is one chunk with its bytes.

Any other mesh reads the same array through another cut: `stored.needed_chunks` says which chunks a region overlaps.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megascale_jax import axes
from megascale_jax.checkpoint.stored import Index, Region, StoredArray
from megascale_jax.config.layout import Layout, MeshShape
from megascale_jax.config.stages import EMPTY
from megascale_jax.model.parameters import ParameterSpec
from megascale_jax.parallel.rules import array_layout

KINDS = ("params", "first_moment", "second_moment")
"""What is stored of every logical parameter."""
COUNTERS: Mapping[str, tuple[tuple[int, ...], str]] = {"step": ((), "int32"), "updates": ((), "int32"), "rng": ((2,), "uint32")}
"""Shape and type of what every rank has alike."""
STACK = 3
"""Leading dims ``[stage, chunk, layer]`` of a layer parameter in the step."""


@dataclass(frozen=True)
class Block:
    """One chunk in the memory of a shard: ``offset`` bytes from the shard's start. ``is_owned``: this copy is the one written."""

    array: str
    index: Index
    offset: int
    num_bytes: int
    is_owned: bool


class StateGrid:
    """The cut of one model's state on one mesh."""

    def __init__(self, specs: Mapping[str, ParameterSpec], layout: Layout, num_layers: int):
        self.layout, self.specs = layout, specs
        self._arrays = {name: array_layout(spec, layout) for name, spec in specs.items()}
        self._layers_in_block = layout.stages.depth if layout.stages.is_even else 1
        self._num_layers = num_layers
        self.stored = {array.name: array for array in self._stored()}

    def _stored(self) -> Iterator[StoredArray]:
        for name, spec in self.specs.items():
            local = self._arrays[name].local_shape(self.layout.mesh.by_axis)
            if spec.per_layer:
                shape, chunk = (self._num_layers, *spec.shape), (self._layers_in_block, *local[STACK:])
            else:
                shape, chunk = spec.shape, local
            for kind in KINDS:
                yield StoredArray(f"{kind}.{name}", shape, chunk, "float32")
        for name, (shape, dtype) in COUNTERS.items():
            yield StoredArray(name, shape, shape, dtype)

    def local_shape(self, array: str) -> tuple[int, ...]:
        """Shape of one device's shard of a stored array."""
        return COUNTERS[array][0] if array in COUNTERS else self._arrays[_parameter(array)].local_shape(self.layout.mesh.by_axis)

    def blocks(self, array: str, rank: int) -> Iterator[Block]:
        """Blocks of ``array`` in the shard of device number ``rank``, in order of their place in it; what is only pads is none."""
        coordinates = self._coordinates(rank)
        stored = self.stored[array]
        if array in COUNTERS:
            yield Block(array, (0,) * len(stored.shape), 0, stored.chunk_bytes, self._owns(array, (), frozenset(), coordinates))
            return
        spec, own = self.specs[_parameter(array)], self._arrays[_parameter(array)]
        inner = tuple(_place(entry, coordinates, self.layout.mesh) for entry in own.dim_axes[STACK if spec.per_layer else 0 :])
        if any(place >= count for place, count in zip(inner, stored.grid[1 if spec.per_layer else 0 :], strict=True)):
            return
        if not spec.per_layer:
            yield Block(array, inner, 0, stored.chunk_bytes, self._owns(array, inner, own.mesh_axes, coordinates))
            return
        places = [layer for chunk in self.layout.stages.table[coordinates[axes.PIPE]] for layer in chunk]
        for position in range(0, len(places), self._layers_in_block):
            layer = places[position]
            if layer != EMPTY:
                index = (layer // self._layers_in_block, *inner)
                offset = position // self._layers_in_block * stored.chunk_bytes
                yield Block(array, index, offset, stored.chunk_bytes, self._owns(array, index, own.mesh_axes, coordinates))

    def regions(self, array: str, rank: int) -> Iterator[Region]:
        """What the shard of device number ``rank`` holds of ``array``: its only region, or one of each layer."""
        stored = self.stored[array]
        if array in COUNTERS:
            yield Region((0,) * len(stored.shape), stored.shape, (0,) * len(stored.shape))
            return
        coordinates = self._coordinates(rank)
        spec, own = self.specs[_parameter(array)], self._arrays[_parameter(array)]
        skipped = STACK if spec.per_layer else 0
        local = own.local_shape(self.layout.mesh.by_axis)[skipped:]
        places = [_place(entry, coordinates, self.layout.mesh) for entry in own.dim_axes[skipped:]]
        start = tuple(place * size for place, size in zip(places, local, strict=True))
        stop = tuple(min(begin + size, whole) for begin, size, whole in zip(start, local, spec.shape, strict=True))
        if any(begin >= end for begin, end in zip(start, stop, strict=True)):
            return
        if not spec.per_layer:
            yield Region(start, stop, (0,) * len(start))
            return
        for chunk, layers in enumerate(self.layout.stages.table[coordinates[axes.PIPE]]):
            for place, layer in enumerate(layers):
                if layer != EMPTY:
                    yield Region((layer, *start), (layer + 1, *stop), (0, chunk, place, *[0] * len(start)))

    def _coordinates(self, rank: int) -> dict[str, int]:
        return dict(zip(axes.MESH_AXES, self.layout.mesh.coordinates(rank), strict=True))

    def _owns(self, array: str, index: Index, used: frozenset[str], coordinates: Mapping[str, int]) -> bool:
        """Whether this replica writes the block: one does, chosen by name and place so that the work is spread."""
        choice = zlib.crc32(f"{array}{index}".encode())
        for axis, size in self.layout.mesh.by_axis.items():
            if axis not in used:
                choice, chosen = divmod(choice, size)
                if coordinates[axis] != chosen:
                    return False
        return True


def _parameter(array: str) -> str:
    return array.split(".", 1)[1]


def _place(entry: Sequence[str], coordinates: Mapping[str, int], mesh: MeshShape) -> int:
    """A device's number among those that split one dim, the first axis the slowest."""
    place = 0
    for axis in entry:
        place = place * mesh.by_axis[axis] + coordinates[axis]
    return place

"""The layout of a run as plain values: mesh shape, rank coordinates, padded sizes. No JAX.

The step, the checkpoint, the simulator and the views read the same values, so they cannot disagree.
"""

from dataclasses import dataclass

from megascale_jax import axes
from megascale_jax.config.schema import ModelConfig, ParallelConfig
from megascale_jax.config.stages import Stages, most_chunks, place_layers


def round_up(size: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is not below ``size``."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the three mesh axes; ranks are numbered with ``tensor`` fastest, ``pipe`` slowest."""

    pipe: int
    data: int
    tensor: int

    @classmethod
    def of(cls, parallel: ParallelConfig) -> "MeshShape":
        """The mesh of a configuration."""
        return cls(parallel.pipe, parallel.data, parallel.tensor)

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.pipe * self.data * self.tensor

    @property
    def by_axis(self) -> dict[str, int]:
        """Size of every mesh axis, outermost first."""
        return dict(zip(axes.MESH_AXES, (self.pipe, self.data, self.tensor), strict=True))

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """``(pipe, data, tensor)`` index of a device number in ``[0, size)``."""
        stage, rest = divmod(rank, self.data * self.tensor)
        return (stage, *divmod(rest, self.tensor))


def virtual_stages_of(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Chunks of a stage (v): as configured, else as many as the layers allow."""
    return parallel.virtual_stages or most_chunks(model.windows, parallel.pipe, parallel.layers)


LAYERS_IN_REASON = 4
"""Layers of a chunk up to which a compile takes no more than a minute or two: a tick holds all of them, one after the other."""


def advice_on_depth(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """A line for whoever waits for the compile of a deep chunk, with what would be quicker if anything is."""
    depth = place_layers(model.num_layers, parallel.pipe, virtual_stages_of(model, parallel), parallel.layers).depth
    if depth <= LAYERS_IN_REASON:
        return None
    most = most_chunks(model.windows, parallel.pipe)
    shallowest = -(-model.num_layers // (parallel.pipe * most))
    if parallel.layers is not None:
        better = "list more virtual stages of fewer layers in parallel.layers"
    elif shallowest < depth:
        better = f"parallel.virtual_stages={most} makes chunks of {shallowest}, which also keep fewer residuals"
    else:
        better = f"a model.window pattern shorter than {depth} layers would make them shallower"
    return f"chunks of {depth} layers take long to compile, and longer than their depth says; {better}"


@dataclass(frozen=True)
class Layout:
    """Where the layers and the padded dims of a model lie on a mesh.

    Where layers lie is in ``stages``; ``chunk_windows`` is the window of every place in a chunk.
    """

    mesh: MeshShape
    virtual_stages: int
    stages: Stages
    chunk_windows: tuple[int | None, ...]
    padded_vocab: int
    padded_embed: int

    @classmethod
    def of(cls, model: ModelConfig, parallel: ParallelConfig) -> "Layout":
        """The layout of checked sections (``checks.py`` has refused layers that cannot be placed)."""
        virtual_stages = virtual_stages_of(model, parallel)
        stages = place_layers(model.num_layers, parallel.pipe, virtual_stages, parallel.layers)
        return cls(
            mesh=MeshShape.of(parallel),
            virtual_stages=virtual_stages,
            stages=stages,
            chunk_windows=stages.windows(model.windows),
            padded_vocab=round_up(model.vocab_size, parallel.tensor * parallel.pipe),
            padded_embed=round_up(model.hidden_size, parallel.data),
        )

    @property
    def layers_per_chunk(self) -> int:
        """Places for layers in a chunk."""
        return self.stages.depth

    @property
    def stack_shape(self) -> tuple[int, int, int]:
        """Leading dims of every per-layer parameter: ``(stage, chunk, layer)``."""
        return (self.mesh.pipe, self.virtual_stages, self.layers_per_chunk)

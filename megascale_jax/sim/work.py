"""What a step has to do, as plain numbers: of an experiment, or of a published run whose layout no experiment can express. No JAX."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from typing import Literal

from megascale_jax.config.layout import virtual_stages_of
from megascale_jax.config.schema import Experiment, ModelConfig
from megascale_jax.config.stages import place_layers
from megascale_jax.model.flops import Convention, attention_pairs, flops_per_row


def even_layers(num_layers: int, pipe: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """`Work.layers` where every chunk has as many."""
    return ((num_layers // (pipe * chunks),) * chunks,) * pipe


@dataclass(frozen=True)
class Work:
    """A model, its layout and its batch. ``layers``: of each chunk of each pipeline stage, ``[stage][chunk]``."""

    model: ModelConfig
    pipe: int
    data: int
    tensor: int
    virtual_stages: int
    micro_batch_size: int
    micro_batches: int
    remat: Literal["none", "selective", "full"]
    backward_delay: Literal[0, 1]
    layers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, experiment: Experiment) -> "Work":
        """The work of a checked experiment."""
        model, parallel = experiment.model, experiment.parallel
        chunks = virtual_stages_of(model, parallel)
        counts = tuple(map(len, place_layers(model.num_layers, parallel.pipe, chunks, parallel.layers).layers))
        return cls(
            model=model,
            pipe=parallel.pipe,
            data=parallel.data,
            tensor=parallel.tensor,
            virtual_stages=chunks,
            micro_batch_size=parallel.micro_batch_size,
            micro_batches=experiment.num_micro_batches,
            remat=parallel.remat,
            backward_delay=parallel.backward_delay,
            layers=tuple(counts[stage :: parallel.pipe] for stage in range(parallel.pipe)),
        )

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage, all its chunks together."""
        return tuple(map(sum, self.layers))

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.pipe * self.data * self.tensor

    def nodes(self, per_node: int) -> int:
        """Nodes of the mesh."""
        return ceil(self.devices / per_node)

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.data * self.micro_batch_size * self.micro_batches

    @property
    def tokens(self) -> int:
        """Row positions of a step."""
        return self.rows * self.model.sequence_length

    @property
    def tokens_of_micro_batch(self) -> int:
        """The same of a micro-batch."""
        return self.micro_batch_size * self.model.sequence_length

    @property
    def seen_pairs(self) -> float:
        """Query-key pairs that are seen in one row, of a mean layer."""
        return _seen_pairs(self.model) / self.model.num_layers  # pyright: ignore[reportArgumentType]  # frozen, so it has a hash

    @cached_property
    def parameters_of_layer(self) -> int:
        """Elements of one layer's matrices."""
        model = self.model
        attention = 2 * model.hidden_size * model.head_dim * (model.num_heads + model.kv_heads)
        return attention + model.hidden_size * model.mlp_size * (3 if model.activation == "swiglu" else 2)

    @property
    def parameters(self) -> int:
        """Elements of all matrices and tables."""
        tables = (1 if self.model.tied_head else 2) * self.model.vocab_size * self.model.hidden_size
        return self.model.num_layers * self.parameters_of_layer + tables

    @property
    def parameters_of_device(self) -> float:
        """Elements on a device of the fullest stage: its layers, and a table of the vocabulary on the first and on the last."""
        table = self.model.vocab_size * self.model.hidden_size
        layers = [count * self.parameters_of_layer for count in self.stage_layers]
        layers[0] += table
        if self.pipe > 1 or not self.model.tied_head:
            layers[-1] += table
        return max(layers) / self.tensor

    def model_flops(self, convention: Convention) -> float:
        """Training FLOPs of a step by a convention of `model/flops.py`."""
        return float(_flops_per_row(self.model, convention)) * self.rows  # pyright: ignore[reportArgumentType]  # the same


@lru_cache(maxsize=256)
def _flops_per_row(model: ModelConfig, convention: Convention) -> int:
    return flops_per_row(model, convention)


@lru_cache(maxsize=256)
def _seen_pairs(model: ModelConfig) -> int:
    return attention_pairs(model, "causal")

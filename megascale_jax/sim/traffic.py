"""What the ranks of one step send, by mesh axis: bytes per rank and per edge, from the configuration alone.

Volumes of ring collectives: each rank passes (n - 1) / n of the whole on. ``data``: gather of the weights and reduce-scatter of the
gradients, both in the compute type (`parallel/zero.py`). ``pipe``: a chunk's activations forward, as many gradients back, each tensor rank
its part of the sequence. ``tensor``: gather and reduce-scatter of a branch's activations, forward and backward, without what remat repeats.
Against the published volumes of a 175 B model over tensor 8 x pipe 8 (HPN, SIGCOMM 2024, table 3): 6 MB an activation, 5.5 GB a reduction.
"""

from dataclasses import dataclass

import numpy as np

from megascale_jax import axes
from megascale_jax.config.layout import MeshShape, virtual_stages_of
from megascale_jax.config.schema import Experiment
from megascale_jax.model.flops import count_parameters

_BYTES = {"bfloat16": 2, "float32": 4}
_COLLECTIVES_PER_BRANCH = 4
"""Gather and reduce-scatter, forward and backward."""


@dataclass(frozen=True)
class Volumes:
    """Bytes of one message or collective, for one rank."""

    activation: float
    """One micro-batch's, from one virtual stage to the next."""
    reduction: float
    """A reduce-scatter of all gradients of a rank over its data group; the gather of weights is as much."""
    tensor_collective: float
    """One gather or reduce-scatter of a branch's activations."""

    @classmethod
    def of(cls, experiment: Experiment) -> "Volumes":
        """Those of a checked experiment."""
        model, parallel = experiment.model, experiment.parallel
        width = _BYTES[experiment.train.compute_dtype]
        stream = width * parallel.micro_batch_size * model.sequence_length * model.hidden_size
        local = count_parameters(model) / (parallel.tensor * parallel.pipe)
        return cls(
            activation=stream / parallel.tensor,
            reduction=width * local * (parallel.data - 1) / parallel.data,
            tensor_collective=stream * (parallel.tensor - 1) / parallel.tensor,
        )


@dataclass(frozen=True)
class Edges:
    """Who sends how much to whom in one step along one axis: int64[edge] ranks and float64[edge] bytes."""

    axis: str
    source: np.ndarray
    target: np.ndarray
    sent: np.ndarray


def step_edges(experiment: Experiment) -> tuple[Edges, ...]:
    """All traffic of one step between ranks, for each mesh axis with more than one rank.

    Collectives as rings in the order of the axis, which is how NCCL and XLA's permutes run them; real libraries may reorder a ring.
    """
    mesh, volumes = MeshShape.of(experiment.parallel), Volumes.of(experiment)
    ranks = np.arange(mesh.size).reshape(mesh.pipe, mesh.data, mesh.tensor)
    found = []
    if mesh.pipe > 1:
        found.append(_pipe_edges(experiment, ranks, volumes.activation))
    if mesh.data > 1:
        found.append(_ring(axes.DATA, ranks, 1, 2 * volumes.reduction))
    if mesh.tensor > 1:
        branches = experiment.model.branches_per_layer * experiment.model.num_layers / mesh.pipe
        sent = _COLLECTIVES_PER_BRANCH * branches * experiment.num_micro_batches * volumes.tensor_collective
        found.append(_ring(axes.TENSOR, ranks, 2, sent))
    return tuple(found)


def _ring(axis: str, ranks: np.ndarray, dim: int, sent: float) -> Edges:
    return Edges(axis, ranks.ravel(), np.roll(ranks, -1, dim).ravel(), np.full(ranks.size, sent))


def _pipe_edges(experiment: Experiment, ranks: np.ndarray, activation: float) -> Edges:
    chunks, pipe = virtual_stages_of(experiment.model, experiment.parallel), len(ranks)
    messages = np.full(pipe, chunks)
    messages[-1] = chunks - 1  # from the last stage on to the first, but for the last chunk
    sent = np.broadcast_to((messages * experiment.num_micro_batches * activation)[:, None, None], ranks.shape).ravel()
    here, following = ranks.ravel(), np.roll(ranks, -1, 0).ravel()
    return Edges(axes.PIPE, np.concatenate([here, following]), np.concatenate([following, here]), np.concatenate([sent, sent]))

"""What the ranks of one step send to each other, by mesh axis, from the configuration alone.

Bytes of a message and of a device's weights are those of the iteration simulator (`sim/costs.py`). ``data``: gather of the weights and
reduce-scatter of the gradients, both in the compute type (`parallel/zero.py`). ``pipe``: a chunk's activations forward, as many gradients
back. ``tensor``: gather and reduce-scatter of a branch's activations, forward and backward, without what remat repeats.
"""

from dataclasses import dataclass

import numpy as np

from megascale_jax import axes
from megascale_jax.config.layout import MeshShape, virtual_stages_of
from megascale_jax.config.schema import Experiment
from megascale_jax.sim.collectives import gathered_bytes
from megascale_jax.sim.costs import data_bytes, message_bytes
from megascale_jax.sim.work import Work

_COLLECTIVES_PER_BRANCH = 4
"""Gather and reduce-scatter, forward and backward."""


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
    mesh, work = MeshShape.of(experiment.parallel), Work.of(experiment)
    ranks = np.arange(mesh.size).reshape(mesh.pipe, mesh.data, mesh.tensor)
    found = list[Edges]()
    if mesh.pipe > 1:
        found.append(_pipe_edges(experiment, ranks, message_bytes(work)))
    if mesh.data > 1:
        found.append(_ring(axes.DATA, ranks, 1, 2 * gathered_bytes(mesh.data, data_bytes(work))))
    if mesh.tensor > 1:
        branches = experiment.model.branches_per_layer * experiment.model.num_layers / mesh.pipe
        gathered = gathered_bytes(mesh.tensor, message_bytes(work) * mesh.tensor)
        found.append(_ring(axes.TENSOR, ranks, 2, _COLLECTIVES_PER_BRANCH * branches * experiment.num_micro_batches * gathered))
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

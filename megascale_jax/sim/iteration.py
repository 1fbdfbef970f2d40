"""One iteration by events, slow nodes drawn: the event simulation around `replay.py`. No JAX.

Pipelines whose slow stages are alike take equally long, so each pattern is simulated once, whatever the number of replicas and of draws.
Every replica waits for the slowest before the gradients are summed. What is not on a pipeline (gathers and scatters over the data axis,
update, input, host) is the closed form's.
"""

from dataclasses import dataclass

import numpy as np

from megascale_jax.config.software import SoftwareConfig
from megascale_jax.sim.analytic import iteration_times
from megascale_jax.sim.costs import costs_of
from megascale_jax.sim.device import Device
from megascale_jax.sim.replay import Array, Units, durations_of, record, replay, schedule_of
from megascale_jax.sim.work import Work

SAMPLES = 64
"""Draws of slow nodes; the mean of 64 moves by about a per mille of the iteration from seed to seed."""


@dataclass(frozen=True)
class Iteration:
    """``seconds`` of each draw, ``healthy_s`` without a slow node; ``patterns``: pipelines that were simulated for all draws."""

    seconds: tuple[float, ...]
    healthy_s: float
    patterns: int

    @property
    def mean_s(self) -> float:
        """Mean over the draws."""
        return float(np.mean(self.seconds))


def simulate(
    work: Work, device: Device, software: SoftwareConfig, *, samples: int = SAMPLES, jitter: float = 0.0, seed: int = 0
) -> Iteration:
    """An iteration on ``samples`` draws of slow nodes.

    ``jitter`` as of `replay`: then pipelines that are alike differ, and every replica of every draw is simulated by itself.
    """
    schedule, durations = schedule_of(work), durations_of(work, costs_of(work, device, software), software)
    rest_s = _around(work, device, software)
    random = np.random.default_rng(seed)
    slow = random.random((samples, work.nodes(device.per_node))) < device.slow_node_share
    replicas = 1 + device.slow_node_slowdown * slow[:, _nodes(work, device)].astype(float)
    healthy_s = float(replay(schedule, durations, np.ones((1, work.pipe)), jitter, seed)[0])
    flat = replicas.reshape(samples * work.data, work.pipe)
    if jitter:
        seconds, patterns = replay(schedule, durations, flat, jitter, seed), len(flat)
    else:
        kinds, which = np.unique(flat, axis=0, return_inverse=True)
        seconds, patterns = replay(schedule, durations, kinds)[which.reshape(-1)], len(kinds)
    slowest = seconds.reshape(samples, work.data).max(axis=1)
    return Iteration(tuple(map(float, slowest + rest_s)), healthy_s + rest_s, patterns)


def units_of(work: Work, device: Device, software: SoftwareConfig, slow_stages: tuple[int, ...] = ()) -> Units:
    """Every unit of one pipeline, some of its stages on slow nodes."""
    slowdowns: Array = np.ones(work.pipe)
    slowdowns[list(slow_stages)] += device.slow_node_slowdown
    return record(schedule_of(work), durations_of(work, costs_of(work, device, software), software), slowdowns)


def _nodes(work: Work, device: Device) -> np.ndarray:
    """Node of each replica's stages, int64[data, pipe]; tensor ranks share one."""
    data, pipe = np.arange(work.data)[:, np.newaxis], np.arange(work.pipe)[np.newaxis]
    return (pipe * work.data + data) * work.tensor // device.per_node


def _around(work: Work, device: Device, software: SoftwareConfig) -> float:
    """Seconds of an iteration that no pipeline has."""
    times = iteration_times(work, device, software)
    hidden_s = times.contention_s - work.micro_batches * max(work.stage_layers) * _layer_contention(work, device, software)
    return times.data_s + times.embedding_s + times.optimizer_s + times.input_s + times.host_s + hidden_s


def _layer_contention(work: Work, device: Device, software: SoftwareConfig) -> float:
    costs = costs_of(work, device, software)
    return costs.layer_forward.contention + costs.layer_backward.contention

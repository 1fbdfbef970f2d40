"""Peak FLOP/s that MFU is measured against: the vendor's where the system file has it, else a product timed here."""

import time

import jax
import jax.numpy as jnp

from megascale_jax.config.schema import Experiment

_SIDE = 1536
_TRIES = 12


def peak_flops(experiment: Experiment, num_devices: int) -> float:
    """FLOP/s of all devices together.

    Without ``system.peak_tflops`` (a CPU, whose virtual devices share the cores): the fastest of a few square fp32
    products with all cores of this host, so that MFU says how much of that the whole run gets.
    """
    if experiment.system.peak_tflops is not None:
        return experiment.system.peak_tflops * 1e12 * num_devices
    device = jax.local_devices()[0]
    square = jax.device_put(jnp.full((_SIDE, _SIDE), 0.5, jnp.float32), device)
    multiply = jax.jit(jnp.matmul)
    multiply(square, square).block_until_ready()
    seconds = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        multiply(square, square).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * _SIDE**3 / min(seconds)

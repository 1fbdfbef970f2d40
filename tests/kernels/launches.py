"""Launches of every kernel on abstract arrays, in the form that takes most of a chip; also a command that prints what they take.

``python -m tests.kernels.launches 90`` compiles every candidate of the table for a compute capability and prints a line of JSON
for each: kernel, shape class, tile, registers, problems. A process of its own, because Triton must not be in interpreter mode.
"""

import json
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from megascale_jax.kernels.launch import Launch, Tile

WIDTHS = {"norm": (1024, 2048, 5120, 8192, 12288, 16384), "activation": (6144, 1048576), "loss": (1000, 64000, 1048576)}
"""Of rows, each in the shape class that it belongs to: those of the models here, and the widest."""


def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def launches(kernel: str, width: int, tile: Tile) -> Iterator[Launch]:
    """Grouped heads, window and segments for attention; residual and biases for the others."""
    operator = kernel.split(".")[0]
    if operator == "attention":
        yield from _attention(kernel, width, tile)
        return
    below = max((known for known in classes_of(kernel) if known < width), default=0)
    for size in (size for size in WIDTHS[operator] if below < size <= width):
        yield from {"norm": _norm, "activation": _activation, "loss": _loss}[operator](kernel, size, tile)


def classes_of(kernel: str) -> set[int]:
    """All shape classes of a kernel, of whatever architecture."""
    from megascale_jax.kernels.tiles import every_candidate

    return {width for name, _, width, _ in every_candidate() if name == kernel}


def _attention(kernel: str, head: int, tile: Tile) -> Iterator[Launch]:
    from megascale_jax.kernels.attention import triton

    q, k, ids, lse = (
        array(1, 2048, 16, head),
        array(1, 2048, 4, head),
        array(1, 2048, dtype=jnp.int32),
        array(1, 16, 2048, dtype=jnp.float32),
    )
    if kernel == "attention.forward":
        yield triton.forward_launch(q, k, k, ids, 1024, tile)
    elif kernel == "attention.backward_q":
        yield triton.backward_q_launch(q, k, k, ids, q, lse, q, 1024, tile)
    else:
        yield from triton.backward_kv_launches(q, k, k, ids, lse, q, lse, 1024, tile)


def _norm(kernel: str, width: int, tile: Tile) -> Iterator[Launch]:
    from megascale_jax.kernels.norm import triton

    x, vector = array(4096, width), array(width, dtype=jnp.float32)
    if kernel == "norm.forward":
        yield triton.forward_launch(x, x, vector, vector, "layernorm", 1e-5, tile)
    elif kernel == "norm.sums":
        yield triton.sums_launch(x, vector, x, array(4096, dtype=jnp.float32), array(4096, dtype=jnp.float32), tile)
    else:
        yield triton.backward_launch(x, vector, vector, x, x, "layernorm", 1e-5, tile)


def _activation(kernel: str, width: int, tile: Tile) -> Iterator[Launch]:
    from megascale_jax.kernels.gelu import triton

    x, vector = array(2048, width), array(width)
    for gate in (None, x):
        biases = (vector, None if gate is None else vector)
        if kernel == "activation.forward":
            yield triton.forward_launch(x, gate, *biases, tile)
        else:
            yield triton.backward_launch(x, gate, *biases, x, tile)


def _loss(kernel: str, width: int, tile: Tile) -> Iterator[Launch]:
    from megascale_jax.kernels.loss import triton

    logits, targets, offset = array(1, 2048, width), array(1, 2048, dtype=jnp.int32), array(1, dtype=jnp.int32)
    rows = array(1, 2048, dtype=jnp.float32)
    if kernel == "loss.statistics":
        yield triton.statistics_launch(logits, targets, offset, width - 3, tile)
    else:
        yield triton.gradient_launch(logits, rows, targets, offset, rows, width - 3, tile)


def main(architecture: int) -> None:
    """Print a line for every candidate."""
    from megascale_jax.kernels.resources import resources
    from megascale_jax.kernels.tiles import every_candidate

    for kernel, found, width, tile in every_candidate():
        if found != architecture:
            continue
        for launch in launches(kernel, width, tile):
            taken = resources(launch, architecture)
            line = {"kernel": kernel, "width": width, "tile": tile.text, "registers": taken.registers, "shared": taken.shared_bytes}
            print(json.dumps(line | {"problems": taken.problems(architecture)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

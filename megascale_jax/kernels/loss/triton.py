"""Statistics and gradient of the softmax cross-entropy over a rank's own columns, in Triton: the logits are read once each.

A program takes a row in steps of a block, with a maximum and a sum for every lane of the block, joined at the end; the target's
logit is loaded by its place, and only where this rank has it. GPU targets, or the interpreter.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from megascale_jax.kernels.launch import Architecture, Launch, Tile, cdiv, like, run
from megascale_jax.kernels.tiles import tile_of

_LOWEST = tl.constexpr(-3.4028234663852886e38)
_IGNORE = tl.constexpr(-1)


@triton.jit
def _statistics_kernel(
    logits, targets, offset, statistics, ROWS: tl.constexpr, V: tl.constexpr, VOCAB: tl.constexpr, BLOCK_V: tl.constexpr
):
    row = tl.program_id(0)
    place = row.to(tl.int64) * V
    first = tl.load(offset)
    lanes = tl.arange(0, BLOCK_V)
    top = tl.full([BLOCK_V], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_V], tl.float32)
    for start in tl.range(0, V, BLOCK_V):
        columns = start + lanes
        real = (columns < V) & (first + columns < VOCAB)
        value = tl.load(logits + place + columns, mask=real, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, value)
        total = total * tl.exp(top - new_top) + tl.exp(value - new_top)
        top = new_top
    highest = tl.max(top, 0)
    target = tl.load(targets + row)
    column = target - first
    here = (column >= 0) & (column < V) & (target != _IGNORE)
    picked = tl.load(logits + place + tl.where(here, column, 0), mask=here, other=0.0).to(tl.float32)
    tl.store(statistics + row, highest)
    tl.store(statistics + ROWS + row, tl.sum(total * tl.exp(top - highest), 0))
    tl.store(statistics + 2 * ROWS + row, picked)


@triton.jit
def _gradient_kernel(logits, log_totals, targets, offset, weights, gradient, V: tl.constexpr, VOCAB: tl.constexpr, BLOCK_V: tl.constexpr):
    row = tl.program_id(0)
    place = row.to(tl.int64) * V
    first = tl.load(offset)
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    target = tl.load(targets + row)
    weight = tl.where(target != _IGNORE, tl.load(weights + row), 0.0)
    value = tl.load(logits + place + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    probability = tl.where(first + columns < VOCAB, tl.exp(value - tl.load(log_totals + row)), 0.0)
    result = tl.where(first + columns == target, probability - 1.0, probability) * weight
    tl.store(gradient + place + columns, result.to(gradient.dtype.element_ty), mask=columns < V)


def local_statistics(
    logits: jax.Array, targets: jax.Array, vocab_offset: jax.Array, vocab_size: int, *, architecture: Architecture
) -> jax.Array:
    """Same contract as the reference."""
    tile = tile_of("loss.statistics", architecture, logits)
    return run(statistics_launch(logits, targets, _scalar(vocab_offset), vocab_size, tile), architecture)[0]


def logits_gradient(
    logits: jax.Array,
    log_total: jax.Array,
    targets: jax.Array,
    vocab_offset: jax.Array,
    vocab_size: int,
    gradient: jax.Array,
    *,
    architecture: Architecture,
) -> jax.Array:
    """Same contract as the reference."""
    tile = tile_of("loss.gradient", architecture, logits)
    operands = (logits, log_total, targets, _scalar(vocab_offset), gradient.astype(jnp.float32))
    return run(gradient_launch(*operands, vocab_size, tile), architecture)[0]


def statistics_launch(logits, targets, offset_1, vocab_size: int, tile: Tile) -> Launch:
    """One program a row."""
    V = logits.shape[-1]
    rows = logits.size // V
    results = (jax.ShapeDtypeStruct((3, *logits.shape[:-1]), jnp.float32),)
    constants = {"ROWS": rows, "V": V, "VOCAB": vocab_size}
    return Launch("loss.statistics", _statistics_kernel, (logits, targets, offset_1), results, (rows,), constants, tile, 0)


def gradient_launch(logits, log_total, targets, offset_1, gradient, vocab_size: int, tile: Tile) -> Launch:
    """One program a block of a row."""
    V = logits.shape[-1]
    operands = (logits, log_total, targets, offset_1, gradient)
    grid = (logits.size // V, cdiv(V, tile.blocks["BLOCK_V"]))
    return Launch("loss.gradient", _gradient_kernel, operands, like(logits), grid, {"V": V, "VOCAB": vocab_size}, tile, 0)


def _scalar(value: jax.Array) -> jax.Array:
    return jnp.asarray(value, jnp.int32).reshape(1)

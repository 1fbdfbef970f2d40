"""Bias and nonlinearity in Triton, one pass over the memory each way; the backward pass gives the result once more.

Gradients of biases are sums of that of `up` or `gate`, left to XLA. GPU targets, or the interpreter.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from megascale_jax.kernels.launch import Architecture, Launch, Tile, cdiv, like, run
from megascale_jax.kernels.tiles import tile_of

_ROOT = tl.constexpr(0.7978845608028654)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _tanh(x):
    # by the exponential of a negative number, which cannot overflow
    shrunk = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -size, size)


@triton.jit
def _sigmoid(x):
    shrunk = tl.exp(-tl.abs(x))
    small = shrunk / (1.0 + shrunk)
    return tl.where(x < 0, small, 1.0 - small)


@triton.jit
def _tile(ROWS: tl.constexpr, F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    """This program's elements, their columns, and which of them there are."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    return rows[:, None].to(tl.int64) * F + columns[None, :], columns, (rows[:, None] < ROWS) & (columns[None, :] < F)


@triton.jit
def _load(pointer, bias, place, columns, mask, F: tl.constexpr, BIASED: tl.constexpr):
    x = tl.load(pointer + place, mask=mask, other=0.0).to(tl.float32)
    if BIASED:
        x += tl.load(bias + columns, mask=columns < F, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def _forward_kernel(
    up, gate, bias, gate_bias, out,
    ROWS: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, GATE_BIASED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    place, columns, mask = _tile(ROWS, F, BLOCK_R, BLOCK_F)
    x = _load(up, bias, place, columns, mask, F, BIASED)
    if GATED:
        g = _load(gate, gate_bias, place, columns, mask, F, GATE_BIASED)
        value = g * _sigmoid(g) * x
    else:
        value = 0.5 * x * (1.0 + _tanh((x + x * x * x * _CUBIC) * _ROOT))
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    up, gate, bias, gate_bias, d_out, d_up, d_gate, out,
    ROWS: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, GATE_BIASED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    place, columns, mask = _tile(ROWS, F, BLOCK_R, BLOCK_F)
    x = _load(up, bias, place, columns, mask, F, BIASED)
    d = tl.load(d_out + place, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        g = _load(gate, gate_bias, place, columns, mask, F, GATE_BIASED)
        share = _sigmoid(g)
        value = g * share * x
        tl.store(d_gate + place, (d * x * share * (1.0 + g * (1.0 - share))).to(d_gate.dtype.element_ty), mask=mask)
        gradient = d * g * share
    else:
        tanh = _tanh((x + x * x * x * _CUBIC) * _ROOT)
        value = 0.5 * x * (1.0 + tanh)
        gradient = d * (0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * (1.0 + x * x * (3.0 * _CUBIC)) * _ROOT)
    tl.store(d_up + place, gradient.to(d_up.dtype.element_ty), mask=mask)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


def forward(
    up: jax.Array, gate: jax.Array | None, bias_F: jax.Array | None, gate_bias_F: jax.Array | None, *, architecture: Architecture
) -> jax.Array:
    """Same contract as the reference."""
    launch = forward_launch(up, gate, bias_F, gate_bias_F, tile_of("activation.forward", architecture, up))
    return jax.lax.optimization_barrier(run(launch, architecture))[0]


def backward(
    up: jax.Array,
    gate: jax.Array | None,
    bias_F: jax.Array | None,
    gate_bias_F: jax.Array | None,
    d_out: jax.Array,
    *,
    architecture: Architecture,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Same contract as the reference."""
    launch = backward_launch(up, gate, bias_F, gate_bias_F, d_out, tile_of("activation.backward", architecture, up))
    d_up, d_gate, out = run(launch, architecture)
    return d_up, None if gate is None else d_gate, out


def forward_launch(up, gate, bias_F, gate_bias_F, tile: Tile) -> Launch:
    """One program a tile."""
    operands, constants, grid = _shared(up, gate, bias_F, gate_bias_F, tile)
    return Launch("activation.forward", _forward_kernel, operands, like(up), grid, constants, tile, 0)


def backward_launch(up, gate, bias_F, gate_bias_F, d_out, tile: Tile) -> Launch:
    """One program a tile."""
    operands, constants, grid = _shared(up, gate, bias_F, gate_bias_F, tile)
    d_gate = jax.ShapeDtypeStruct((1,), up.dtype) if gate is None else like(gate)[0]
    results = (*like(up), d_gate, *like(up))
    return Launch("activation.backward", _backward_kernel, (*operands, d_out), results, grid, constants, tile, 0)


def _shared(up, gate, bias_F, gate_bias_F, tile: Tile):
    F = up.shape[-1]
    rows = up.size // F
    unused = jnp.zeros(1, up.dtype)
    operands = (up, *(unused if x is None else x for x in (gate, bias_F, gate_bias_F)))
    names = ("GATED", "BIASED", "GATE_BIASED")
    constants = {"ROWS": rows, "F": F} | {name: x is not None for name, x in zip(names, (gate, bias_F, gate_bias_F), strict=True)}
    return operands, constants, (cdiv(rows, tile.blocks["BLOCK_R"]), cdiv(F, tile.blocks["BLOCK_F"]))

"""LayerNorm and RMSNorm in Triton, with the residual add on the way in and the residual's gradient on the way back.

One pass over the memory each: a whole row lies in registers, cut in two powers of two, and the backward pass computes mean
and deviation once more instead of reading them. Gradients of scale and bias are summed in registers over the rows of one
program, and over programs by XLA: no atomics, the same bits every run. Rows too wide for that have them summed by a second
kernel, column by column. GPU targets, or the interpreter.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from megascale_jax.kernels.launch import Architecture, Launch, Tile, cdiv, like, run
from megascale_jax.kernels.tiles import tile_of


@triton.jit
def _row(pointer, place, columns, D: tl.constexpr):
    return tl.load(pointer + place + columns, mask=columns < D, other=0.0).to(tl.float32)


@triton.jit
def _centre(x_1, x_2, one, two, D: tl.constexpr, D2: tl.constexpr, EPSILON: tl.constexpr, CENTRED: tl.constexpr):
    """``x - mean`` in both parts, 0 behind the row's end, the mean, and one over the deviation; the mean of RMSNorm is 0."""
    mean = 0.0
    if CENTRED:
        mean = tl.sum(x_1, 0)
        if D2:
            mean += tl.sum(x_2, 0)
        mean = mean / D
        x_1 = tl.where(one < D, x_1 - mean, 0.0)
        if D2:
            x_2 = tl.where(two < D, x_2 - mean, 0.0)
    variance = tl.sum(x_1 * x_1, 0)
    if D2:
        variance += tl.sum(x_2 * x_2, 0)
    return x_1, x_2, mean, tl.rsqrt(variance / D + EPSILON)


@triton.jit
def _put_normal(y, place, columns, x, inverse, scale, bias, D: tl.constexpr, BIASED: tl.constexpr):
    value = x * inverse * tl.load(scale + columns, mask=columns < D, other=0.0).to(tl.float32)
    if BIASED:
        value += tl.load(bias + columns, mask=columns < D, other=0.0).to(tl.float32)
    tl.store(y + place + columns, value.to(y.dtype.element_ty), mask=columns < D)


@triton.jit
def _forward_kernel(
    x, added, scale, bias, total, y,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, EPSILON: tl.constexpr, CENTRED: tl.constexpr,
    BIASED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * D
    one = tl.arange(0, D1)
    x_1 = _row(x, place, one, D)
    two = one
    x_2 = x_1
    if D2:
        two = D1 + tl.arange(0, D2)
        x_2 = _row(x, place, two, D)
    if ADDED:
        # the sum is what the residual stream keeps, so the norm is that of the rounded sum
        x_1 = (x_1 + _row(added, place, one, D)).to(total.dtype.element_ty)
        tl.store(total + place + one, x_1, mask=one < D)
        x_1 = x_1.to(tl.float32)
        if D2:
            x_2 = (x_2 + _row(added, place, two, D)).to(total.dtype.element_ty)
            tl.store(total + place + two, x_2, mask=two < D)
            x_2 = x_2.to(tl.float32)
    x_1, x_2, _, inverse = _centre(x_1, x_2, one, two, D, D2, EPSILON, CENTRED)
    _put_normal(y, place, one, x_1, inverse, scale, bias, D, BIASED)
    if D2:
        _put_normal(y, place, two, x_2, inverse, scale, bias, D, BIASED)


@triton.jit
def _put_gradient(d_x, kept, place, columns, gradient, D: tl.constexpr, KEPT: tl.constexpr):
    if KEPT:
        gradient += _row(kept, place, columns, D)
    tl.store(d_x + place + columns, gradient.to(d_x.dtype.element_ty), mask=columns < D)


@triton.jit
def _put_sums(d_scale, d_bias, place, columns, of_scale, of_bias, D: tl.constexpr, BIASED: tl.constexpr):
    tl.store(d_scale + place + columns, of_scale, mask=columns < D)
    if BIASED:
        tl.store(d_bias + place + columns, of_bias, mask=columns < D)


@triton.jit
def _backward_kernel(
    x, scale, d_y, kept, d_x, d_scale, d_bias,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, EPSILON: tl.constexpr, CENTRED: tl.constexpr,
    BIASED: tl.constexpr, KEPT: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """``SUMS``: sums of the program's rows for the gradients of scale and bias; else mean and inverse deviation of every row."""
    program = tl.program_id(0)
    one = tl.arange(0, D1)
    two = one
    scale_1 = _row(scale, 0, one, D)
    scale_2 = scale_1
    if D2:
        two = D1 + tl.arange(0, D2)
        scale_2 = _row(scale, 0, two, D)
    if SUMS:
        ds_1 = tl.zeros([D1], tl.float32)
        db_1 = ds_1
        if D2:
            ds_2 = tl.zeros([D2], tl.float32)
            db_2 = ds_2
    for row in tl.range(program, ROWS, STRIDE):
        place = (tl.zeros([], tl.int64) + row) * D
        x_1 = _row(x, place, one, D)
        dy_1 = _row(d_y, place, one, D)
        x_2 = x_1
        dy_2 = dy_1
        if D2:
            x_2 = _row(x, place, two, D)
            dy_2 = _row(d_y, place, two, D)
        x_1, x_2, mean, inverse = _centre(x_1, x_2, one, two, D, D2, EPSILON, CENTRED)
        n_1 = x_1 * inverse
        if SUMS:
            ds_1 += dy_1 * n_1
            if BIASED:
                db_1 += dy_1
        else:
            tl.store(d_scale + row, mean)
            tl.store(d_bias + row, inverse)
        dn_1 = dy_1 * scale_1
        along = tl.sum(dn_1 * n_1, 0)
        middle = tl.sum(dn_1, 0)
        n_2, dn_2 = n_1, dn_1
        if D2:
            n_2 = x_2 * inverse
            if SUMS:
                ds_2 += dy_2 * n_2
                if BIASED:
                    db_2 += dy_2
            dn_2 = dy_2 * scale_2
            along += tl.sum(dn_2 * n_2, 0)
            middle += tl.sum(dn_2, 0)
        along = along / D
        middle = middle / D if CENTRED else middle * 0.0
        _put_gradient(d_x, kept, place, one, (dn_1 - middle - n_1 * along) * inverse, D, KEPT)
        if D2:
            _put_gradient(d_x, kept, place, two, (dn_2 - middle - n_2 * along) * inverse, D, KEPT)
    if SUMS:
        _put_sums(d_scale, d_bias, program * D, one, ds_1, db_1, D, BIASED)
        if D2:
            _put_sums(d_scale, d_bias, program * D, two, ds_2, db_2, D, BIASED)


@triton.jit
def _sums_kernel(
    x, d_y, means, inverses, d_scale, d_bias,
    D: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr, BIASED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    ds = tl.zeros([BLOCK_D], tl.float32)
    db = ds
    first = tl.program_id(1) * SHARE
    for start in tl.range(first, tl.minimum(first + SHARE, ROWS), BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        mine = (rows < ROWS) & (rows < first + SHARE)
        place = rows[:, None].to(tl.int64) * D + columns[None, :]
        mask = mine[:, None] & (columns[None, :] < D)
        dy = tl.load(d_y + place, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(means + rows, mask=mine, other=0.0)
        inverse = tl.load(inverses + rows, mask=mine, other=0.0)
        normal = (tl.load(x + place, mask=mask, other=0.0).to(tl.float32) - mean[:, None]) * inverse[:, None]
        ds += tl.sum(dy * normal, 0)
        if BIASED:
            db += tl.sum(dy, 0)
    _put_sums(d_scale, d_bias, tl.program_id(1) * D, columns, ds, db, D, BIASED)


def forward(
    x: jax.Array,
    added: jax.Array | None,
    scale_D: jax.Array,
    bias_D: jax.Array | None,
    *,
    kind: str,
    epsilon: float,
    architecture: Architecture,
) -> tuple[jax.Array, jax.Array]:
    """Same contract as the reference."""
    launch = forward_launch(x, added, scale_D, bias_D, kind, epsilon, tile_of("norm.forward", architecture, x))
    total, y = jax.lax.optimization_barrier(run(launch, architecture))
    return x if added is None else total, y


def backward(
    x: jax.Array,
    scale_D: jax.Array,
    bias_D: jax.Array | None,
    d_y: jax.Array,
    d_total: jax.Array | None,
    *,
    kind: str,
    epsilon: float,
    architecture: Architecture,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Same contract as the reference."""
    tile = tile_of("norm.backward", architecture, x)
    launch = backward_launch(x, scale_D, bias_D, d_y, d_total, kind, epsilon, tile)
    d_x, d_scale_nD, d_bias_nD = run(launch, architecture)
    if tile.blocks["SPLIT"]:
        # the kernel gave means and inverse deviations in their place
        sums = sums_launch(x, bias_D, d_y, d_scale_nD, d_bias_nD, tile_of("norm.sums", architecture, x))
        d_scale_nD, d_bias_nD = run(sums, architecture)
    return d_x, d_scale_nD.sum(0), None if bias_D is None else d_bias_nD.sum(0)


def forward_launch(x, added, scale_D, bias_D, kind: str, epsilon: float, tile: Tile) -> Launch:
    """One program a row."""
    unused = jax.ShapeDtypeStruct((1,), x.dtype)
    operands = (x, scale_D if added is None else added, scale_D, scale_D if bias_D is None else bias_D)
    constants = {**_constants(x, kind, epsilon), "BIASED": bias_D is not None, "ADDED": added is not None}
    results = (unused if added is None else like(x)[0], *like(x))
    return Launch("norm.forward", _forward_kernel, operands, results, (x.size // x.shape[-1],), constants, tile, 0)


def backward_launch(x, scale_D, bias_D, d_y, d_total, kind: str, epsilon: float, tile: Tile) -> Launch:
    """A fixed number of programs, each of which takes every so manieth row; not so many that their sums outweigh the rows.

    Where the tile says ``SPLIT``, a program a row.
    """
    rows, D, split = x.size // x.shape[-1], x.shape[-1], bool(tile.blocks["SPLIT"])
    programs = rows if split else min(tile.blocks["PROGRAMS"], cdiv(rows, 4))
    operands = (x, scale_D, d_y, scale_D if d_total is None else d_total)
    sums = jax.ShapeDtypeStruct((rows,) if split else (programs, D), jnp.float32)
    results = (*like(x), sums, sums if split or bias_D is not None else jax.ShapeDtypeStruct((1,), jnp.float32))
    flags = {"BIASED": bias_D is not None, "KEPT": d_total is not None, "SUMS": not split}
    constants = {**_constants(x, kind, epsilon), **flags, "ROWS": rows, "STRIDE": programs}
    return Launch("norm.backward", _backward_kernel, operands, results, (programs,), constants, Tile({}, tile.warps, tile.stages), 0)


def sums_launch(x, bias_D, d_y, mean, inverse, tile: Tile) -> Launch:
    """Programs of some columns and a share of the rows."""
    rows, D = x.size // x.shape[-1], x.shape[-1]
    share = cdiv(rows, min(tile.blocks["PARTS"], cdiv(rows, tile.blocks["BLOCK_R"])))
    parts = cdiv(rows, share)
    sums = jax.ShapeDtypeStruct((parts, D), jnp.float32)
    results = (sums, sums if bias_D is not None else jax.ShapeDtypeStruct((1,), jnp.float32))
    blocks = {name: tile.blocks[name] for name in ("BLOCK_R", "BLOCK_D")}
    constants = {"D": D, "ROWS": rows, "SHARE": share, "BIASED": bias_D is not None}
    grid = (cdiv(D, blocks["BLOCK_D"]), parts)
    cut = Tile(blocks, tile.warps, tile.stages)
    return Launch("norm.sums", _sums_kernel, (x, d_y, mean, inverse), results, grid, constants, cut, 0)


def _constants(x: jax.Array, kind: str, epsilon: float) -> dict[str, float | int | bool]:
    D = x.shape[-1]
    large = 1 << (D.bit_length() - 1)
    rest = D - large
    return {"D": D, "D1": large, "D2": 1 << (rest - 1).bit_length() if rest else 0, "EPSILON": epsilon, "CENTRED": kind == "layernorm"}

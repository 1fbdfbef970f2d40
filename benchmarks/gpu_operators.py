"""Rates of every operator by implementation, and of attention by tile, beside the device's own ceilings.

A rate is the median of several passes, each of which takes the operator over many inputs in one program. Inputs are arrays of their
own: out of a stack, XLA would copy them for a kernel that is none of its own.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megascale_jax.kernels.attention import api as attention
from megascale_jax.kernels.attention import reference
from megascale_jax.kernels.gelu import api as gelu
from megascale_jax.kernels.launch import Tile
from megascale_jax.kernels.loss import api as loss
from megascale_jax.kernels.norm import api as norm
from megascale_jax.kernels.target import Target
from megascale_jax.kernels.tiles import candidates

Job = Callable[[], dict[str, Any]]
REPEATS = 5
PASS_BYTES = 2**30
"""Inputs of a pass, about: enough for some milliseconds, and for no cache."""


@dataclass(frozen=True)
class Shape:
    """An attention problem."""

    name: str
    batch: int
    length: int
    heads: int
    head: int


@dataclass(frozen=True)
class Sizes:
    """Shapes of the measurements; those of a dry run only exercise the code."""

    gemm: int
    copy: int
    shapes: tuple[Shape, ...]
    """The first is the targets' own."""
    windows: tuple[int | None, ...]
    rows: tuple[tuple[int, int], ...]
    """Tokens and width of norms and activations."""
    logits: tuple[tuple[int, int], ...]


REAL = Sizes(
    8192,
    2**28,
    (
        Shape("target", 1, 8192, 16, 128),
        Shape("175B shard", 1, 2048, 16, 96),
        Shape("175B shard, long", 1, 8192, 16, 96),
        Shape("1.3B", 8, 2048, 16, 128),
    ),
    (None, 1024, 512),
    ((16384, 2048), (2048, 12288)),
    ((2048, 1000), (8192, 50304)),
)
TINY = Sizes(64, 2**10, (Shape("target", 1, 64, 2, 32),), (None, 20), ((8, 64),), ((8, 48),))


def rate_jobs(target: Target, dry: bool) -> Iterator[tuple[str, Job]]:
    """Ceilings first: all else is read against them; then every operator with the table's first tile."""
    sizes = TINY if dry else REAL
    yield "ceiling: GEMM", partial(gemm_ceiling, sizes)
    yield "ceiling: copy", partial(copy_ceiling, sizes)
    first, *others = sizes.shapes
    yield from _attention_jobs(first, sizes.windows[:2], target, dry)
    for rows, width in sizes.rows:
        for implementation in ("triton", "reference"):
            label = f"{rows}x{width} by {implementation}"
            yield f"norm with residual {label}", partial(norm_rates, rows, width, implementation, target)
            yield f"gelu {label}", partial(activation_rates, rows, width, implementation, target)
    for rows, width in sizes.logits:
        for implementation in ("triton", "reference"):
            yield f"loss {rows}x{width} by {implementation}", partial(loss_rates, rows, width, implementation, target)
    for shape in others:
        yield from _attention_jobs(shape, sizes.windows, target, dry)


def _attention_jobs(shape: Shape, windows: Sequence[int | None], target: Target, dry: bool) -> Iterator[tuple[str, Job]]:
    for window in windows:
        for way in ("forward", "backward"):
            for implementation in ("triton",) if dry else ("triton", "cudnn"):
                label = f"attention {shape.name} window {window or 'full'} {way} by {implementation}"
                yield label, partial(attention_rate, shape, window, way, implementation, None, target)


def tile_jobs(target: Target, dry: bool) -> Iterator[tuple[str, Job]]:
    """Every candidate of the table on the shapes that matter, its values checked before it is timed."""
    sizes = TINY if dry else REAL
    heads = {shape.head: shape for shape in sizes.shapes[:2]}
    if not dry:
        heads |= {head: Shape(f"head {head}", 1, 4096, 16, head) for head in (64, 192, 256)}
    for head, shape in heads.items():
        q_tiles, kv_tiles = (candidates(f"attention.backward_{part}", target.architecture, head) for part in ("q", "kv"))
        pairs = [*((q_tiles[0], tile) for tile in kv_tiles), *((tile, kv_tiles[0]) for tile in q_tiles[1:])]
        for window in (None, 1024) if not dry else (20,):
            for tile in candidates("attention.forward", target.architecture, head):
                label = f"{shape.name} window {window or 'full'} forward: {tile.text}"
                yield label, partial(attention_rate, shape, window, "forward", "triton", (tile,), target)
            for q_tile, kv_tile in pairs:
                label = f"{shape.name} window {window or 'full'} backward: {q_tile.text}; {kv_tile.text}"
                yield label, partial(attention_rate, shape, window, "backward", "triton", (q_tile, kv_tile), target)


def gemm_ceiling(sizes: Sizes) -> dict[str, Any]:
    """TFLOP/s of a large bf16 product."""
    n = sizes.gemm
    tflops = 2 * n**3 / measure(jnp.matmul, inputs((n, n), 2)) / 1e12
    return {"result": _rate(tflops, "TFLOP/s"), "tflops": tflops}


def copy_ceiling(sizes: Sizes) -> dict[str, Any]:
    """GB/s of reading and writing a large array."""
    gbps = 4 * sizes.copy / measure(lambda x: x + 1, inputs((sizes.copy // 1024, 1024), 1)) / 1e9
    return {"result": _rate(gbps, "GB/s"), "gbps": gbps}


def attention_rate(
    shape: Shape, window: int | None, way: str, implementation: str, tiles: tuple[Tile, ...] | None, target: Target
) -> dict[str, Any]:
    """TFLOP/s over the visible keys, two products forward and five backward, whatever the kernels recompute."""
    forward, backward = _ways(window, way, implementation, tiles, target)
    if tiles is not None and (wrong := wrong_values(forward, backward, way, shape.head)):
        return {"result": wrong}
    B, S, H, K = shape.batch, shape.length, shape.heads, shape.head
    prepared = inputs((B, S, H, K), 4)
    if way == "forward":
        seconds = measure(lambda q, k, v, _: forward(q, k, v, None), prepared)
    else:
        ready = jax.jit(lambda q, k, v, _: forward(q, k, v, None))
        seconds = measure(
            lambda q, k, v, d_out, out, lse: backward(q, k, v, None, out, lse, d_out), [(*one, *ready(*one)) for one in prepared]
        )
    seen = min(window or S, S)
    pairs = seen * (seen + 1) // 2 + (S - seen) * seen
    tflops = (4 if way == "forward" else 10) * B * H * K * pairs / seconds / 1e12
    case = {"shape": shape.name, "length": S, "head": K, "window": window, "way": way, "implementation": implementation}
    tile = "; ".join(tile.text for tile in tiles or ())
    return {"result": _rate(tflops, "TFLOP/s"), "tflops": tflops, "seconds_each": seconds, "tile": tile, **case}


def _ways(window: int | None, way: str, implementation: str, tiles: tuple[Tile, ...] | None, target: Target) -> tuple[Any, Any]:
    """Forward and backward function of an implementation, or of Triton with tiles of one of them."""
    if tiles is None:
        options = {"window": window, "implementation": implementation, "target": target}
        return partial(attention.forward, **options), partial(attention.backward, **options)
    from megascale_jax.kernels.attention import triton

    options = {"window": window, "architecture": target.architecture}
    tile, pair = (tiles[0], None) if way == "forward" else (None, (tiles[0], tiles[-1]))
    return partial(triton.forward, tile=tile, **options), partial(triton.backward, tiles=pair, **options)


def wrong_values(forward: Any, backward: Any, way: str, head: int) -> str | None:
    """What is wrong with two functions at a small, odd length; a window longer than that is none."""
    dtype, length = ("float32", 45) if jax.default_backend() == "cpu" else ("bfloat16", 263)
    q, k, v, d_out = (jax.random.normal(jax.random.key(n), (1, length, heads, head), dtype) for n, heads in enumerate((2, 1, 1, 2)))
    ids = jnp.asarray([[1] * 20 + [2] * (length - 23) + [0] * 3], jnp.int32)
    window = forward.keywords["window"]
    wide_q, wide_k, wide_v, wide_d = (x.astype(jnp.float32) for x in (q, k, v, d_out))
    out, lse = forward(q, k, v, ids)
    want_out, want_lse = reference.forward(wide_q, wide_k, wide_v, ids, window=window)
    pairs = [(out, want_out)]
    if way == "backward":
        wanted = reference.backward(wide_q, wide_k, wide_v, ids, want_out, want_lse, wide_d, window=window)
        pairs = list(zip(backward(q, k, v, ids, out, lse, d_out), wanted, strict=True))
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    for got, want in pairs:
        worst = float(jnp.abs(got.astype(jnp.float32) - want).max() / jnp.maximum(jnp.abs(want).max(), 1.0))
        if not worst <= tolerance:
            return f"wrong: off by {worst:.1e} of the largest, tolerance {tolerance:.0e}"
    return None


def norm_rates(rows: int, width: int, implementation: str, target: Target) -> dict[str, Any]:
    """GB/s forward (two reads, two writes) and backward (three reads, a write: both inputs have one gradient)."""
    scale, bias = jnp.ones(width, jnp.float32), jnp.zeros(width, jnp.float32)

    def forward(x, added, *_):
        options = {"kind": "layernorm", "epsilon": 1e-5, "implementation": implementation, "target": target}
        return norm.add_norm(x, added, scale, bias, **options)

    def backward(x, _, d_total, d_y):
        # by the derivative at no addend, whose forward pass XLA drops
        return jax.vjp(lambda x: forward(x, None), x)[1]((d_total, d_y))

    ways = {"forward": (forward, 4), "backward": (backward, 4)}
    return _rates("norm", implementation, ways, inputs((rows, width), 4))


def activation_rates(rows: int, width: int, implementation: str, target: Target) -> dict[str, Any]:
    """GB/s forward (a read, a write) and backward (two reads, two writes)."""
    options = {"implementation": implementation, "target": target}
    ways = {
        "forward": (lambda x, _: gelu.activate(x, **options), 2),
        "backward": (lambda x, d_out: gelu.backward(x, None, d_out, **options)[::2], 4),
    }
    return _rates("activation", implementation, ways, inputs((rows, width), 2))


def loss_rates(rows: int, width: int, implementation: str, target: Target) -> dict[str, Any]:
    """GB/s of the statistics (a read) and of the gradient (a read, a write)."""
    targets, ones = jnp.zeros((1, rows), jnp.int32), jnp.ones((1, rows))
    options = {"implementation": implementation, "target": target}
    ways = {
        "statistics": (lambda x: loss.local_statistics(x, targets, jnp.int32(0), width, **options), 1),
        "gradient": (lambda x: loss.logits_gradient(x, ones, targets, jnp.int32(0), width, ones, **options), 2),
    }
    return _rates("loss", implementation, ways, inputs((1, rows, width), 1))


def _rates(operator: str, implementation: str, ways: dict[str, tuple[Callable, int]], prepared: list[tuple]) -> dict[str, Any]:
    """GB/s of every way, counting the arrays that the operator cannot do without."""
    array = prepared[0][0]
    found = {way: count * array.nbytes / measure(run, prepared) / 1e9 for way, (run, count) in ways.items()}
    result = ", ".join(f"{way} {_rate(value, 'GB/s')}" for way, value in found.items())
    rows, width = array.shape[-2:]
    return {"result": result, "gbps": found, "operator": operator, "implementation": implementation, "rows": rows, "width": width}


@lru_cache(maxsize=2)
def inputs(shape: tuple[int, ...], operands: int) -> list[tuple[jax.Array, ...]]:
    """Random bf16 operands of several calls."""
    size = 2 * operands * int(np.prod(shape))
    calls = 2 if jax.default_backend() == "cpu" else min(max(PASS_BYTES // size, 4), 32)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    keys = jax.random.split(jax.random.key(0), calls * operands)
    arrays = [make(key) for key in keys]
    return [tuple(arrays[call * operands : (call + 1) * operands]) for call in range(calls)]


def measure(run: Callable, prepared: list[tuple]) -> float:
    """Seconds of one call, median of several passes over all prepared operands in one program."""
    program = jax.jit(lambda calls: [run(*call) for call in calls])
    jax.block_until_ready(program(prepared))
    passes = []
    for _ in range(1 if jax.default_backend() == "cpu" else REPEATS):
        began_s = time.perf_counter()
        jax.block_until_ready(program(prepared))
        passes.append(time.perf_counter() - began_s)
    return statistics.median(passes) / len(prepared)


def _rate(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}"

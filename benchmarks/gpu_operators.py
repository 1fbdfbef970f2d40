"""Part (b): rates of every operator, by tile and implementation, beside the device's own ceilings.

A rate is the median of several runs, each of which takes the operator over many fresh inputs in one program, one after the other;
``optimization_barrier`` keeps XLA from computing less than the operator's whole result.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from megascale_jax.kernels.attention import api as attention
from megascale_jax.kernels.gelu import api as gelu
from megascale_jax.kernels.launch import Tile
from megascale_jax.kernels.loss import api as loss
from megascale_jax.kernels.norm import api as norm
from megascale_jax.kernels.target import Target
from megascale_jax.kernels.tiles import candidates

Job = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """Shapes of the measurements; those of ``--dry`` only exercise the code."""

    gemm: int
    copy: int
    attention: tuple[tuple[str, int, int, int, int], ...]
    """Name, batch, length, heads, head size."""
    windows: tuple[int | None, ...]
    rows: tuple[tuple[int, int], ...]
    """Tokens and width of norms and activations."""
    logits: tuple[tuple[int, int], ...]
    inputs: int
    repeats: int


REAL = Sizes(
    8192,
    2**29,
    (("target", 1, 8192, 16, 128), ("175B shard", 1, 2048, 16, 96), ("175B shard, long", 1, 8192, 16, 96), ("1.3B", 8, 2048, 16, 128)),
    (None, 1024, 512),
    ((16384, 2048), (2048, 12288), (16384, 8192)),
    ((2048, 1000), (8192, 50304)),
    8,
    7,
)
TINY = Sizes(64, 2**10, (("target", 1, 64, 2, 32),), (None, 20), ((8, 64),), ((8, 48),), 2, 2)


def operator_rows(target: Target, dry: bool) -> Iterator[tuple[str, Job]]:
    """Ceilings first: all else is read against them."""
    sizes = TINY if dry else REAL
    yield "ceiling: GEMM", partial(gemm_ceiling, sizes)
    yield "ceiling: copy", partial(copy_ceiling, sizes)
    for shape in sizes.attention:
        for window in sizes.windows:
            yield from attention_jobs(shape, window, sizes, target, dry)
    for rows, width in sizes.rows:
        for implementation in ("triton", "reference"):
            label = f"{rows}x{width} by {implementation}"
            yield f"norm with residual {label}", partial(norm_rates, rows, width, implementation, sizes, target)
            yield f"gelu {label}", partial(activation_rates, rows, width, implementation, sizes, target)
    for rows, width in sizes.logits:
        for implementation in ("triton", "reference"):
            yield f"loss {rows}x{width} by {implementation}", partial(loss_rates, rows, width, implementation, sizes, target)


def gemm_ceiling(sizes: Sizes) -> dict[str, Any]:
    """TFLOP/s of a large bf16 product."""
    n = sizes.gemm
    seconds = measure(lambda x: x @ x, (n, n), sizes)
    return {"result": rate(2 * n**3 / seconds / 1e12, "TFLOP/s"), "tflops": 2 * n**3 / seconds / 1e12}


def copy_ceiling(sizes: Sizes) -> dict[str, Any]:
    """GB/s of reading and writing a large array."""
    seconds = measure(lambda x: x + 1, (sizes.copy // 1024, 1024), sizes, inputs=2)
    return {"result": rate(2 * 2 * sizes.copy / seconds / 1e9, "GB/s"), "gbps": 4 * sizes.copy / seconds / 1e9}


def attention_jobs(shape, window: int | None, sizes: Sizes, target: Target, dry: bool) -> Iterator[tuple[str, Job]]:
    """Forward and backward by cuDNN, and by Triton with every candidate of the table."""
    name, *_, head = shape
    what = f"attention {name} window {window or 'full'}"
    for implementation in () if dry else ("cudnn",):
        for backward in (False, True):
            yield f"{what} {_way(backward)} by {implementation}", partial(attention_rate, shape, window, backward, None, sizes, target)
    architecture = target.architecture
    for tile in candidates("attention.forward", architecture, head):
        yield f"{what} forward by triton: {tile.text}", partial(attention_rate, shape, window, False, (tile,), sizes, target)
    pairs = [candidates(f"attention.backward_{part}", architecture, head) for part in ("q", "kv")]
    first_q, first_kv = (found[0] for found in pairs)
    for q_tile, kv_tile in [*((first_q, tile) for tile in pairs[1]), *((tile, first_kv) for tile in pairs[0][1:])]:
        label = f"{what} backward by triton: {q_tile.text}; {kv_tile.text}"
        yield label, partial(attention_rate, shape, window, True, (q_tile, kv_tile), sizes, target)


def attention_rate(shape, window: int | None, backward: bool, tiles: tuple[Tile, ...] | None, sizes: Sizes, target: Target):
    """TFLOP/s over the visible keys, two products forward and five backward, whatever the kernels recompute."""
    name, B, S, H, K = shape
    options = {"window": window, "implementation": "cudnn", "target": target}
    forward: Callable = partial(attention.forward, **options)
    back: Callable = partial(attention.backward, **options)
    if tiles is not None:
        from megascale_jax.kernels.attention import triton

        tile = tiles[0] if not backward else None
        forward = partial(triton.forward, window=window, architecture=target.architecture, tile=tile)
        back = partial(triton.backward, window=window, architecture=target.architecture, tiles=(tiles[0], tiles[-1]))

    def one(x):
        q, k, v, d_out = x
        if not backward:
            return forward(q, k, v, None)[0]
        out, lse = jax.lax.optimization_barrier(forward(q, k, v, None))
        return back(q, k, v, None, out, lse, d_out)

    seconds = measure(one, (4, B, S, H, K), sizes)
    if backward:
        seconds -= measure(lambda x: forward(x[0], x[1], x[2], None)[0], (4, B, S, H, K), sizes)
    seen = min(window or S, S)
    pairs = seen * (seen + 1) // 2 + (S - seen) * seen
    tflops = (10 if backward else 4) * B * H * K * pairs / seconds / 1e12
    case = {"shape": name, "length": S, "head": K, "window": window, "way": _way(backward)}
    by = "cudnn" if tiles is None else "triton"
    return {"result": rate(tflops, "TFLOP/s"), "tflops": tflops, "seconds_each": seconds, "implementation": by, **case}


def norm_rates(rows: int, width: int, implementation: str, sizes: Sizes, target: Target) -> dict[str, Any]:
    """GB/s forward (two reads, two writes) and forward with backward (five reads and three writes of a row)."""
    vector = jnp.ones(width, jnp.float32)

    def run(x):
        options = {"kind": "layernorm", "epsilon": 1e-5, "implementation": implementation, "target": target}
        return norm.add_norm(x[0], x[1], vector, vector, **options)

    def both(x):
        results, pull = jax.vjp(lambda x: run(x), x[:2])
        return pull((x[2], x[3])), results

    size = 2 * rows * width
    return rates("norm", implementation, {"forward": (run, 4 * size), "both": (both, 8 * size)}, (4, rows, width), sizes)


def activation_rates(rows: int, width: int, implementation: str, sizes: Sizes, target: Target) -> dict[str, Any]:
    """GB/s forward (a read, a write) and backward (two reads, two writes)."""
    options = {"implementation": implementation, "target": target}
    size = 2 * rows * width
    ways = {
        "forward": (lambda x: gelu.activate(x[0], **options), 2 * size),
        "backward": (lambda x: gelu.backward(x[0], None, x[1], **options)[::2], 4 * size),
    }
    return rates("activation", implementation, ways, (2, rows, width), sizes)


def loss_rates(rows: int, width: int, implementation: str, sizes: Sizes, target: Target) -> dict[str, Any]:
    """GB/s of the statistics (a read) and of the gradient (a read, a write)."""
    targets, ones = jnp.zeros((1, rows), jnp.int32), jnp.ones((1, rows))
    options = {"implementation": implementation, "target": target}
    size = 2 * rows * width
    ways = {
        "statistics": (lambda x: loss.local_statistics(x, targets, jnp.int32(0), width, **options), size),
        "gradient": (lambda x: loss.logits_gradient(x, ones, targets, jnp.int32(0), width, ones, **options), 2 * size),
    }
    return rates("loss", implementation, ways, (1, rows, width), sizes)


def rates(
    operator: str, implementation: str, ways: dict[str, tuple[Callable, int]], shape: tuple[int, ...], sizes: Sizes
) -> dict[str, Any]:
    """GB/s of every way, counting the bytes that the operator cannot do without."""
    found = {way: size / measure(run, shape, sizes) / 1e9 for way, (run, size) in ways.items()}
    result = ", ".join(f"{way} {rate(value, 'GB/s')}" for way, value in found.items())
    return {"result": result, "gbps": found, "operator": operator, "implementation": implementation, "rows": shape[-2], "width": shape[-1]}


def measure(run: Callable, shape: tuple[int, ...], sizes: Sizes, inputs: int | None = None) -> float:
    """Seconds of one call, median of several passes over fresh random inputs in one program."""
    inputs = inputs or sizes.inputs
    keys = jax.random.split(jax.random.key(0), inputs)
    stacked = jax.jit(jax.vmap(lambda key: jax.random.normal(key, shape, jnp.bfloat16)))(keys)

    def step(total, x):
        results = jax.lax.optimization_barrier(run(x))
        # one element of every result, so that none may be left out
        picked = [leaf.ravel()[0].astype(jnp.float32) for leaf in jax.tree.leaves(results) if leaf.size > 1]
        return total + sum(picked), None

    program = jax.jit(lambda xs: jax.lax.scan(step, jnp.float32(0), xs)[0])
    jax.block_until_ready(program(stacked))
    passes = []
    for _ in range(sizes.repeats):
        began_s = time.perf_counter()
        jax.block_until_ready(program(stacked))
        passes.append(time.perf_counter() - began_s)
    return statistics.median(passes) / inputs


def rate(value: float, unit: str) -> str:
    """Three digits."""
    return f"{value:.3g} {unit}"


def _way(backward: bool) -> str:
    return "backward" if backward else "forward"

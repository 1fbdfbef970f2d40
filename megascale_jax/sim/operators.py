"""Seconds of one kernel on one device: matrix products with tiles and waves, attention, memory-bound passes. No JAX.

A matrix product is cut into tiles, and each wave of tiles keeps every multiprocessor busy once, full or not. That a 530 B layer's products
run up to an eighth faster than a 175 B layer's on the same GPU comes out of this alone.
"""

from functools import lru_cache
from math import ceil

from megascale_jax.sim.device import Device

_TILES = ((128, 256, 1), (256, 128, 1), (128, 128, 2))
"""Rows, columns, tiles at once on a multiprocessor: those of cuBLAS' and CUTLASS' large bf16 kernels."""
_ACCUMULATOR_BYTES = 8
"""An fp32 gradient is read and written where a product adds to it."""
_EXPOSED = 0.5
"""Share of that traffic that the products beside do not hide (assumed)."""
ELEMENT_BYTES = 2
"""bf16."""


@lru_cache(maxsize=1 << 16)
def gemm_seconds(device: Device, rows: int, columns: int, inner: int, batch: int = 1, accumulates: bool = False) -> float:
    """``batch`` products of (rows, inner) with (inner, columns); ``accumulates``: added to an fp32 array, as weight gradients are.

    Waves times a tile's time, of the best tile; not below the operands' traffic; plus a kernel's start.
    """
    rate = device.peak / device.multiprocessors * device.gemm_ceiling
    memory = device.memory_bytes_per_s / device.multiprocessors
    best = float("inf")
    for tile_rows, tile_columns, at_once in _TILES:
        tiles = ceil(rows / tile_rows) * ceil(columns / tile_columns) * batch
        waves = ceil(tiles / (device.multiprocessors * at_once))
        slowdown = device.small_tile_slowdown if at_once > 1 else 1.0
        tile_s = 2 * tile_rows * tile_columns * (inner + device.tile_overhead_k) / rate * slowdown
        if accumulates:
            tile_s += _EXPOSED * _ACCUMULATOR_BYTES * tile_rows * tile_columns / memory
        best = min(best, waves * at_once * tile_s)
    result_bytes = _ACCUMULATOR_BYTES if accumulates else ELEMENT_BYTES
    traffic = batch * (ELEMENT_BYTES * inner * (rows + columns) + result_bytes * rows * columns)
    return max(best, traffic / device.memory_bytes_per_s) + device.kernel_s


def pass_seconds(device: Device, elements: float, passes: float) -> float:
    """A memory-bound kernel that goes ``passes`` times over an array of bf16 elements."""
    return elements * passes * ELEMENT_BYTES / device.memory_bytes_per_s + device.kernel_s


def fused_attention_seconds(device: Device, flops: float, share: float) -> float:
    """Attention in one kernel that reaches a ``share`` of the peak over the FLOPs of the pairs that a query sees."""
    return flops / (device.peak * share) + device.kernel_s

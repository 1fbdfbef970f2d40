"""FlashAttention-2 in Triton: causal, windowed, inside segments, with grouped query heads. GPU targets, or the interpreter.

Blocks of keys outside the window or in the future are never loaded: the cost is O(S W). The backward pass is two kernels, the gradient
of q over tiles of queries, those of k and v over tiles of keys with the group's query heads inside: no atomics, the same bits
every run.
"""

import jax
import jax.numpy as jnp

from megascale_jax.kernels.attention.triton_kernels import backward_kv_kernel, backward_q_kernel, forward_kernel
from megascale_jax.kernels.launch import Architecture, Launch, Tile, cdiv, like, run
from megascale_jax.kernels.tiles import tile_of


def forward(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segment_ids_BS: jax.Array | None,
    *,
    window: int | None,
    architecture: Architecture,
    tile: Tile | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Same contract as the reference."""
    launch = forward_launch(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, window, tile or tile_of("attention.forward", architecture, q_BSHK))
    # behind a barrier, or XLA runs the kernel twice in a loop that stacks its results
    out_BSHK, lse_BHS = jax.lax.optimization_barrier(run(launch, architecture))
    return out_BSHK, lse_BHS


def backward(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segment_ids_BS: jax.Array | None,
    out_BSHK: jax.Array,
    lse_BHS: jax.Array,
    d_out_BSHK: jax.Array,
    *,
    window: int | None,
    architecture: Architecture,
    tiles: tuple[Tile, Tile] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Same contract as the reference; ``tiles`` of the gradient of q, and of those of k and v."""
    q_tile, kv_tile = tiles or (tile_of(f"attention.backward_{part}", architecture, q_BSHK) for part in ("q", "kv"))
    operands = (q_BSHK, k_BTGK, v_BTGK, segment_ids_BS)
    d_q, delta_BHS = run(backward_q_launch(*operands, out_BSHK, lse_BHS, d_out_BSHK, window, q_tile), architecture)
    launches = backward_kv_launches(*operands, lse_BHS, d_out_BSHK, delta_BHS, window, kv_tile)
    results = [run(launch, architecture) for launch in launches]
    return d_q, results[0][0], results[-1][1]


def forward_launch(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, window: int | None, tile: Tile) -> Launch:
    """The forward pass over tiles of queries."""
    B, S, H, _ = q_BSHK.shape
    results = (*like(q_BSHK), jax.ShapeDtypeStruct((B, H, S), jnp.float32))
    operands = (q_BSHK, k_BTGK, v_BTGK, _segment_operand(segment_ids_BS))
    grid = (cdiv(S, tile.blocks["BLOCK_Q"]), B * H)
    constants = _constants(q_BSHK, k_BTGK, segment_ids_BS, window)
    flops = 2 * _product_flops(q_BSHK, window)
    return Launch("attention.forward", forward_kernel, operands, results, grid, constants, tile, flops)


def backward_q_launch(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, out_BSHK, lse_BHS, d_out_BSHK, window: int | None, tile: Tile) -> Launch:
    """The gradient of q, and ``sum(out * d_out)`` of every query."""
    B, S, H, _ = q_BSHK.shape
    operands = (q_BSHK, k_BTGK, v_BTGK, _segment_operand(segment_ids_BS), out_BSHK, lse_BHS, d_out_BSHK)
    grid = (cdiv(S, tile.blocks["BLOCK_Q"]), B * H)
    constants = _constants(q_BSHK, k_BTGK, segment_ids_BS, window)
    flops = 3 * _product_flops(q_BSHK, window)
    return Launch("attention.backward_q", backward_q_kernel, operands, like(q_BSHK, lse_BHS), grid, constants, tile, flops)


def backward_kv_launches(
    q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, lse_BHS, d_out_BSHK, delta_BHS, window: int | None, tile: Tile
) -> tuple[Launch, ...]:
    """The gradients of k and v by one kernel, or where the tile says ``SPLIT`` by one each, for which registers suffice longer."""
    B, S, G, _ = k_BTGK.shape
    operands = (q_BSHK, k_BTGK, v_BTGK, _segment_operand(segment_ids_BS), lse_BHS, d_out_BSHK, delta_BHS)
    blocks = {name: size for name, size in tile.blocks.items() if name != "SPLIT"}
    grid = (cdiv(S, blocks["BLOCK_K"]), B * G)
    constants = _constants(q_BSHK, k_BTGK, segment_ids_BS, window)
    unused, (whole,) = jax.ShapeDtypeStruct((1,), k_BTGK.dtype), like(k_BTGK)
    product = _product_flops(q_BSHK, window)

    def launch(want_k: bool, want_v: bool) -> Launch:
        results = (whole if want_k else unused, whole if want_v else unused)
        wants = {"WANT_K": want_k, "WANT_V": want_v}
        # the scores, then two products for k's gradient and one for v's
        flops = (1 + 2 * want_k + want_v) * product
        cut = Tile(blocks, tile.warps, tile.stages)
        return Launch("attention.backward_kv", backward_kv_kernel, operands, results, grid, {**constants, **wants}, cut, flops)

    return (launch(True, False), launch(False, True)) if tile.blocks["SPLIT"] else (launch(True, True),)


def _segment_operand(segment_ids_BS: jax.Array | None) -> jax.Array:
    return jnp.ones(1, jnp.int32) if segment_ids_BS is None else segment_ids_BS


def _constants(q_BSHK: jax.Array, k_BTGK: jax.Array, segment_ids_BS: jax.Array | None, window: int | None) -> dict[str, float | int | bool]:
    _, S, H, K = q_BSHK.shape
    large = 1 << (K.bit_length() - 1)
    return {
        "SCALE": K**-0.5,
        "S": S,
        "H": H,
        "G": k_BTGK.shape[2],
        "K1": large,
        "K2": K - large,
        "WINDOW": S if window is None else min(window, S),
        "SEGMENTS": segment_ids_BS is not None,
    }


def _product_flops(q_BSHK: jax.Array, window: int | None) -> float:
    """FLOPs of one of the products over the keys that queries see, segments not counted."""
    B, S, H, K = q_BSHK.shape
    W = S if window is None else min(window, S)
    return 2.0 * B * H * K * (W * (W + 1) // 2 + (S - W) * W)

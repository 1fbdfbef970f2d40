"""Rotary positions, and the way from projections to heads and back."""

import jax
import jax.numpy as jnp


def rotate(x_BSHK: jax.Array, positions_BS: jax.Array, base: float) -> jax.Array:
    """Rotary embedding, interleaved pairs ``(x0, x1), (x2, x3), ...`` over the whole head, angles in fp32.

    Pair ``i`` of position ``p`` turns by ``p * base ** (-2 i / K)``.
    """
    K = x_BSHK.shape[-1]
    frequency = base ** (-jnp.arange(0, K, 2, dtype=jnp.float32) / K)
    angle_BS1P = positions_BS[:, :, None, None].astype(jnp.float32) * frequency
    cosine, sine = jnp.cos(angle_BS1P), jnp.sin(angle_BS1P)
    even, odd = x_BSHK[..., 0::2].astype(jnp.float32), x_BSHK[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
    return turned.reshape(x_BSHK.shape).astype(x_BSHK.dtype)


def split_heads(
    qkv: tuple[jax.Array, jax.Array, jax.Array], positions_BS: jax.Array, *, head_dim: int, rotary_base: float | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projections of this rank, ``[B, S, H K]`` and twice ``[B, S, G K]``, as heads; q and k turned when ``rotary_base`` is given."""
    q_BSHK, k_BSGK, v_BSGK = (x.reshape(*x.shape[:2], -1, head_dim) for x in qkv)
    if rotary_base is not None:
        q_BSHK = rotate(q_BSHK, positions_BS, rotary_base)
        k_BSGK = rotate(k_BSGK, positions_BS, rotary_base)
    return q_BSHK, k_BSGK, v_BSGK


def merge_heads(out_BSHK: jax.Array) -> jax.Array:
    """``[B, S, H K]``."""
    return out_BSHK.reshape(*out_BSHK.shape[:2], -1)

"""Rotary positions, and the way from projections to heads and back."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Rotary:
    """How q and k turn: the first ``size`` elements of each head, an even number, by frequencies of ``base``."""

    base: float
    size: int


def rotate(x_BSHK: jax.Array, positions_BS: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotary embedding, interleaved pairs ``(x0, x1), (x2, x3), ...`` of a head's first ``size`` elements, angles in fp32.

    Pair ``i`` of position ``p`` turns by ``p * base ** (-2 i / size)``.
    """
    if rotary.size < x_BSHK.shape[-1]:
        turned, kept = x_BSHK[..., : rotary.size], x_BSHK[..., rotary.size :]
        return jnp.concatenate([rotate(turned, positions_BS, rotary), kept], -1)
    K, base = rotary.size, rotary.base
    frequency = base ** (-jnp.arange(0, K, 2, dtype=jnp.float32) / K)
    angle_BS1P = positions_BS[:, :, None, None].astype(jnp.float32) * frequency
    cosine, sine = jnp.cos(angle_BS1P), jnp.sin(angle_BS1P)
    even, odd = x_BSHK[..., 0::2].astype(jnp.float32), x_BSHK[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
    return turned.reshape(x_BSHK.shape).astype(x_BSHK.dtype)


def split_heads(
    qkv: tuple[jax.Array, jax.Array, jax.Array], positions_BS: jax.Array, *, head_dim: int, rotary: Rotary | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projections of this rank, ``[B, S, H K]`` and twice ``[B, S, G K]``, as heads; q and k turned when ``rotary`` is given."""
    q_BSHK, k_BSGK, v_BSGK = (x.reshape(*x.shape[:2], -1, head_dim) for x in qkv)
    if rotary is not None:
        q_BSHK = rotate(q_BSHK, positions_BS, rotary)
        k_BSGK = rotate(k_BSGK, positions_BS, rotary)
    return q_BSHK, k_BSGK, v_BSGK


def merge_heads(out_BSHK: jax.Array) -> jax.Array:
    """``[B, S, H K]``."""
    return out_BSHK.reshape(*out_BSHK.shape[:2], -1)

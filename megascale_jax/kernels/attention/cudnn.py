"""Attention by cuDNN through ``jax.nn``: GPU targets only; lowering fails where cuDNN or the target lacks a case."""

import jax

from megascale_jax.kernels.attention.reference import visible_keys


def attention(q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BS: jax.Array, *, window: int | None) -> jax.Array:
    """Same contract as the reference; segments and window enter as one mask."""
    seen_B1ST = visible_keys(segment_ids_BS, window)[:, None]
    return jax.nn.dot_product_attention(q_BSHK, k_BTGK, v_BTGK, mask=seen_B1ST, implementation="cudnn")


def forward(
    q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BS: jax.Array, *, window: int | None
) -> tuple[jax.Array, tuple[()]]:
    """`attention`; nothing is kept, `backward` runs the forward pass again."""
    return attention(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, window=window), ()


def backward(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segment_ids_BS: jax.Array,
    out_BSHK: jax.Array,
    saved: tuple[()],
    d_out_BSHK: jax.Array,
    *,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v."""
    del out_BSHK, saved
    _, pull = jax.vjp(lambda q, k, v: attention(q, k, v, segment_ids_BS, window=window), q_BSHK, k_BTGK, v_BTGK)
    return pull(d_out_BSHK)

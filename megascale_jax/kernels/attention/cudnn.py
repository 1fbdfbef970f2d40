"""Attention by cuDNN through ``jax.nn``: GPU targets only; lowering fails where cuDNN or the target lacks a case."""

import jax

from megascale_jax.kernels.attention.reference import visible_keys


def attention(q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BS: jax.Array, *, window: int | None) -> jax.Array:
    """Same contract as the reference; segments and window enter as one mask."""
    seen_B1ST = visible_keys(segment_ids_BS, window)[:, None]
    return jax.nn.dot_product_attention(q_BSHK, k_BTGK, v_BTGK, mask=seen_B1ST, implementation="cudnn")

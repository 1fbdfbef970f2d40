"""Attention as its definition: causal, windowed, inside segments, with grouped query heads. The specification of every kernel."""

import jax
import jax.numpy as jnp


def visible_keys(segment_ids_BS: jax.Array, window: int | None) -> jax.Array:
    """Boolean ``[B, S, T]``: key ``t`` is seen by query ``s``.

    True where ``t <= s``, ``s - t < window`` (the window counts the query itself; ``None``: no limit) and both lie in
    one segment. Row ``s`` sees ``min(s + 1, window)`` keys of its own segment.
    """
    length = segment_ids_BS.shape[1]
    distance_ST = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    seen_ST = distance_ST >= 0
    if window is not None and window < length:
        seen_ST &= distance_ST < window
    return seen_ST & (segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :])


def attention(q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BS: jax.Array, *, window: int | None) -> jax.Array:
    """Softmax attention, scores and softmax in fp32, ``[B, S, H, K]`` in the type of ``q``.

    Shapes: q ``[B, S, H, K]``; k, v ``[B, T, G, K]`` with T = S and H a multiple of G; segment ids int32 ``[B, S]``.
    Builds the ``S x T`` scores; meant for CPU runs and as the reference.
    """
    B, S, H, K = q_BSHK.shape
    G = k_BTGK.shape[2]
    q_BSGRK = q_BSHK.reshape(B, S, G, H // G, K)
    scores_BGRST = jnp.einsum("bsgrk,btgk->bgrst", q_BSGRK, k_BTGK, preferred_element_type=jnp.float32) * K**-0.5
    seen_BST = visible_keys(segment_ids_BS, window)
    scores_BGRST = jnp.where(seen_BST[:, None, None], scores_BGRST, jnp.finfo(scores_BGRST.dtype).min)
    weights_BGRST = jax.nn.softmax(scores_BGRST, axis=-1).astype(v_BTGK.dtype)
    return jnp.einsum("bgrst,btgk->bsgrk", weights_BGRST, v_BTGK).reshape(B, S, H, K)

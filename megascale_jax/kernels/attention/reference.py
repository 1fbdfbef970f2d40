"""Attention as its definition: causal, windowed, inside segments, with grouped query heads. The specification of every kernel.

The gradient is written by hand, as the kernels have it: what meets q and k again is in their type, so all five products
of a bf16 run are bf16 ones, and one array of weights is kept rather than the chain of the softmax.
"""

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
    # N: the queries of one group, its H / G heads of each position side by side
    q_BNGK = q_BSHK.reshape(B, S, G, H // G, K).swapaxes(2, 3).reshape(B, -1, G, K)
    seen_BNT = jnp.repeat(visible_keys(segment_ids_BS, window), H // G, axis=1)
    out_BNGK = _attend(q_BNGK, k_BTGK, v_BTGK, seen_BNT)
    return out_BNGK.reshape(B, S, H // G, G, K).swapaxes(2, 3).reshape(B, S, H, K)


@jax.custom_vjp
def _attend(q_BNGK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, seen_BNT: jax.Array) -> jax.Array:
    return _forward(q_BNGK, k_BTGK, v_BTGK, seen_BNT)[0]


def _forward(q_BNGK, k_BTGK, v_BTGK, seen_BNT):
    scores_BGNT = jnp.einsum("bngk,btgk->bgnt", q_BNGK, k_BTGK, preferred_element_type=jnp.float32) * q_BNGK.shape[-1] ** -0.5
    scores_BGNT = jnp.where(seen_BNT[:, None], scores_BGNT, jnp.finfo(jnp.float32).min)
    weights_BGNT = jax.nn.softmax(scores_BGNT, axis=-1).astype(v_BTGK.dtype)
    out_BNGK = jnp.einsum("bgnt,btgk->bngk", weights_BGNT, v_BTGK)
    return out_BNGK, (q_BNGK, k_BTGK, v_BTGK, weights_BGNT, out_BNGK)


def _backward(residuals, d_out_BNGK):
    q_BNGK, k_BTGK, v_BTGK, weights_BGNT, out_BNGK = residuals
    d_v_BTGK = jnp.einsum("bgnt,bngk->btgk", weights_BGNT, d_out_BNGK)
    d_weights_BGNT = jnp.einsum("bngk,btgk->bgnt", d_out_BNGK, v_BTGK, preferred_element_type=jnp.float32)
    mean_BGN1 = (d_out_BNGK.astype(jnp.float32) * out_BNGK).sum(-1, keepdims=True).swapaxes(1, 2)
    d_scores_BGNT = (weights_BGNT * (d_weights_BGNT - mean_BGN1) * q_BNGK.shape[-1] ** -0.5).astype(q_BNGK.dtype)
    d_q_BNGK = jnp.einsum("bgnt,btgk->bngk", d_scores_BGNT, k_BTGK)
    d_k_BTGK = jnp.einsum("bgnt,bngk->btgk", d_scores_BGNT, q_BNGK)
    return d_q_BNGK, d_k_BTGK, d_v_BTGK, None


_attend.defvjp(_forward, _backward)

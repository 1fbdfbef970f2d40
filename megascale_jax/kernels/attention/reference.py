"""Attention as its definition: causal, windowed, inside segments, with grouped query heads. The specification of every kernel.

It builds the ``S x S`` scores; meant for CPU runs. The gradient is written by hand, as the kernels have it.
"""

import jax
import jax.numpy as jnp


def visible_keys(segment_ids_BS: jax.Array, window: int | None) -> jax.Array:
    """Boolean ``[B, S, T]``: key ``t`` is seen by query ``s``.

    True where ``t <= s``, ``s - t < window`` (the window counts the query itself; ``None``: no limit) and both lie in
    one segment that is not 0, the padding. Row ``s`` sees ``min(s + 1, window)`` keys of its own segment.
    """
    length = segment_ids_BS.shape[1]
    distance_ST = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    seen_ST = distance_ST >= 0
    if window is not None and window < length:
        seen_ST &= distance_ST < window
    return seen_ST & (segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]) & (segment_ids_BS > 0)[:, :, None]


def forward(
    q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BS: jax.Array | None, *, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """The output, ``[B, S, H, K]`` in the type of ``q``, and the log-sum-exp, fp32 ``[B, H, S]``; scores and softmax in fp32."""
    B, S, H, _ = q_BSHK.shape
    scores_BGNT = _scores(q_BSHK, k_BTGK, segment_ids_BS, window)
    lse_BGN = jax.nn.logsumexp(scores_BGNT, axis=-1)
    lse_BGN = jnp.where(jnp.isneginf(lse_BGN), jnp.inf, lse_BGN)  # sees nothing: all its weights are 0
    weights_BGNT = jnp.exp(scores_BGNT - lse_BGN[..., None])
    out_BNGK = jnp.einsum("bgnt,btgk->bngk", weights_BGNT.astype(v_BTGK.dtype), v_BTGK)
    return _ungroup(out_BNGK, H), lse_BGN.reshape(B, -1, S, H // k_BTGK.shape[2]).swapaxes(2, 3).reshape(B, H, S)


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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v; the products meet q, k and v in their own type, as those of the kernels do."""
    H, G, K = q_BSHK.shape[2], *k_BTGK.shape[2:]
    lse_BGN = lse_BHS.reshape(lse_BHS.shape[0], G, H // G, -1).swapaxes(2, 3).reshape(lse_BHS.shape[0], G, -1)
    weights_BGNT = jnp.exp(_scores(q_BSHK, k_BTGK, segment_ids_BS, window) - lse_BGN[..., None])
    q_BNGK, out_BNGK, d_out_BNGK = (_group(x, G) for x in (q_BSHK, out_BSHK, d_out_BSHK))
    d_v_BTGK = jnp.einsum("bgnt,bngk->btgk", weights_BGNT.astype(v_BTGK.dtype), d_out_BNGK)
    d_weights_BGNT = jnp.einsum("bngk,btgk->bgnt", d_out_BNGK, v_BTGK, preferred_element_type=jnp.float32)
    mean_BGN1 = (d_out_BNGK.astype(jnp.float32) * out_BNGK).sum(-1, keepdims=True).swapaxes(1, 2)
    d_scores_BGNT = (weights_BGNT * (d_weights_BGNT - mean_BGN1) * K**-0.5).astype(q_BSHK.dtype)
    d_q_BNGK = jnp.einsum("bgnt,btgk->bngk", d_scores_BGNT, k_BTGK)
    d_k_BTGK = jnp.einsum("bgnt,bngk->btgk", d_scores_BGNT, q_BNGK)
    return _ungroup(d_q_BNGK, H), d_k_BTGK, d_v_BTGK


def _scores(q_BSHK: jax.Array, k_BTGK: jax.Array, segment_ids_BS: jax.Array | None, window: int | None) -> jax.Array:
    """Scores, fp32 ``[B, G, N, T]``; minus infinity where a key is not seen."""
    H, G = q_BSHK.shape[2], k_BTGK.shape[2]
    segment_ids_BS = jnp.ones(q_BSHK.shape[:2], jnp.int32) if segment_ids_BS is None else segment_ids_BS
    seen_BNT = jnp.repeat(visible_keys(segment_ids_BS, window), H // G, axis=1)
    scores_BGNT = jnp.einsum("bngk,btgk->bgnt", _group(q_BSHK, G), k_BTGK, preferred_element_type=jnp.float32) * q_BSHK.shape[-1] ** -0.5
    return jnp.where(seen_BNT[:, None], scores_BGNT, -jnp.inf)


def _group(x_BSHK: jax.Array, groups: int) -> jax.Array:
    """``[B, N, G, K]``; N: the queries of one group, its H / G heads of each position side by side."""
    B, S, H, K = x_BSHK.shape
    return x_BSHK.reshape(B, S, groups, H // groups, K).swapaxes(2, 3).reshape(B, -1, groups, K)


def _ungroup(x_BNGK: jax.Array, heads: int) -> jax.Array:
    B, N, G, K = x_BNGK.shape
    return x_BNGK.reshape(B, N * G // heads, heads // G, G, K).swapaxes(2, 3).reshape(B, -1, heads, K)

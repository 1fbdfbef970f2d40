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
    heads = q_BSHK.shape[2]
    return _ungroup(_attend(*_operands(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, window)), heads)


def forward(
    q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BS: jax.Array, *, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """`attention` and the log-sum-exp of every query's scores, fp32 ``[B, S, H]``: all that `backward` needs besides its inputs."""
    operands = _operands(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, window)
    scores_BGNT = _scores(*operands)
    lse_BGN = jax.nn.logsumexp(scores_BGNT, axis=-1)
    weights_BGNT = jnp.exp(scores_BGNT - lse_BGN[..., None]).astype(v_BTGK.dtype)
    out_BNGK = jnp.einsum("bgnt,btgk->bngk", weights_BGNT, v_BTGK)
    heads = q_BSHK.shape[2]
    return _ungroup(out_BNGK, heads), _ungroup(lse_BGN.swapaxes(1, 2)[..., None], heads)[..., 0]


def backward(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segment_ids_BS: jax.Array,
    out_BSHK: jax.Array,
    lse_BSH: jax.Array,
    d_out_BSHK: jax.Array,
    *,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v from the output and the log-sum-exp that `forward` gave."""
    heads, groups = q_BSHK.shape[2], k_BTGK.shape[2]
    operands = _operands(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, window)
    lse_BGN = _group(lse_BSH[..., None], groups)[..., 0].swapaxes(1, 2)
    weights_BGNT = jnp.exp(_scores(*operands) - lse_BGN[..., None]).astype(v_BTGK.dtype)
    d_q_BNGK, d_k_BTGK, d_v_BTGK, _ = _backward((*operands[:3], weights_BGNT, _group(out_BSHK, groups)), _group(d_out_BSHK, groups))
    return _ungroup(d_q_BNGK, heads), d_k_BTGK, d_v_BTGK


def _group(x_BSHK: jax.Array, groups: int) -> jax.Array:
    """``[B, N, G, K]``; N: the queries of one group, its H / G heads of each position side by side."""
    B, S, H, K = x_BSHK.shape
    return x_BSHK.reshape(B, S, groups, H // groups, K).swapaxes(2, 3).reshape(B, -1, groups, K)


def _ungroup(x_BNGK: jax.Array, heads: int) -> jax.Array:
    B, N, G, K = x_BNGK.shape
    return x_BNGK.reshape(B, N * G // heads, heads // G, G, K).swapaxes(2, 3).reshape(B, -1, heads, K)


def _operands(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, window):
    H, G = q_BSHK.shape[2], k_BTGK.shape[2]
    return _group(q_BSHK, G), k_BTGK, v_BTGK, jnp.repeat(visible_keys(segment_ids_BS, window), H // G, axis=1)


def _scores(q_BNGK, k_BTGK, _, seen_BNT):
    scores_BGNT = jnp.einsum("bngk,btgk->bgnt", q_BNGK, k_BTGK, preferred_element_type=jnp.float32) * q_BNGK.shape[-1] ** -0.5
    return jnp.where(seen_BNT[:, None], scores_BGNT, jnp.finfo(jnp.float32).min)


@jax.custom_vjp
def _attend(q_BNGK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, seen_BNT: jax.Array) -> jax.Array:
    return _forward(q_BNGK, k_BTGK, v_BTGK, seen_BNT)[0]


def _forward(q_BNGK, k_BTGK, v_BTGK, seen_BNT):
    weights_BGNT = jax.nn.softmax(_scores(q_BNGK, k_BTGK, v_BTGK, seen_BNT), axis=-1).astype(v_BTGK.dtype)
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

"""Attention by cuDNN: GPU targets only; lowering fails where cuDNN or the target lacks a case. Compiled, never run, here.

No mask of ``S x S`` is built. Rows of several documents go in as cuDNN's packed layout, the length and offset of every
document, which needs an H100 or newer and has room for ``max_documents`` of them; with ``max_documents`` 1 a row is one
document and plain causal. The run checks its batches against that number. `jax.nn` has neither the packed layout nor the
backward pass apart from the forward one, hence the primitives beneath it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn


def forward(
    q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BS: jax.Array | None, *, window: int | None, max_documents: int
) -> tuple[jax.Array, jax.Array]:
    """Same contract as the reference; padding (segment 0) must end a row. The log-sum-exp of every query is fp32 ``[B, H, S]``;
    packed: ``[B * max_documents, H, S]``, mostly unused."""
    segment_ids_BS = segment_ids_BS if max_documents > 1 else None
    operands, options = _operands(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, max_documents), _options(q_BSHK, segment_ids_BS, window)
    out, lse = cudnn._dot_product_attention_fwd_p_wrapper.bind(*operands, is_training=True, **options)
    return _without_padding(out, segment_ids_BS), lse


def backward(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segment_ids_BS: jax.Array | None,
    out_BSHK: jax.Array,
    lse: jax.Array,
    d_out_BSHK: jax.Array,
    *,
    window: int | None,
    max_documents: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v from the output and the log-sum-exp that `forward` gave."""
    segment_ids_BS = segment_ids_BS if max_documents > 1 else None
    operands, options = _operands(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, max_documents), _options(q_BSHK, segment_ids_BS, window)
    gradients = cudnn._dot_product_attention_bwd_p_wrapper.bind(*operands, lse, out_BSHK, d_out_BSHK, **options)
    d_q, d_k, d_v = (_without_padding(gradient, segment_ids_BS) for gradient in gradients[:3])
    return d_q, d_k, d_v


def _without_padding(x_BSHK: jax.Array, segment_ids_BS: jax.Array | None) -> jax.Array:
    """Zero outside all documents, where the packed layout may leave anything."""
    return x_BSHK if segment_ids_BS is None else jnp.where((segment_ids_BS > 0)[:, :, None, None], x_BSHK, 0)


def _operands(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids_BS: jax.Array | None, max_documents: int) -> tuple[jax.Array, ...]:
    """q, k, v, bias, lengths of q and of k, offsets of q and of k, two page tables."""
    unused = jnp.zeros(0, q.dtype)
    if segment_ids_BS is None:
        return (q, k, v, *[unused] * 7)
    lengths, offsets = _documents(segment_ids_BS, max_documents)
    return (q, k, v, unused, lengths, lengths, offsets, offsets, unused, unused)


def _options(q_BSHK: jax.Array, segment_ids_BS: jax.Array | None, window: int | None) -> dict[str, Any]:
    return {
        "scale": q_BSHK.shape[-1] ** -0.5,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": cudnn.MaskType.CAUSAL if segment_ids_BS is None else cudnn.MaskType.PADDING_CAUSAL,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": window if window is not None and window < q_BSHK.shape[1] else None,
    }


def _documents(segment_ids_BS: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Length ``[B, M]`` and first token ``[B, M + 1]`` of every segment 1, 2, ... of a row; -1 where there is none.

    Ends must not be among the first tokens: JAX lays the entries of all rows that are not negative one behind the other.
    """
    lengths_BM = (segment_ids_BS[:, :, None] == jnp.arange(1, count + 1)).sum(1, dtype=jnp.int32)
    present_BM = lengths_BM > 0
    firsts_BM = jnp.where(present_BM, jnp.cumsum(lengths_BM, axis=1) - lengths_BM, -1)
    return jnp.where(present_BM, lengths_BM, -1), jnp.pad(firsts_BM, ((0, 0), (0, 1)), constant_values=-1)

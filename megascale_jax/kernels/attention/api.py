"""Attention: causal, inside a window, inside segments, with grouped query heads. One interface to three implementations.

``triton`` is FlashAttention-2 of this package, ``cudnn`` NVIDIA's, ``reference`` the definition, which builds ``S x S`` arrays.
None has been measured yet, so without an explicit choice full attention goes to cuDNN, and what has a window, or what cuDNN
lacks, to Triton; on a CPU all goes to the reference.

Shapes: q ``[B, S, H, K]``; k, v ``[B, T, G, K]`` with T = S and H a multiple of G; segment ids int32 ``[B, S]``. Query ``s`` sees
key ``t`` where ``t <= s``, ``s - t < window`` (``None``: no limit) and both are in one segment; ``None`` is one
segment. Segment 0 is padding and ends a row: it sees nothing, its output and gradients are 0.
"""

from functools import partial

import jax
import jax.numpy as jnp

from megascale_jax.config.schema import TRITON_HEAD_SIZES
from megascale_jax.kernels.launch import is_interpreted
from megascale_jax.kernels.target import Implementation, KernelError, Refusals, Target, in_order, load, resolve

CUDNN_LARGEST_HEAD = 256
"""On compute capability 90 and later; half of it before."""
INTERPRETED_HEAD_SIZES = (16, 32, 48, *TRITON_HEAD_SIZES)
"""Small ones in the interpreter, which is slow."""
Gradients = tuple[jax.Array, jax.Array, jax.Array]


def attention(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segment_ids_BS: jax.Array | None = None,
    *,
    window: int | None = None,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array:
    """Softmax attention ``[B, S, H, K]`` in the type of ``q``, scores and softmax in fp32; differentiable in q, k and v.

    ``target`` defaults to the devices of this process. Raises KernelError, a ValueError, while the program is traced.
    """
    return _attention(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, window, implementation, target or Target.here())


def forward(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segment_ids_BS: jax.Array | None,
    *,
    window: int | None,
    implementation: str | None,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """`attention` and the log-sum-exp of every query's scores, natural, fp32: all that `backward` needs besides its inputs.

    The log-sum-exp is ``[B, H, S]``, infinite where a query sees nothing; cuDNN's packed one is larger and mostly unused.
    """
    chosen = _implementation(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, window, implementation, target)
    return chosen.run("forward", q_BSHK, k_BTGK, v_BTGK, segment_ids_BS)


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
    implementation: str | None,
    target: Target,
) -> Gradients:
    """Gradients of q, k and v from the output and the log-sum-exp that `forward` gave."""
    chosen = _implementation(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, window, implementation, target)
    B, S, H, _ = q_BSHK.shape
    for name, array in (("out", out_BSHK), ("d_out", d_out_BSHK)):
        if (array.shape, array.dtype) != (q_BSHK.shape, q_BSHK.dtype):
            raise KernelError(f"{name} is {array.dtype}{list(array.shape)}; expected that of q, {q_BSHK.dtype}{list(q_BSHK.shape)}")
    if lse.shape[1:] != (H, S) or lse.shape[0] % B:
        raise KernelError(f"the log-sum-exp has shape {lse.shape}; expected that of the forward pass, {(B, H, S)}")
    return chosen.run("backward", q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, out_BSHK, lse, d_out_BSHK)


def refusals(head_size: int, dtype: jnp.dtype, window: int | None, target: Target) -> Refusals:
    """Implementations in the order of preference for a case."""
    cudnn, triton = _cudnn_refusal(head_size, dtype, target), _triton_refusal(head_size, dtype, target)
    whole = {"cudnn": cudnn, "triton": triton, "reference": None}
    windowed = {"triton": triton, "cudnn": cudnn, "reference": None}
    return in_order(target, whole if window is None else windowed)


def choose(head_size: int, dtype: jnp.dtype, window: int | None, implementation: str | None, target: Target) -> str:
    """Name of the implementation of a case. Raises KernelError."""
    return resolve("attention", implementation, refusals(head_size, dtype, window, target))


def _cudnn_refusal(head_size: int, dtype: jnp.dtype, target: Target) -> str | None:
    if target.platform != "gpu":
        return "cuDNN runs on GPUs"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 and float16, got {dtype}"
    largest = CUDNN_LARGEST_HEAD if (target.compute_capability or 0) >= 90 else CUDNN_LARGEST_HEAD // 2
    if head_size % 8 or head_size > largest:
        return f"cuDNN takes heads of a multiple of 8 up to {largest} here, got {head_size}"
    if target.max_documents > 1 and (target.compute_capability or 0) < 90:
        return "cuDNN keeps the documents of a row apart on compute capability 90 and later; set system.kernels.max_documents=1 for one"
    return None


def _triton_refusal(head_size: int, dtype: jnp.dtype, target: Target) -> str | None:
    if refusal := target.triton_refusal:
        return refusal
    if is_interpreted():
        sizes = ", ".join(map(str, INTERPRETED_HEAD_SIZES))
        return None if head_size in INTERPRETED_HEAD_SIZES else f"the kernels take heads of {sizes}, got {head_size}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernels take bfloat16 and float16, got {dtype}"
    if head_size not in TRITON_HEAD_SIZES:
        return f"the kernels take heads of {', '.join(map(str, TRITON_HEAD_SIZES))}, got {head_size}"
    return None


def _implementation(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, window, implementation, target: Target) -> Implementation:
    _check(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, window)
    window = None if window is None or window >= q_BSHK.shape[1] else window
    name = choose(q_BSHK.shape[-1], q_BSHK.dtype, window, implementation, target)
    return load("attention", name, target).with_options(window=window)


def _check(q_BSHK, k_BTGK, v_BTGK, segment_ids_BS, window: int | None) -> None:
    if q_BSHK.ndim != 4 or k_BTGK.ndim != 4 or k_BTGK.shape != v_BTGK.shape:
        shapes = f"{q_BSHK.shape}, {k_BTGK.shape}, {v_BTGK.shape}"
        raise KernelError(f"q, k and v have shapes {shapes}; expected [B, S, H, K] and twice [B, S, G, K]")
    (B, S, H, K), (k_B, T, G, k_K) = q_BSHK.shape, k_BTGK.shape
    if (k_B, T, k_K) != (B, S, K) or H % G:
        raise KernelError(
            f"q has shape {q_BSHK.shape}, k and v {k_BTGK.shape}; batch, length and head size must agree, "
            f"and the query heads {H} must be a multiple of the key heads {G}"
        )
    if q_BSHK.dtype != k_BTGK.dtype or q_BSHK.dtype != v_BTGK.dtype:
        raise KernelError(f"q, k and v have types {q_BSHK.dtype}, {k_BTGK.dtype}, {v_BTGK.dtype}; cast them to one")
    if segment_ids_BS is not None and (segment_ids_BS.shape != (B, S) or not jnp.issubdtype(segment_ids_BS.dtype, jnp.integer)):
        raise KernelError(f"segment ids are {segment_ids_BS.dtype}{list(segment_ids_BS.shape)}; expected int32 {[B, S]}, one a query")
    if S * H * K >= 2**31:
        raise KernelError(f"a row of {S} tokens of {H} heads of {K} has more than 2**31 elements; split the heads over more tensor ranks")
    if window is not None and window < 1:
        raise KernelError(f"window is {window}; a query sees itself, so the least is 1; None sees all")


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attention(q, k, v, segment_ids, window, implementation, target):
    return forward(q, k, v, segment_ids, window=window, implementation=implementation, target=target)[0]


def _attention_forward(q, k, v, segment_ids, window, implementation, target):
    out, lse = forward(q, k, v, segment_ids, window=window, implementation=implementation, target=target)
    return out, (q, k, v, segment_ids, out, lse)


def _attention_backward(window, implementation, target, residuals, d_out):
    q, k, v, segment_ids, out, lse = residuals
    d_q, d_k, d_v = backward(q, k, v, segment_ids, out, lse, d_out, window=window, implementation=implementation, target=target)
    return d_q, d_k, d_v, None


_attention.defvjp(_attention_forward, _attention_backward)

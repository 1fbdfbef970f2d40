"""Norms over the last dim with the residual add before them. One interface to two implementations.

``reference`` leaves the fusing to XLA, ``triton`` makes one pass over the memory. Neither was measured yet; without an explicit
choice GPUs get the one whose compiled step moves fewer bytes, Triton (`docs/design/0003-kernels.md`).
"""

from functools import partial

import jax
import jax.numpy as jnp

from megascale_jax.kernels.target import Implementation, KernelError, Target, in_order, load, resolve

KINDS = ("layernorm", "rmsnorm")
LARGEST_WIDTH = 16_384
"""Of a row that the Triton kernels keep in registers."""


def add_norm(
    x: jax.Array,
    added: jax.Array | None,
    scale_D: jax.Array,
    bias_D: jax.Array | None,
    *,
    kind: str,
    epsilon: float,
    implementation: str | None = None,
    target: Target | None = None,
) -> tuple[jax.Array, jax.Array]:
    """``x + added`` and its norm, both ``[..., D]`` in the type of ``x``; ``added`` may be ``None``. Differentiable.

    ``kind``: ``layernorm``, or ``rmsnorm``, which has no bias. Raises KernelError, a ValueError, while the program is traced.
    """
    target = target or Target.here()
    chosen = _implementation(x, added, scale_D, bias_D, kind, implementation, target)
    return _add_norm(x, added, scale_D, bias_D, chosen.with_options(kind=kind, epsilon=epsilon))


def _implementation(x, added, scale_D, bias_D, kind: str, implementation: str | None, target: Target) -> Implementation:
    if kind not in KINDS:
        raise KernelError(f"norm {kind!r}; there are {' and '.join(KINDS)}")
    if bias_D is not None and kind == "rmsnorm":
        raise KernelError("rmsnorm has no bias; give None, or use layernorm")
    if added is not None and (added.shape, added.dtype) != (x.shape, x.dtype):
        raise KernelError(f"the residual is {x.dtype}{list(x.shape)}, what is added {added.dtype}{list(added.shape)}; they must agree")
    for name, vector in (("scale", scale_D), ("bias", bias_D)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise KernelError(f"{name} has shape {vector.shape}; expected {x.shape[-1:]}, the width of the rows")
    refusals = in_order(target, {"triton": _triton_refusal(x, target), "reference": None})
    return load("norm", resolve("norm", implementation, refusals), target)


def _triton_refusal(x: jax.Array, target: Target) -> str | None:
    if x.shape[-1] > LARGEST_WIDTH:
        return f"rows of {x.shape[-1]}; the kernels take at most {LARGEST_WIDTH}"
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the kernels take bfloat16, float16 and float32, got {x.dtype}"
    return target.triton_refusal


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _add_norm(x, added, scale_D, bias_D, chosen):
    return chosen.run("forward", x, added, scale_D, bias_D)


def _add_norm_forward(x, added, scale_D, bias_D, chosen):
    total, y = chosen.run("forward", x, added, scale_D, bias_D)
    return (total, y), (total, added is None, scale_D, bias_D)


def _add_norm_backward(chosen, residuals, gradients):
    total, alone, scale_D, bias_D = residuals
    d_total, d_y = gradients
    d_x, d_scale_D, d_bias_D = chosen.run("backward", total, scale_D, bias_D, d_y, d_total)
    d_bias_D = None if bias_D is None else d_bias_D.astype(bias_D.dtype)
    return d_x, None if alone else d_x, d_scale_D.astype(scale_D.dtype), d_bias_D


_add_norm.defvjp(_add_norm_forward, _add_norm_backward)

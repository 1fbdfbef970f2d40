"""LayerNorm and RMSNorm over the last dim, computed in fp32, with the residual add that comes before. The specification of every kernel."""

import jax
import jax.numpy as jnp


def forward(
    x: jax.Array, added: jax.Array | None, scale_D: jax.Array, bias_D: jax.Array | None, *, kind: str, epsilon: float
) -> tuple[jax.Array, jax.Array]:
    """``x + added`` and its norm, in the type of ``x``.

    ``layernorm``: ``(x - mean) / sqrt(var + epsilon) * scale + bias``; ``rmsnorm``: ``x / sqrt(mean(x^2) + epsilon) * scale``.
    """
    total = x if added is None else x + added
    y = _normal(total, kind, epsilon)[0] * scale_D
    return total, (y if bias_D is None else y + bias_D).astype(x.dtype)


def backward(
    x: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None, d_y: jax.Array, d_total: jax.Array | None, *, kind: str, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Gradients of ``x`` (the sum), scale and bias, the latter two fp32, given those of both results of `forward`."""
    normal, inverse = _normal(x, kind, epsilon)
    d_y32 = d_y.astype(jnp.float32)
    d_normal = d_y32 * scale_D
    d_x = d_normal - normal * (d_normal * normal).mean(-1, keepdims=True)
    if kind == "layernorm":
        d_x = d_x - d_normal.mean(-1, keepdims=True)
    d_x = d_x * inverse
    rows = tuple(range(x.ndim - 1))
    d_x = d_x if d_total is None else d_x + d_total.astype(jnp.float32)
    return d_x.astype(x.dtype), (d_y32 * normal).sum(rows), None if bias_D is None else d_y32.sum(rows)


def _normal(x: jax.Array, kind: str, epsilon: float) -> tuple[jax.Array, jax.Array]:
    x32 = x.astype(jnp.float32)
    if kind == "layernorm":
        x32 = x32 - x32.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + epsilon)
    return x32 * inverse, inverse

"""LayerNorm and RMSNorm over the last dim, computed in fp32."""

import jax
import jax.numpy as jnp


def layernorm(x_BSD: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None, *, epsilon: float) -> jax.Array:
    """``(x - mean) / sqrt(var + epsilon) * scale + bias`` in the type of ``x``."""
    x32_BSD = x_BSD.astype(jnp.float32)
    centred_BSD = x32_BSD - x32_BSD.mean(-1, keepdims=True)
    normal_BSD = centred_BSD * jax.lax.rsqrt(jnp.square(centred_BSD).mean(-1, keepdims=True) + epsilon)
    y_BSD = normal_BSD * scale_D
    return (y_BSD if bias_D is None else y_BSD + bias_D).astype(x_BSD.dtype)


def rmsnorm(x_BSD: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None, *, epsilon: float) -> jax.Array:
    """``x / sqrt(mean(x^2) + epsilon) * scale`` in the type of ``x``; takes no bias."""
    assert bias_D is None, "rmsnorm has no bias; the configuration refuses one"
    x32_BSD = x_BSD.astype(jnp.float32)
    return (x32_BSD * jax.lax.rsqrt(jnp.square(x32_BSD).mean(-1, keepdims=True) + epsilon) * scale_D).astype(x_BSD.dtype)

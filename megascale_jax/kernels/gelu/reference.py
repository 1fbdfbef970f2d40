"""Feed-forward nonlinearities with the bias before them: GeLU (tanh form, as GPT-2 and Megatron use it) and SwiGLU.

``gelu(up + bias)`` and ``silu(gate + gate bias) * (up + bias)``, computed in fp32. Nothing is kept for the backward pass but the inputs.
"""

import jax
import jax.numpy as jnp

_ROOT = (2 / jnp.pi) ** 0.5
_CUBIC = 0.044715


def forward(up: jax.Array, gate: jax.Array | None, bias_F: jax.Array | None, gate_bias_F: jax.Array | None) -> jax.Array:
    """The result, in the type of ``up``; GeLU where there is no gate."""
    up32 = _shifted(up, bias_F)
    if gate is None:
        return jax.nn.gelu(up32, approximate=True).astype(up.dtype)
    return (jax.nn.silu(_shifted(gate, gate_bias_F)) * up32).astype(up.dtype)


def backward(
    up: jax.Array, gate: jax.Array | None, bias_F: jax.Array | None, gate_bias_F: jax.Array | None, d_out: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Gradients of ``up`` and ``gate``, and the result of `forward` once more, which the next product's gradient wants."""
    up32, d_out32 = _shifted(up, bias_F), d_out.astype(jnp.float32)
    d_gate = None
    if gate is None:
        tanh = jnp.tanh(_ROOT * (up32 + _CUBIC * up32**3))
        d_up = d_out32 * (0.5 * (1 + tanh) + 0.5 * up32 * (1 - tanh**2) * _ROOT * (1 + 3 * _CUBIC * up32**2))
        out = 0.5 * up32 * (1 + tanh)
    else:
        gate32 = _shifted(gate, gate_bias_F)
        share = jax.nn.sigmoid(gate32)
        d_up, out = d_out32 * gate32 * share, gate32 * share * up32
        d_gate = (d_out32 * up32 * share * (1 + gate32 * (1 - share))).astype(up.dtype)
    # or XLA would keep fp32 intermediates for another kernel that makes ``out`` of them
    return jax.lax.optimization_barrier((d_up.astype(up.dtype), d_gate, out.astype(up.dtype)))


def _shifted(x: jax.Array, bias_F: jax.Array | None) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return x32 if bias_F is None else x32 + bias_F.astype(jnp.float32)

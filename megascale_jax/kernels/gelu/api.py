"""Bias and nonlinearity of the feed-forward layer. One interface to two implementations.

``reference`` leaves the fusing to XLA, which joins it with what comes before and after; ``triton`` is one pass over the memory
by itself. Neither was measured yet; without an explicit choice the one is taken whose compiled step moves fewer bytes, the
reference (`docs/design/0003-kernels.md`).
"""

from functools import partial

import jax
import jax.numpy as jnp

from megascale_jax.kernels.target import Implementation, KernelError, Target, load, resolve


def activate(
    up: jax.Array,
    gate: jax.Array | None = None,
    bias_F: jax.Array | None = None,
    gate_bias_F: jax.Array | None = None,
    *,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array:
    """``gelu(up + bias)``, or with a gate ``silu(gate + gate bias) * (up + bias)``; ``[..., F]`` in the type of ``up``. Differentiable.

    Raises KernelError, a ValueError, while the program is traced.
    """
    return _activate(up, gate, bias_F, gate_bias_F, _implementation(up, gate, bias_F, gate_bias_F, implementation, target or Target.here()))


def backward(
    up: jax.Array, gate: jax.Array | None, d_out: jax.Array, *, implementation: str | None, target: Target
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Gradients of ``up`` and ``gate`` that have their biases, and the result of `activate` once more, in one pass."""
    if (d_out.shape, d_out.dtype) != (up.shape, up.dtype):
        raise KernelError(f"the gradient is {d_out.dtype}{list(d_out.shape)}; expected that of up, {up.dtype}{list(up.shape)}")
    return _implementation(up, gate, None, None, implementation, target).run("backward", up, gate, None, None, d_out)


def _implementation(up, gate, bias_F, gate_bias_F, implementation: str | None, target: Target) -> Implementation:
    if gate is not None and (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise KernelError(f"up is {up.dtype}{list(up.shape)}, gate {gate.dtype}{list(gate.shape)}; they must agree")
    for name, vector in (("bias", bias_F), ("gate bias", gate_bias_F)):
        if vector is not None and vector.shape != up.shape[-1:]:
            raise KernelError(f"the {name} has shape {vector.shape}; expected {up.shape[-1:]}, the width of the layer")
    if gate is None and gate_bias_F is not None:
        raise KernelError("a gate bias without a gate; give both, or neither for GeLU")
    return load("gelu", resolve("activation", implementation, {"reference": None, "triton": _triton_refusal(up, target)}), target)


def _triton_refusal(up: jax.Array, target: Target) -> str | None:
    if up.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the kernels take bfloat16, float16 and float32, got {up.dtype}"
    return target.triton_refusal


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _activate(up, gate, bias_F, gate_bias_F, chosen):
    return chosen.run("forward", up, gate, bias_F, gate_bias_F)


def _activate_forward(up, gate, bias_F, gate_bias_F, chosen):
    return _activate(up, gate, bias_F, gate_bias_F, chosen), (up, gate, bias_F, gate_bias_F)


def _activate_backward(chosen, residuals, d_out):
    up, _, bias_F, gate_bias_F = residuals
    d_up, d_gate, _ = chosen.run("backward", *residuals, d_out)

    def of_bias(bias, gradient):
        return None if bias is None else gradient.astype(jnp.float32).sum(tuple(range(up.ndim - 1))).astype(bias.dtype)

    return d_up, d_gate, of_bias(bias_F, d_up), of_bias(gate_bias_F, d_gate)


_activate.defvjp(_activate_forward, _activate_backward)

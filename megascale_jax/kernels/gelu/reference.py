"""Feed-forward nonlinearities: GeLU (tanh form, as GPT-2 and Megatron use it) and SwiGLU."""

import jax


def gelu(up_BSF: jax.Array, gate_BSF: jax.Array | None) -> jax.Array:
    """GeLU of ``up``; there is no gate."""
    assert gate_BSF is None, "gelu takes no gate projection"
    return jax.nn.gelu(up_BSF, approximate=True)


def swiglu(up_BSF: jax.Array, gate_BSF: jax.Array | None) -> jax.Array:
    """``silu(gate) * up``."""
    assert gate_BSF is not None, "swiglu needs a gate projection"
    return jax.nn.silu(gate_BSF) * up_BSF

"""Parameters and training FLOPs of a model, exactly, from its configuration. No JAX.

A multiply-add is two FLOPs; training is three times the forward pass (the backward pass computes two products for each
one). Counted: every GEMM, the head included, and the two products of attention (scores and values). Not counted: the
embedding look-up, norms, biases, nonlinearities, softmax, rotary turns, the optimizer, and anything that is recomputed
or masked but belongs to no convention below.

Attention is counted by one of two named conventions:

- ``full``: every query meets S keys, or W where a window is shorter, so causal work counts twice. Megatron-LM and the
  MegaScale paper report MFU this way; ours is printed with it for comparison.
- ``causal``: a query meets exactly the keys it may see, ``min(i + 1, W)`` for row i.

Failure case: rows of packed documents see fewer keys than either convention says; MFU then includes that saving.
"""

from typing import Literal

from megascale_jax.config.schema import ModelConfig
from megascale_jax.model.parameters import ParameterSpec, parameter_specs

Convention = Literal["full", "causal"]

_LOOKED_UP = ("embedding", "position")
_TRAINING_PER_FORWARD = 3
_FLOPS_PER_MULTIPLY_ADD = 2


def count_parameters(model: ModelConfig) -> int:
    """Trainable numbers of the whole model, without padding; a tied head counts once."""
    return sum(parameter_breakdown(model).values())


def parameter_breakdown(model: ModelConfig) -> dict[str, int]:
    """Elements by logical parameter, over all layers, in table order."""
    return {spec.name: spec.size * _copies(model, spec) for spec in parameter_specs(model).values()}


def attention_pairs(model: ModelConfig, convention: Convention = "full") -> int:
    """Query-key pairs of one training row of S tokens, summed over its queries and over the layers (per head)."""
    length = model.sequence_length
    pairs = 0
    for window in model.windows:
        seen = length if window is None else min(window, length)
        pairs += length * seen if convention == "full" else seen * (seen + 1) // 2 + (length - seen) * seen
    return pairs


def flops_per_row(model: ModelConfig, convention: Convention = "full") -> int:
    """Training FLOPs (forward and backward) of one row of S tokens; an exact integer."""
    specs = parameter_specs(model)
    multiplied = sum(spec.size * _copies(model, spec) for spec in specs.values() if spec.decays and spec.name not in _LOOKED_UP)
    if model.tied_head:
        multiplied += specs["embedding"].size
    scores_and_values = 2 * model.num_heads * model.head_dim * attention_pairs(model, convention)
    forward = _FLOPS_PER_MULTIPLY_ADD * (multiplied * model.sequence_length + scores_and_values)
    return _TRAINING_PER_FORWARD * forward


def flops_per_token(model: ModelConfig, convention: Convention = "full") -> float:
    """Training FLOPs (forward and backward) per token, the mean over a row."""
    return flops_per_row(model, convention) / model.sequence_length


def mfu(model: ModelConfig, tokens_per_s: float, devices: int, peak_tflops: float, convention: Convention = "full") -> float:
    """Model FLOPs utilisation, a fraction: ``flops_per_token`` x tokens/s over the peak of all devices.

    ``peak_tflops`` is that of one device in 1e12 FLOP/s.
    """
    return flops_per_token(model, convention) * tokens_per_s / (devices * peak_tflops * 1e12)


def _copies(model: ModelConfig, spec: ParameterSpec) -> int:
    return model.num_layers if spec.per_layer else 1

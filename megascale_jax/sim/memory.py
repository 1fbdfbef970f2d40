"""Bytes of activations on one device, by formula. No JAX.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", equations 1 to 5, array by array, so that grouped
queries, gates, parallel blocks and models without dropout come out of the same sum: a GPT layer with dropout keeps 34 bytes a token and
element of the width, and 5 a score where attention is not fused.
"""

from megascale_jax.config.software import SoftwareConfig
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.sim.operators import ELEMENT_BYTES
from megascale_jax.sim.work import Work

_MASK_BYTES = 1
_SCORE_BYTES = 5
"""Softmax' result, dropout's mask and its result."""
_LOGIT_BYTES = 6
"""bf16, and fp32 for the loss."""


def activation_bytes(work: Work, software: SoftwareConfig) -> float:
    """Kept from forward to backward pass on the fullest stage, and a layer's or a chunk's own while it is recomputed."""
    schedule = Schedule(work.pipe, work.virtual_stages, work.micro_batches, work.backward_delay)
    layers = max(work.stage_layers) / work.virtual_stages
    layer = layer_bytes(work, software)
    logits = _LOGIT_BYTES * work.tokens_of_micro_batch * work.model.vocab_size / work.tensor if work.pipe == 1 else 0.0
    if work.remat == "full":
        split = work.tensor if software.sequence_parallel else 1
        kept = ELEMENT_BYTES * work.tokens_of_micro_batch * work.model.hidden_size / split
        return schedule.slot_bound * layers * kept + layer + logits
    return schedule.slot_bound * layers * layer + logits


def layer_bytes(work: Work, software: SoftwareConfig) -> float:
    """Of one micro-batch in one layer, on one tensor rank, without recomputation of whole layers."""
    model, tokens, branches = work.model, work.tokens_of_micro_batch, work.model.branches_per_layer
    mask = _MASK_BYTES if model.dropout else 0
    # a norm's input, a branch's input, a mask
    residual = branches * model.hidden_size * (2 * ELEMENT_BYTES + mask)
    heads = ELEMENT_BYTES * model.head_dim * (2 * model.num_heads + 2 * model.kv_heads)
    mlp = ELEMENT_BYTES * model.mlp_size * (3 if model.activation == "swiglu" else 2)
    split = work.tensor if software.sequence_parallel else 1
    scores = 0.0
    if software.attention == "unfused" and work.remat != "selective":
        scores = _SCORE_BYTES * work.micro_batch_size * model.num_heads * float(model.sequence_length) ** 2 / work.tensor
    return tokens * (residual / split + (heads + mlp) / work.tensor) + scores

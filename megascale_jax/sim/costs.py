"""Seconds of one micro-batch in one layer and at the head, and of the exchanges of a step, on one device. No JAX.

Tensor-parallel communication lies on the way of every micro-batch, so a layer's costs include what of it no product hides. The backward
pass includes the weight gradients, and what is recomputed.
"""

from dataclasses import dataclass

from megascale_jax.config.software import SoftwareConfig
from megascale_jax.sim.collectives import Group, all_reduce_seconds, gather_seconds, message_seconds, ring_seconds
from megascale_jax.sim.device import Device
from megascale_jax.sim.operators import ELEMENT_BYTES, fused_attention_seconds, gemm_seconds, pass_seconds
from megascale_jax.sim.work import Work

BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward pass over those of the forward pass: five products for two."""


@dataclass(frozen=True)
class Parts:
    """Seconds by kind of one pass; ``tensor``: exposed communication, ``contention``: what hidden communication costs computation."""

    gemm: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    contention: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.gemm + self.attention + self.memory + self.tensor + self.contention

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(
            self.gemm + other.gemm,
            self.attention + other.attention,
            self.memory + other.memory,
            self.tensor + other.tensor,
            self.contention + other.contention,
        )


@dataclass(frozen=True)
class Costs:
    """Of one micro-batch: a layer forward and backward, the head (on the last stage alone) the same; a message between stages.

    Of a step: ``data``: its gathers and scatters on an idle device, of one layer where weights are sharded; ``embedding``: the shared
    table's gradient between first and last stage; ``optimizer``: the update.
    """

    layer_forward: Parts
    layer_backward: Parts
    head_forward: Parts
    head_backward: Parts
    message_s: float
    gather_s: float
    scatter_s: float
    embedding_s: float
    optimizer_s: float


def costs_of(work: Work, device: Device, software: SoftwareConfig) -> Costs:
    """Costs of a layout on a device under a program's techniques."""
    forward, backward = _layer(work, device, software)
    head_forward, head_backward = _head(work, device, software)
    data = Group.of(work.data, work.tensor, device.per_node)
    parameters = work.parameters_of_layer / work.tensor if software.weights_sharded else work.parameters_of_device
    own, shard = work.parameters_of_device, work.parameters_of_device / work.data
    update_bytes = software.shard_update_bytes * shard + software.local_update_bytes * (shard if software.weights_sharded else own)
    return Costs(
        layer_forward=forward,
        layer_backward=backward,
        head_forward=head_forward,
        head_backward=head_backward,
        message_s=message_of(work, device, software) if work.pipe > 1 else 0.0,
        gather_s=gather_seconds(device, data, ELEMENT_BYTES * parameters),
        scatter_s=gather_seconds(device, data, software.gradient_bytes * parameters),
        embedding_s=_embedding(work, device, software),
        optimizer_s=update_bytes / device.memory_bytes_per_s,
    )


def message_bytes(work: Work) -> float:
    """Bytes of one message between stages from each tensor rank, which sends its part of the sequence or of the width."""
    return ELEMENT_BYTES * work.tokens_of_micro_batch * work.model.hidden_size / work.tensor


def message_of(work: Work, device: Device, software: SoftwareConfig) -> float:
    """Seconds of that message; a blocking one stalls besides."""
    message_s = message_seconds(device, message_bytes(work), in_node=work.devices <= device.per_node)
    return message_s + (software.pipe_stall_us * 1e-6 if software.pipe_sends == "blocking" else 0.0)


def data_bytes(work: Work) -> float:
    """Bytes of a mean device's weights, which a step gathers over the data axis; gradients are as many elements."""
    return ELEMENT_BYTES * work.parameters / (work.pipe * work.tensor)


def _embedding(work: Work, device: Device, software: SoftwareConfig) -> float:
    """A table that first and last stage share: its gradient is summed over the two."""
    if not work.model.tied_head or work.pipe == 1:
        return 0.0
    group = Group(2, 2 if work.devices <= device.per_node else 1)
    return all_reduce_seconds(device, group, software.gradient_bytes * work.model.vocab_size * work.model.hidden_size / work.tensor)


def _layer(work: Work, device: Device, software: SoftwareConfig) -> tuple[Parts, Parts]:
    """Forward and backward pass of a layer, what the backward pass recomputes included."""
    gemm_forward, gemm_backward = _matrices(work, device)
    attention_forward, attention_backward = _attention(work, device, software)
    memory_forward, memory_backward = _passes(work, device, software)
    tensor_forward, tensor_backward = _tensor(work, device, software)
    exposed, contention = 1 - software.tensor_hidden, software.tensor_hidden * (software.compute_slowdown - 1)
    forward = Parts(gemm_forward, attention_forward, memory_forward, exposed * tensor_forward, contention * tensor_forward)
    backward = Parts(gemm_backward, attention_backward, memory_backward, exposed * tensor_backward, contention * tensor_backward)
    if work.remat == "full":
        return forward, backward + forward
    if work.remat == "selective":
        return forward, backward + Parts(attention=attention_forward)
    return forward, backward


def _matrices(work: Work, device: Device) -> tuple[float, float]:
    """The matrix products of a layer. Backward: the input's gradient and the weight's.

    A parallel block has one product in and one out (`model/parameters.fused_groups`), a serial one two of each.
    """
    model, tokens, width = work.model, work.tokens_of_micro_batch, work.model.hidden_size
    queries, keys = model.num_heads * model.head_dim // work.tensor, model.kv_heads * model.head_dim // work.tensor
    mlp = model.mlp_size // work.tensor
    attention = (queries + 2 * keys, queries)
    feed_forward = (mlp * (2 if model.activation == "swiglu" else 1), mlp)
    branches = (attention, feed_forward)
    if model.block == "parallel":
        branches = ((attention[0] + feed_forward[0], attention[1] + feed_forward[1]),)
    shapes = [shape for into, out in branches for shape in ((width, into), (out, width))]
    forward = sum(gemm_seconds(device, tokens, columns, inner) for inner, columns in shapes)
    return forward, sum(_gemm_backward(device, tokens, columns, inner) for inner, columns in shapes)


def _gemm_backward(device: Device, tokens: int, columns: int, inner: int) -> float:
    return gemm_seconds(device, tokens, inner, columns) + gemm_seconds(device, inner, columns, tokens, accumulates=True)


def _attention(work: Work, device: Device, software: SoftwareConfig) -> tuple[float, float]:
    model = work.model
    heads, length = model.num_heads // work.tensor, model.sequence_length
    if software.attention == "fused":
        flops = 4 * work.micro_batch_size * work.seen_pairs * heads * model.head_dim
        forward = fused_attention_seconds(device, flops, software.attention_forward_share)
        return forward, fused_attention_seconds(device, BACKWARD_ATTENTION * flops, software.attention_backward_share)
    batch, scores = work.micro_batch_size * heads, float(work.micro_batch_size * heads * length**2)
    to_scores = gemm_seconds(device, length, length, model.head_dim, batch)
    to_values = gemm_seconds(device, length, model.head_dim, length, batch)
    forward = to_scores + to_values + pass_seconds(device, scores, software.scores_forward_passes)
    return forward, 2 * (to_scores + to_values) + pass_seconds(device, scores, software.scores_backward_passes)


def _passes(work: Work, device: Device, software: SoftwareConfig) -> tuple[float, float]:
    """Memory-bound kernels of a layer."""
    model, tokens, branches = work.model, work.tokens_of_micro_batch, work.model.branches_per_layer
    residual = tokens * model.hidden_size / (work.tensor if software.sequence_parallel else 1)
    mlp = tokens * model.mlp_size / work.tensor
    heads = tokens * model.head_dim * (model.num_heads + 2 * model.kv_heads) / work.tensor
    gate = model.activation == "swiglu"
    forward = (
        branches * pass_seconds(device, residual, software.norm_forward_passes)
        + branches * pass_seconds(device, residual, software.residual_forward_passes)
        + pass_seconds(device, mlp, software.activation_forward_passes + gate)
        + pass_seconds(device, heads, software.reorder_forward_passes)
    )
    backward = (
        branches * pass_seconds(device, residual, software.norm_backward_passes)
        + branches * pass_seconds(device, residual, software.residual_backward_passes)
        + pass_seconds(device, mlp, software.activation_backward_passes + 2 * gate)
        + pass_seconds(device, heads, software.reorder_backward_passes)
    )
    return forward, backward


def _tensor(work: Work, device: Device, software: SoftwareConfig) -> tuple[float, float]:
    """Tensor-parallel communication of a layer, hidden or not. With sequence parallelism the backward pass gathers inputs again."""
    whole, branches = ELEMENT_BYTES * work.tokens_of_micro_batch * work.model.hidden_size, work.model.branches_per_layer
    if work.tensor == 1:
        return 0.0, 0.0
    if software.sequence_parallel:
        one = ring_seconds(device.node_link, work.tensor, whole)
        return 2 * branches * one, 3 * branches * one
    one = all_reduce_seconds(device, Group(work.tensor, work.tensor), whole)
    return branches * one, branches * one


def _head(work: Work, device: Device, software: SoftwareConfig) -> tuple[Parts, Parts]:
    """Output projection and loss; half of the loss' traffic belongs to each pass."""
    tokens, columns = work.tokens_of_micro_batch, -(-work.model.vocab_size // work.tensor)
    forward = gemm_seconds(device, tokens, columns, work.model.hidden_size)
    backward = _gemm_backward(device, tokens, columns, work.model.hidden_size)
    loss_s = software.logit_bytes / 2 * tokens * columns / device.memory_bytes_per_s
    return Parts(gemm=forward, memory=loss_s), Parts(gemm=backward, memory=loss_s)

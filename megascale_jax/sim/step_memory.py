"""Peak bytes of this trainer's own step on one device: what its pipeline keeps, by its own rules, and what the compiler adds. No JAX.

`memory.py` has the published formula, of programs that keep what Megatron-LM keeps. This trainer keeps less from the forward to the
backward pass (`parallel/pipeline/residuals.py`: a branch's input, the result of its first product, what attention saved; the nonlinearity
is run again), but operands of weight gradients wait ``pipe + 1`` ticks, and a chunk's weights lie in several places.

The last was not counted but *calibrated*: least squares over the peaks that XLA's GPU compiler gave for 15 plans (1 B to 530 B, 8 to 12,288
GPUs, `benchmarks/results/compile`), all of them within 1.3 GiB. It is not for other trainers, nor for kernels that keep more.
"""

from dataclasses import dataclass

from megascale_jax.config.memory import state_bytes
from megascale_jax.config.schema import Experiment
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.sim.operators import ELEMENT_BYTES
from megascale_jax.sim.work import Work

_FP32_BYTES = 4
_LOGIT_BYTES = ELEMENT_BYTES + _FP32_BYTES
CHUNKS = 9.45
"""Copies of a chunk's weights beside the state in a pipeline: held by its slots, arriving, sums of gradients, leaving (calibrated)."""
CHUNKS_ALONE = 2.05
"""The same where one stage waits for nobody (calibrated)."""
SHARDS = 0.98
"""fp32 copies of a device's shard that the update takes (calibrated)."""
LOGITS = 1.16
"""Copies of a micro-batch's logits, bf16 and fp32 (calibrated)."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one device by kind; ``buffers`` is what was calibrated."""

    state: float
    residuals: float
    operands: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it: the peak."""
        return self.state + self.residuals + self.operands + self.buffers


def step_bytes(experiment: Experiment) -> StepBytes:
    """Peak of the step of a checked experiment."""
    work = Work.of(experiment)
    chunk, alone, shard, logits = buffer_units(work)
    return StepBytes(
        state=state_bytes(experiment).total,
        residuals=_residuals(work),
        operands=_operands(work, is_ring=experiment.parallel.tensor_overlap == "ring"),
        buffers=CHUNKS * chunk + CHUNKS_ALONE * alone + SHARDS * shard + LOGITS * logits,
    )


def buffer_units(work: Work) -> tuple[float, float, float, float]:
    """What the four calibrated numbers multiply: a chunk's bf16 weights in a pipeline, and without one, an fp32 shard, logits; bytes."""
    chunk = ELEMENT_BYTES * _chunk_layers(work) * work.parameters_of_layer / work.tensor
    shard = _FP32_BYTES * work.parameters / work.devices
    # the vocabulary is split over tensor ranks and stages
    logits = _LOGIT_BYTES * work.tokens_of_micro_batch * work.model.vocab_size / (work.tensor * work.pipe)
    return (chunk, 0.0, shard, logits) if work.pipe > 1 else (0.0, chunk, shard, logits)


def _residuals(work: Work) -> float:
    """From forward to backward pass: one slot more than the schedule's, which idle ticks write to. Full remat: a chunk's input."""
    model = work.model
    schedule = Schedule(work.pipe, work.virtual_stages, work.micro_batches, work.backward_delay)
    inputs, (into, _) = model.branches_per_layer * model.hidden_size / work.tensor, _widths(work)
    attention = model.num_heads * (ELEMENT_BYTES * model.head_dim + _FP32_BYTES) / work.tensor
    layers = _chunk_layers(work)
    of_chunk = {
        "none": layers * (ELEMENT_BYTES * (inputs + into) + attention),
        "selective": layers * ELEMENT_BYTES * (inputs + into),
        "full": ELEMENT_BYTES * model.hidden_size / work.tensor,
    }
    return (schedule.slot_bound + 1) * work.tokens_of_micro_batch * of_chunk[work.remat]


def _operands(work: Work, is_ring: bool) -> float:
    """From backward pass to weight gradients, in a pipeline: inputs, gradients of outputs (whole, or a ring's own part), both products'."""
    if work.pipe == 1:
        return 0.0
    model, (into, out) = work.model, _widths(work)
    own = model.hidden_size / work.tensor
    gradient = own if is_ring else model.hidden_size
    of_layer = model.branches_per_layer * (own + gradient) + into + out
    return (work.pipe + 1) * _chunk_layers(work) * work.tokens_of_micro_batch * ELEMENT_BYTES * of_layer


def _widths(work: Work) -> tuple[float, float]:
    """Elements of a token that a layer's first products make, and that its last ones take, on one tensor rank."""
    model = work.model
    queries, keys = model.num_heads * model.head_dim, model.kv_heads * model.head_dim
    mlp = model.mlp_size * (2 if model.activation == "swiglu" else 1)
    return (queries + 2 * keys + mlp) / work.tensor, (queries + model.mlp_size) / work.tensor


def _chunk_layers(work: Work) -> int:
    """Layers of the deepest chunk: all chunks are as deep."""
    return max(map(max, work.layers))

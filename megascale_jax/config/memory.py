"""Bytes of model and optimizer state on one device, before anything is compiled.

fp32 masters and two fp32 moments are sharded over all three axes; the weights in the compute type and the fp32 gradients
are whole on every data-parallel rank (ZeRO-2). Activations are not counted, so this is a floor: a plan that exceeds it
cannot run, one that stays below may still not fit.

Only matrices and tables are counted; norms and biases are less than a thousandth of any model worth the check.
"""

from dataclasses import dataclass

from megascale_jax.config.schema import Experiment, ModelConfig

_FP32_BYTES = 4
_COMPUTE_BYTES = {"bfloat16": 2, "float32": 4}
GIB = 2**30
FITS = 0.9
"""Share of a device's memory that a program may use: the rest is for libraries and their workspaces."""


@dataclass(frozen=True)
class StateBytes:
    """State of one device in bytes, by kind."""

    master_and_moments: float
    weights: float
    gradients: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.master_and_moments + self.weights + self.gradients


def matrix_parameters(model: ModelConfig) -> int:
    """Elements of all matrices and tables, without norms, biases and padding."""
    attention = 2 * model.hidden_size * model.head_dim * (model.num_heads + model.kv_heads)
    feed_forward = model.hidden_size * model.mlp_size * (3 if model.activation == "swiglu" else 2)
    tables = model.vocab_size * (1 if model.tied_head else 2) + (model.sequence_length if model.position == "learned" else 0)
    return model.num_layers * (attention + feed_forward) + tables * model.hidden_size


def state_bytes(experiment: Experiment) -> StateBytes:
    """State of one device of the experiment's mesh."""
    parallel = experiment.parallel
    of_stage = matrix_parameters(experiment.model) / (parallel.tensor * parallel.pipe)
    return StateBytes(
        master_and_moments=3 * _FP32_BYTES * of_stage / parallel.data,
        weights=_COMPUTE_BYTES[experiment.train.compute_dtype] * of_stage,
        gradients=_FP32_BYTES * of_stage,
    )

"""One place where the operators of a model are chosen, each by its key under ``system.kernels``, by the **target** platform.

A compile for absent GPUs runs in a CPU process, so the host's backend says nothing. An explicit choice that cannot run on
the target raises; only ``auto`` chooses. What ``auto`` prefers is written in each operator's ``api.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from megascale_jax.config.schema import Experiment, ModelConfig, SystemConfig
from megascale_jax.errors import ConfigError
from megascale_jax.kernels.attention import api as attention
from megascale_jax.kernels.gelu import api as gelu
from megascale_jax.kernels.loss import api as loss
from megascale_jax.kernels.norm import api as norm
from megascale_jax.kernels.target import Target


@dataclass(frozen=True)
class Operators:
    """The operators that a model is built with; signatures as in each ``kernels/*/api.py`` with the choice made."""

    attention_forward: Callable[..., tuple[jax.Array, Any]]
    attention_backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    add_norm: Callable[..., tuple[jax.Array, jax.Array]]
    activate: Callable[..., jax.Array]
    activate_backward: Callable[..., tuple[jax.Array, jax.Array | None, jax.Array]]
    loss_statistics: Callable[..., jax.Array]
    loss_join: Callable[..., tuple[jax.Array, jax.Array]]
    loss_gradient: Callable[..., jax.Array]


def select(model: ModelConfig, system: SystemConfig) -> Operators:
    """The operators of ``model`` for the target of ``system``.

    Raises ConfigError when an explicitly chosen implementation cannot run on the target; what depends on sizes raises when traced.
    """
    target = Target.of(system)

    def bound(function: Callable, operator: str, **options: Any) -> Callable:
        chosen = getattr(system.kernels, operator)
        refusal = {"triton": target.triton_refusal, "cudnn": None if target.platform == "gpu" else "cuDNN runs on GPUs"}.get(chosen)
        if refusal:
            raise ConfigError(f"system.kernels.{operator} is {chosen}, which cannot run on {system.device}: {refusal}; or set auto")
        return partial(function, implementation=None if chosen == "auto" else chosen, target=target, **options)

    return Operators(
        bound(attention.forward, "attention"),
        bound(attention.backward, "attention"),
        bound(norm.add_norm, "norm", kind=model.norm, epsilon=model.norm_epsilon),
        bound(gelu.activate, "activation"),
        bound(gelu.backward, "activation"),
        bound(loss.local_statistics, "loss"),
        loss.join_statistics,
        bound(loss.logits_gradient, "loss"),
    )


def attention_choices(experiment: Experiment) -> dict[int | None, str]:
    """The attention implementation of every window of the model. Raises ConfigError where none can run."""
    model, system, chosen = experiment.model, experiment.system, experiment.system.kernels.attention
    dtype, implementation = jnp.dtype(experiment.train.compute_dtype), None if chosen == "auto" else chosen
    windows = {window if window is not None and window < model.sequence_length else None for window in model.windows}
    return {window: attention.choose(model.head_dim, dtype, window, implementation, Target.of(system)) for window in windows}

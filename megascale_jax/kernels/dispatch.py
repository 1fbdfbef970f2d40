"""One place where an operator's implementation is chosen, by the **target** platform.

A compile for absent GPUs runs in a CPU process, so the host's backend says nothing. An explicit choice that cannot run
on the target raises; only ``auto`` chooses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from megascale_jax.config.schema import ModelConfig, SystemConfig
from megascale_jax.errors import ConfigError
from megascale_jax.kernels.attention import cudnn as cudnn_attention
from megascale_jax.kernels.attention import reference as reference_attention
from megascale_jax.kernels.gelu import reference as reference_gelu
from megascale_jax.kernels.loss import reference as reference_loss
from megascale_jax.kernels.norm import reference as reference_norm

_ATTENTION = {"reference": reference_attention, "cudnn": cudnn_attention}
_ATTENTION_PLATFORMS = {"reference": ("cpu", "gpu"), "cudnn": ("gpu",)}
_ATTENTION_BEST = {"cpu": "reference", "gpu": "cudnn"}
_NORM = {"layernorm": reference_norm.layernorm, "rmsnorm": reference_norm.rmsnorm}
_ACTIVATION = {"gelu": reference_gelu.gelu, "swiglu": reference_gelu.swiglu}


@dataclass(frozen=True)
class Operators:
    """The operators that a model is built with; signatures as in each ``kernels/*/reference.py``."""

    attention_forward: Callable[..., tuple[jax.Array, Any]]
    attention_backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    norm: Callable[..., jax.Array]
    activation: Callable[[jax.Array, jax.Array | None], jax.Array]
    loss_statistics: Callable[..., jax.Array] = reference_loss.local_statistics
    loss_join: Callable[..., tuple[jax.Array, jax.Array]] = reference_loss.join_statistics
    loss_gradient: Callable[..., jax.Array] = reference_loss.logits_gradient


def select(model: ModelConfig, system: SystemConfig) -> Operators:
    """The operators of ``model`` for the target of ``system``.

    Raises ConfigError when an explicitly chosen implementation cannot run on the target platform.
    """
    chosen = system.kernels.attention
    if chosen == "auto":
        chosen = _ATTENTION_BEST[system.platform]
    if system.platform not in _ATTENTION_PLATFORMS[chosen]:
        raise ConfigError(
            f"system.kernels.attention is {chosen}, which runs on {' and '.join(_ATTENTION_PLATFORMS[chosen])}, "
            f"but system.platform is {system.platform}; use auto or reference"
        )
    module = _ATTENTION[chosen]
    limit = {"max_documents": system.kernels.max_documents} if chosen == "cudnn" else {}
    return Operators(
        partial(module.forward, **limit),
        partial(module.backward, **limit),
        _NORM[model.norm],
        _ACTIVATION[model.activation],
    )

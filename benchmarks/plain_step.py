"""The yardstick: the same model and update in plain single-device JAX, written without the package.

One jitted ``value_and_grad``, a list of layers, optax's own ``lamb`` or ``adamw``, no mesh and no ``shard_map``. It covers
what the benchmarked experiments use: one document per row, untied head, rotary positions, no biases on projections, no
dropout, one micro-batch; `PlainStep` refuses the rest. Started from the same parameters it gives the same losses, and
the benchmark checks that it does.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from megascale_jax.config.schema import Experiment, ModelConfig

Tree = dict[str, Any]


class PlainStep:
    """``state = init(parameters)``, then ``state, loss = step(state, tokens_BS, targets_BS)``; the step donates its state."""

    def __init__(self, experiment: Experiment, learning_rate: optax.Schedule):
        model, config = experiment.model, experiment.train.optimizer
        plain = model.position == "rotary" and not (model.tied_head or model.attention_bias or model.mlp_bias or model.dropout)
        if not plain or experiment.num_micro_batches != 1:
            raise ValueError(f"the plain step does not cover {experiment.name}; see its module docstring")
        rule = optax.lamb if config.name == "lamb" else optax.adamw
        update_rule = rule(learning_rate, config.beta1, config.beta2, config.epsilon, weight_decay=config.weight_decay, mask=_is_matrix)
        clip = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
        self.optimizer = optax.chain(*clip, update_rule)
        dtype, remat = jnp.dtype(experiment.train.compute_dtype), experiment.parallel.remat == "full"

        def step(state: tuple[Tree, Any], tokens_BS: jax.Array, targets_BS: jax.Array) -> tuple[tuple[Tree, Any], jax.Array]:
            params, moments = state
            loss, gradients = jax.value_and_grad(_loss)(params, tokens_BS, targets_BS, model, dtype, remat)
            updates, moments = self.optimizer.update(gradients, moments, params)
            updated: Any = optax.apply_updates(params, updates)
            return (updated, moments), loss

        self.step = jax.jit(step, donate_argnums=0)

    def init(self, logical: Mapping[str, Any]) -> tuple[Tree, Any]:
        """State from parameters by name, those of layers stacked in front; copies, since the step donates."""
        ends = ("embedding", "final_norm_scale", "final_norm_bias", "head")
        depth = next(len(value) for name, value in logical.items() if name not in ends)
        params: Tree = {name: jnp.array(value) for name, value in logical.items() if name in ends}
        params["layers"] = [{n: jnp.array(v[i]) for n, v in logical.items() if n not in ends} for i in range(depth)]
        return params, self.optimizer.init(params)


def _is_matrix(params: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _loss(params: Tree, tokens_BS: jax.Array, targets_BS: jax.Array, model: ModelConfig, dtype: jnp.dtype, remat: bool) -> jax.Array:
    params = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, params)
    x_BSD = params["embedding"][tokens_BS]
    for layer, window in zip(params["layers"], model.windows, strict=True):

        def block(layer: Tree, x_BSD: jax.Array, window: int | None = window) -> jax.Array:
            return _block(layer, x_BSD, model, window)

        x_BSD = (jax.checkpoint(block) if remat else block)(layer, x_BSD)
    h_BSD = _norm(params, "final_", x_BSD, model)
    logits_BSV = jnp.einsum("bsd,vd->bsv", h_BSD, params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, targets_BS).mean()


def _block(layer: Tree, x_BSD: jax.Array, model: ModelConfig, window: int | None) -> jax.Array:
    h_BSD = _norm(layer, "", x_BSD, model)
    attended_BSD = _attention(layer, h_BSD, model, window)
    if model.block == "parallel":
        return x_BSD + attended_BSD + _feed_forward(layer, h_BSD, model)
    x_BSD = x_BSD + attended_BSD
    return x_BSD + _feed_forward(layer, _norm(layer, "mlp_", x_BSD, model), model)


def _norm(weights: Tree, prefix: str, x_BSD: jax.Array, model: ModelConfig) -> jax.Array:
    x32_BSD = x_BSD.astype(jnp.float32)
    if model.norm == "layernorm":
        x32_BSD = x32_BSD - x32_BSD.mean(-1, keepdims=True)
    y_BSD = x32_BSD / jnp.sqrt((x32_BSD**2).mean(-1, keepdims=True) + model.norm_epsilon) * weights[f"{prefix}norm_scale"]
    return (y_BSD + weights.get(f"{prefix}norm_bias", 0.0)).astype(x_BSD.dtype)


def _attention(layer: Tree, h_BSD: jax.Array, model: ModelConfig, window: int | None) -> jax.Array:
    q_BSHK, k_BTGK, v_BTGK = (jnp.einsum("bsd,dhk->bshk", h_BSD, layer[name]) for name in ("q", "k", "v"))
    limit = None if window is None else (window - 1, 0)
    out_BSHK = jax.nn.dot_product_attention(
        _rotate(q_BSHK, model.rotary_base), _rotate(k_BTGK, model.rotary_base), v_BTGK, is_causal=True, local_window_size=limit
    )
    return jnp.einsum("bshk,dhk->bsd", out_BSHK, layer["o"])


def _rotate(x_BSHK: jax.Array, base: float) -> jax.Array:
    length, width = x_BSHK.shape[1], x_BSHK.shape[-1]
    angle_SP = jnp.arange(length)[:, None] * base ** (-jnp.arange(0, width, 2) / width)
    turn_S1P = jax.lax.complex(jnp.cos(angle_SP), jnp.sin(angle_SP))[:, None]
    pairs_BSHP2 = x_BSHK.astype(jnp.float32).reshape(*x_BSHK.shape[:-1], -1, 2)
    turned_BSHP = jax.lax.complex(pairs_BSHP2[..., 0], pairs_BSHP2[..., 1]) * turn_S1P
    return jnp.stack([turned_BSHP.real, turned_BSHP.imag], -1).reshape(x_BSHK.shape).astype(x_BSHK.dtype)


def _feed_forward(layer: Tree, h_BSD: jax.Array, model: ModelConfig) -> jax.Array:
    up_BSF = jnp.einsum("bsd,df->bsf", h_BSD, layer["up"])
    if model.activation == "gelu":
        return jnp.einsum("bsf,df->bsd", jax.nn.gelu(up_BSF), layer["down"])
    gate_BSF = jax.nn.silu(jnp.einsum("bsd,df->bsf", h_BSD, layer["gate"]))
    return jnp.einsum("bsf,df->bsd", gate_BSF * up_BSF, layer["down"])

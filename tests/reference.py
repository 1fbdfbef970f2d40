"""The model, its loss and LAMB once more, as plainly as they can be written, in float64 on one device.

Independent of the package's model code: logical parameters, no fused operand, no shard, no pad, each row, layer and head
after the other. Tests differentiate `mean_loss` with ``jax.grad`` under 64-bit.
"""

import jax
import jax.numpy as jnp
import numpy as np

from megascale_jax.config.schema import ModelConfig


def _norm(model: ModelConfig, p: dict, prefix: str, x):
    if model.norm == "rmsnorm":
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + model.norm_epsilon) * p[f"{prefix}norm_scale"]
    mean = x.mean(-1, keepdims=True)
    y = (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + model.norm_epsilon) * p[f"{prefix}norm_scale"]
    return y + p.get(f"{prefix}norm_bias", 0.0)


def _turn(x, positions, base, size=None):
    """Rotary embedding as a complex product; x ``[S, heads, K]``, of which the first ``size`` elements turn."""
    if size is not None:
        return jnp.concatenate([_turn(x[..., :size], positions, base), x[..., size:]], -1)
    half = x.shape[-1] // 2
    angle = positions[:, None] * base ** (-np.arange(half) / half)[None, :]
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * jnp.exp(1j * angle)[:, None, :]
    return jnp.stack([z.real, z.imag], -1).reshape(x.shape)


def _attention(model: ModelConfig, p: dict, h, positions, segments, layer_kind):
    window, turns = layer_kind
    q, k, v = (jnp.einsum("sd,dhk->shk", h, p[n]) + p.get(f"{n}_bias", 0.0) for n in "qkv")
    if model.position == "rotary":
        q, k = (jnp.where(turns, _turn(x, positions, model.rotary_base, model.rotary_size), x) for x in (q, k))
    heads = q.shape[1]
    i, j = np.arange(len(h))[:, None], np.arange(len(h))[None, :]
    allowed = (j <= i) & (j > i - window) & (segments[:, None] == segments[None, :])

    def one_head(head):
        group = head // (heads // k.shape[1])
        scores = q[:, head] @ k[:, group].T / np.sqrt(q.shape[-1])
        weights = jnp.where(allowed, jnp.exp(scores - jnp.where(allowed, scores, -jnp.inf).max(-1, keepdims=True)), 0.0)
        return weights / weights.sum(-1, keepdims=True) @ v[:, group]

    out = jax.lax.map(one_head, jnp.arange(heads))
    return jnp.einsum("hsk,dhk->sd", out, p["o"]) + p.get("o_bias", 0.0)


def _mlp(model: ModelConfig, p: dict, h):
    up = h @ p["up"] + p.get("up_bias", 0.0)
    if model.activation == "swiglu":
        gate = h @ p["gate"] + p.get("gate_bias", 0.0)
        hidden = gate / (1 + jnp.exp(-gate)) * up
    else:
        hidden = 0.5 * up * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    return hidden @ p["down"].T + p.get("down_bias", 0.0)


def row_logits(model: ModelConfig, params: dict, tokens, positions, segments):
    """Logits ``[S, V]`` of one row; per-layer parameters are ``[L, ...]``."""
    layer_names = [n for n in params if n not in ("embedding", "position", "head", "final_norm_scale", "final_norm_bias", "head_bias")]
    x = jnp.asarray(params["embedding"][tokens], float)
    if model.position == "learned":
        x = x + params["position"][positions]
    windows = jnp.array([len(tokens) if window is None else window for window in model.windows])
    turns = jnp.array([model.rotary_layers == "all" or window is not None for window in model.windows])

    def one_layer(x, layer):
        p, kind = layer
        h = _norm(model, p, "", x)
        if model.block == "parallel":
            return x + _attention(model, p, h, positions, segments, kind) + _mlp(model, p, h), None
        x = x + _attention(model, p, h, positions, segments, kind)
        return x + _mlp(model, p, _norm(model, p, "mlp_", x)), None

    x, _ = jax.lax.scan(one_layer, x, ({n: params[n] for n in layer_names}, (windows, turns)))
    x = _norm(model, params, "final_", x)
    return x @ params["embedding" if model.tied_head else "head"].T + params.get("head_bias", 0.0)


def mean_loss(model: ModelConfig, params: dict, batch: dict):
    """Mean negative log-likelihood over the valid targets of the whole batch ``[m, B, S]``; 0 when there is none."""

    def row_loss(tokens, targets, segments, positions):
        logits = row_logits(model, params, tokens, positions, segments)
        probability = jnp.exp(logits - logits.max(-1, keepdims=True))
        probability = probability / probability.sum(-1, keepdims=True)
        chosen = probability[jnp.arange(len(targets)), jnp.maximum(targets, 0)]
        return -jnp.log(jnp.where(targets >= 0, chosen, 1.0)).sum()

    rows = [jnp.asarray(batch[key]).reshape(-1, model.sequence_length) for key in ("tokens", "targets", "segment_ids", "positions")]
    return jax.vmap(row_loss)(*rows).sum() / max((np.asarray(batch["targets"]) >= 0).sum(), 1)


def lamb_reference(params: dict, gradient_of, steps: int, layered: set[str], decays: dict[str, bool], *, lr, b1, b2, eps, decay, clip):
    """LAMB in NumPy float64, one trust ratio for each layer of each name; returns the parameters after ``steps`` updates.

    ``gradient_of(params)`` gives the raw gradients of a step.
    """
    params = {n: np.array(p, np.float64) for n, p in params.items()}
    m = {n: np.zeros_like(p) for n, p in params.items()}
    v = {n: np.zeros_like(p) for n, p in params.items()}
    for count in range(1, steps + 1):
        raw = {n: np.asarray(g, np.float64) for n, g in gradient_of(params).items()}
        factor = min(1.0, clip / np.sqrt(sum((g**2).sum() for g in raw.values())))
        for name, p in params.items():
            g = raw[name] * factor
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g * g
            for layer in range(len(p)) if name in layered else [...]:
                u = m[name][layer] / (1 - b1**count) / (np.sqrt(v[name][layer] / (1 - b2**count)) + eps)
                u = u + (decay * p[layer] if decays[name] else 0.0)
                wn, un = np.linalg.norm(p[layer]), np.linalg.norm(u)
                p[layer] = p[layer] - lr * (wn / un if wn > 0 and un > 0 else 1.0) * u
    return params


def x64():
    """Context in which JAX computes in 64 bits."""
    return jax.enable_x64(True)

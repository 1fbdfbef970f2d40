"""What every norm, activation and loss must do, on any device: values and gradients against float64, odd sizes and extreme inputs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from megascale_jax.kernels.gelu import api as gelu
from megascale_jax.kernels.loss import api as loss
from megascale_jax.kernels.norm import api as norm
from megascale_jax.kernels.target import Target

TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Relative to the largest value: some units in the last place of the type that results are rounded to."""
WIDTHS = (1, 5, 16, 33, 64, 100)
VOCAB, PADDED = 53, 56


def check_norm(kind: str, width: int, dtype: str, added: bool, implementation: str, target: Target, rows: int = 7, offset: float = 0.0):
    """Both results and all gradients."""
    rng = np.random.default_rng(width)
    x, other = (jnp.asarray(rng.standard_normal((2, rows, width)) + offset, dtype) for _ in range(2))
    scale, bias = (jnp.asarray(rng.standard_normal(width), jnp.float32) for _ in range(2))
    other, bias = other if added else None, bias if kind == "layernorm" else None

    def run(x, other, scale, bias):
        return norm.add_norm(x, other, scale, bias, kind=kind, epsilon=1e-3, implementation=implementation, target=target)

    def define(x, other, scale, bias):
        total = x if other is None else x + other
        centred = total - total.mean(-1, keepdims=True) if kind == "layernorm" else total
        y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * scale
        return total, y if bias is None else y + bias

    _compare(run, define, (x, other, scale, bias), dtype, 1.0 + abs(offset))


def check_activation(gated: bool, biased: bool, shape: tuple[int, ...], dtype: str, implementation: str, target: Target, size: float = 1.0):
    """The result and all gradients; and the backward pass that gives the result once more."""
    rng = np.random.default_rng(shape[-1])
    up, gate, d_out = (jnp.asarray(rng.standard_normal(shape) * size, dtype) for _ in range(3))
    bias, gate_bias = (jnp.asarray(rng.standard_normal(shape[-1]), dtype) for _ in range(2))
    gate, bias, gate_bias = gate if gated else None, bias if biased else None, gate_bias if biased and gated else None

    def run(*operands):
        return gelu.activate(*operands, implementation=implementation, target=target)

    def define(up, gate, bias, gate_bias):
        up = up if bias is None else up + bias
        if gate is None:
            return 0.5 * up * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (up + 0.044715 * up**3)))
        gate = gate if gate_bias is None else gate + gate_bias
        return gate / (1 + jnp.exp(-gate)) * up

    _compare(run, define, (up, gate, bias, gate_bias), dtype)
    *gradients, again = gelu.backward(up, gate, d_out, implementation=implementation, target=target)
    np.testing.assert_array_equal(again, run(up, gate, None, None))
    expected = jax.vjp(run, up, gate, None, None)[1](d_out)
    for got, want in zip(gradients, expected[:2], strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            np.testing.assert_array_equal(got, want)


def check_loss(ways: int, rows: int, dtype: str, implementation: str, target: Target, size: float = 1.0):
    """Losses and gradients of a vocabulary that is split in ``ways`` shards, joined by hand; some tokens carry no loss."""
    rng = np.random.default_rng(rows)
    logits = jnp.asarray(rng.standard_normal((1, rows, PADDED)) * size, dtype)
    targets = jnp.asarray(rng.integers(0, VOCAB, (1, rows)), jnp.int32).at[0, rows // 2].set(loss.IGNORE)
    weights = jnp.asarray(rng.standard_normal((1, rows)), jnp.float32)
    shards = [(logits[..., start : start + PADDED // ways], jnp.int32(start)) for start in range(0, PADDED, PADDED // ways)]
    options = {"implementation": implementation, "target": target}
    everyone = jnp.stack([loss.local_statistics(shard, targets, start, VOCAB, **options) for shard, start in shards])
    losses, log_total = loss.join_statistics(everyone, targets)
    parts = [loss.logits_gradient(shard, log_total, targets, start, VOCAB, weights, **options) for shard, start in shards]
    gradient = np.concatenate([np.asarray(part, np.float64) for part in parts], -1)

    wide, real = np.asarray(logits, np.float64)[..., :VOCAB], np.asarray(targets) != loss.IGNORE
    top = wide.max(-1, keepdims=True)
    total = np.exp(wide - top).sum(-1, keepdims=True)
    onehot = np.arange(VOCAB) == np.asarray(targets)[..., None]
    want = np.where(real, (top + np.log(total))[..., 0] - (wide * onehot).sum(-1), 0)
    want_gradient = (np.exp(wide - top) / total - onehot) * np.where(real, np.asarray(weights, np.float64), 0)[..., None]
    _close("loss", losses, want, 4e-6 * max(1.0, size))
    _close("gradient", gradient[..., :VOCAB], want_gradient, TOLERANCE[dtype] + 1e-6 * size)
    assert (gradient[..., VOCAB:] == 0).all(), "padded columns have no gradient"


def _compare(run: Callable, define: Callable, operands: tuple, dtype: str, size: float = 1.0) -> None:
    """``run`` and its derivative against ``define`` in float64, at the very same operands and cotangents."""
    results, pull = jax.vjp(run, *operands)
    cotangents = jax.tree.map(lambda x: jnp.cos(3 * x.astype(jnp.float32)).astype(x.dtype), results)
    gradients = pull(cotangents)
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (operands, cotangents))
        want_results, want_pull = jax.vjp(define, *wide[0])
        wanted = (want_results, want_pull(wide[1]))
    for place, (got, want) in enumerate(zip(jax.tree.leaves((results, gradients)), jax.tree.leaves(wanted), strict=True)):
        largest = max(1.0, float(np.abs(np.asarray(want)).max()))
        _close(f"array {place} {got.shape}", got, np.asarray(want), size * TOLERANCE[dtype] * largest)


def _close(what: str, got, want: np.ndarray, tolerance: float) -> None:
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all(), f"{what}: {int((~np.isfinite(got)).sum())} elements are not finite, or never written"
    worst = float(np.abs(got - want).max(initial=0.0))
    assert worst <= tolerance, f"{what} is off by {worst:.2e}, tolerance {tolerance:.1e}"

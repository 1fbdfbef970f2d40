"""What every attention implementation must do, on any device: values and gradients against float64, for shapes and masks at the edges."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from megascale_jax.config.schema import TRITON_HEAD_SIZES
from megascale_jax.kernels.attention import api
from megascale_jax.kernels.target import Target

TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Of values of size one: some units in the last place of the type that probabilities and outputs are rounded to."""


@dataclass(frozen=True)
class Case:
    """One problem; ``segments``: ``None``, or the lengths of a row's documents, what they leave being padding."""

    length: int
    window: int | None = None
    head: int = 32
    heads: int = 2
    groups: int = 1
    dtype: str = "float32"
    segments: tuple[int, ...] | None = None
    scale: float = 1.0
    batch: int = 1

    @property
    def name(self) -> str:
        """For test ids."""
        documents = "" if self.segments is None else f"-documents{'_'.join(map(str, self.segments))}"
        size = "" if self.scale == 1.0 else f"-scale{self.scale:g}"
        return f"S{self.length}-W{self.window}-K{self.head}-{self.heads}x{self.groups}-{self.dtype}{documents}{size}"


def windows(length: int, block: int) -> tuple[int | None, ...]:
    """Windows at the edges of blocks and of the row."""
    return (1, 2, block - 1, block, block + 1, length - 1, length, length + 5, None)


def edge_cases(block: int) -> list[Case]:
    """Rows and windows about a block's size."""
    lengths = (1, 7, block + 1, 2 * block, 2 * block + 6)
    edges = [Case(length, window) for length in lengths for window in windows(length, block) if window is None or window >= 1]
    return sorted(set(edges), key=lambda case: (case.length, case.window or 0))


def documents_cases(block: int) -> list[Case]:
    """Documents of all lengths, with and without padding behind them."""
    length = 2 * block + 3
    splits = [(length,), (1,) * length, (block, block, 3), (block - 1, 2, block), (5, 1, 3), (2 * block,), ()]
    return [Case(length, window, segments=split, batch=2) for split in splits for window in (None, block // 2)]


def type_cases(length: int, heads: tuple[int, ...] = TRITON_HEAD_SIZES) -> list[Case]:
    """Head sizes, types and sharing of key heads."""
    shared = [(head, dtype, groups) for head in heads for dtype, groups in (("bfloat16", 4), ("float16", 1))]
    eight = Case(length, 9, heads[0], 8, 1, "bfloat16", (length // 2, length - length // 2))
    return [Case(length, length // 2, head, 4, groups, dtype, (length - 3,)) for head, dtype, groups in shared] + [eight]


def extreme_cases(dtype: str) -> list[Case]:
    """Scores of 1e4 and more."""
    return [Case(37, window, 64, dtype=dtype, scale=scale) for window in (None, 3) for scale in (40.0, 100.0)]


def check(case: Case, implementation: str, target: Target) -> None:
    """Raise AssertionError where an implementation differs from float64."""
    rng = np.random.default_rng(case.length * 1000 + (case.window or 999) + case.head)
    B, S, K = case.batch, case.length, case.head
    q, k, v, d_out = (
        jnp.asarray(rng.standard_normal((B, S, heads, K)) * scale, case.dtype)
        for heads, scale in ((case.heads, case.scale), (case.groups, case.scale), (case.groups, 1.0), (case.heads, 1.0))
    )
    ids = None if case.segments is None else _ids(case)
    segments = None if ids is None else jnp.asarray(ids, jnp.int32)
    options = {"window": case.window, "implementation": implementation, "target": target}
    out, lse = api.forward(q, k, v, segments, **options)
    gradients = api.backward(q, k, v, segments, out, lse, d_out, **options)
    ids = np.ones((B, S), int) if ids is None else ids
    want_out, want_lse, want_gradients = expected(*(np.asarray(x, np.float64) for x in (q, k, v, d_out)), ids, case.window)
    # a weight is off by what its score is rounded by
    size = float(np.abs(np.where(np.isfinite(want_lse), want_lse, 0)).max(initial=0.0))
    tolerance = TOLERANCE[case.dtype] + 4 * size * float(np.finfo(np.float32).eps)
    _close("out", out, want_out, tolerance)
    if lse.shape == want_lse.shape:
        seen = np.isfinite(want_lse)
        assert (np.isposinf(np.asarray(lse)) == ~seen).all(), "log-sum-exp is infinite where a query sees nothing, and only there"
        _close("log-sum-exp", np.asarray(lse)[seen], want_lse[seen], 1e-5 * max(1.0, size))
    for name, got, want in zip("qkv", gradients, want_gradients, strict=True):
        _close(f"gradient of {name}", got, want, tolerance * max(case.scale, float(np.abs(want).max())))


def expected(q, k, v, d_out, ids, window):
    """Output, log-sum-exp and gradients by the definition, in the type of the arguments."""
    S, K, share = q.shape[1], q.shape[-1], q.shape[2] // k.shape[2]
    distance = np.arange(S)[:, None] - np.arange(S)[None, :]
    seen = (distance >= 0) & (distance < (window or S)) & (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, :, None]
    wide_k, wide_v = (np.repeat(x, share, axis=2) for x in (k, v))
    scores = np.where(seen[:, None], np.einsum("bshk,bthk->bhst", q, wide_k) / np.sqrt(K), -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True), -1e300)
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    weights = powers / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), np.inf)[..., 0]
    d_weights = np.einsum("bshk,bthk->bhst", d_out, wide_v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / np.sqrt(K)
    d_k, d_v = np.einsum("bhst,bshk->bthk", d_scores, q), np.einsum("bhst,bshk->bthk", weights, d_out)
    grouped = (d.reshape(*d.shape[:2], -1, share, K).sum(3) for d in (d_k, d_v))
    return np.einsum("bhst,bthk->bshk", weights, wide_v), lse, (np.einsum("bhst,bthk->bshk", d_scores, wide_k), *grouped)


def _ids(case: Case) -> np.ndarray:
    row = [index for index, length in enumerate(case.segments or (), 1) for _ in range(length)]
    row += [0] * (case.length - len(row))
    return np.stack([row] * case.batch)


def _close(what: str, got, want: np.ndarray, tolerance: float) -> None:
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all(), f"{what}: {int((~np.isfinite(got)).sum())} elements are not finite, or never written"
    worst = float(np.abs(got - want).max(initial=0.0))
    assert worst <= tolerance, f"{what} is off by {worst:.2e}, tolerance {tolerance:.1e}"

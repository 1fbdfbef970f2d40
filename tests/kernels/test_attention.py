"""What a query sees: the window, the segment and the head group, found by derivatives rather than by reading the mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.kernels.attention.reference import attention

LENGTH = 12


def influence(segment_ids, window, heads=2, kv_heads=1):
    """Boolean [S, T]: whether the output of query s depends on value t."""
    rng = np.random.default_rng(0)
    length = len(segment_ids)
    q, k, v = (jnp.asarray(rng.standard_normal((1, length, n, 4)), jnp.float32) for n in (heads, kv_heads, kv_heads))
    segments = jnp.asarray(segment_ids, jnp.int32)[None]
    gradient = jax.jacobian(lambda v: attention(q, k, v, segments, window=window).sum((0, 2, 3)))(v)
    return np.abs(np.asarray(gradient)).sum((1, 3, 4)) > 0


@pytest.mark.parametrize("window", [1, 2, 5, LENGTH - 1, LENGTH, LENGTH + 1, None])
def test_row_sees_min_of_position_and_window_keys(window):
    seen = influence([1] * LENGTH, window)
    expected = [min(i + 1, window or LENGTH) for i in range(LENGTH)]
    assert seen.sum(1).tolist() == expected
    assert all(seen[i, i - n + 1 : i + 1].all() for i, n in enumerate(expected))


@settings(deadline=None, max_examples=12)
@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=4), st.sampled_from([None, 1, 3]))
def test_row_sees_only_its_own_segment(lengths, window):
    lengths = [min(length, LENGTH - sum(lengths[:i])) for i, length in enumerate(lengths) if sum(lengths[:i]) < LENGTH]
    lengths[-1] += LENGTH - sum(lengths)
    segments = [index for index, length in enumerate(lengths) for _ in range(length)]
    offsets = [place for length in lengths for place in range(length)]
    seen = influence(segments, window)
    assert seen.sum(1).tolist() == [min(place + 1, window or 99) for place in offsets]
    for i, j in zip(*np.nonzero(seen), strict=True):
        assert j <= i and segments[i] == segments[j]


def test_query_head_reads_its_own_key_value_group():
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 6, n, 4)), jnp.float32) for n in (6, 2, 2))
    segments = jnp.ones((1, 6), jnp.int32)
    changed = v.at[:, :, 1].add(1.0)
    difference = attention(q, k, v, segments, window=None) - attention(q, k, changed, segments, window=None)
    assert np.abs(difference).max((0, 1, 3)).tolist() == pytest.approx([0, 0, 0, 1, 1, 1], abs=1e-5)


def test_output_is_finite_when_scores_are_extreme():
    q = jnp.full((1, 4, 1, 2), 1e4, jnp.float32)
    k = q * jnp.asarray([1.0, -1.0, 1.0, -1.0])[None, :, None, None]
    out = attention(q, k, jnp.ones((1, 4, 1, 2)), jnp.asarray([[1, 1, 0, 0]]), window=None)
    np.testing.assert_allclose(out, 1.0)

"""Attention: the shared suite on every implementation that runs here, what a query sees, choices and refusals.

Triton's kernels run in its interpreter, with small tiles; what a query sees is found by derivatives rather than by reading the mask.
"""

from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.errors import ConfigError
from megascale_jax.kernels.attention import api
from megascale_jax.kernels.attention.api import attention
from megascale_jax.kernels.launch import INTERPRETED, Tile
from megascale_jax.kernels.target import KernelError, Target
from tests.kernels import attention_suite as suite

LENGTH = 12
BLOCK = 32
"""The larger block of the interpreter's tiles."""
CPU = Target("cpu")
H100 = Target("gpu", 90)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: run `make aot`")
IMPLEMENTATIONS = ["reference", pytest.param("triton", marks=needs_triton)]
CASES = [*suite.edge_cases(BLOCK), *suite.documents_cases(BLOCK), *suite.type_cases(45), *suite.extreme_cases("float32")]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients_equal_float64(case, implementation):
    suite.check(case, implementation, CPU)


@needs_triton
def test_gradients_have_the_same_bits_every_time():
    q, k, v, d_out = (jax.random.normal(jax.random.key(n), (1, 70, 2, 32)) for n in range(4))
    runs = [jax.vjp(lambda *x: attention(*x, window=40, implementation="triton", target=CPU), q, k, v)[1](d_out) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        np.testing.assert_array_equal(first, second)


@needs_triton
@pytest.mark.parametrize("head", [32, 48])
def test_tensor_descriptors_load_what_pointers_load(head):
    from megascale_jax.kernels.attention import triton

    q, k, v, d_out = (jax.random.normal(jax.random.key(n), (1, 70, heads, head)) for n, heads in enumerate((2, 1, 1, 2)))
    ids = jnp.asarray([[1] * 30 + [2] * 40], jnp.int32)

    def run(tma):
        tile = Tile({"BLOCK_Q": 32, "BLOCK_K": 16, "TMA": tma}, 4, 1)
        split = Tile({"BLOCK_Q": 16, "BLOCK_K": 32, "TMA": tma, "SPLIT": 1}, 4, 1)
        out, lse = triton.forward(q, k, v, ids, window=40, architecture=INTERPRETED, tile=tile)
        return out, triton.backward(q, k, v, ids, out, lse, d_out, window=40, architecture=INTERPRETED, tiles=(tile, split))

    for by_descriptor, by_pointer in zip(jax.tree.leaves(run(1)), jax.tree.leaves(run(0)), strict=True):
        np.testing.assert_array_equal(by_descriptor, by_pointer)


@needs_triton
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # rows that do see the NaN
def test_blocks_outside_the_window_are_never_loaded():
    """What lies there may be anything, even NaN, which a masked weight of 0 would spread."""
    q, k, v, d_out = (jax.random.normal(jax.random.key(n), (1, 160, 1, 32)) for n in range(4))
    options = {"window": 20, "implementation": "triton", "target": CPU}

    def run(q, k, v, d_out):
        out, pull = jax.vjp(lambda *x: attention(*x, **options), q, k, v)
        return out, *pull(d_out)

    out, d_q, d_k, d_v = run(q, k, v, d_out)
    early = run(q, k.at[:, :64].set(jnp.nan), v.at[:, :64].set(jnp.nan), d_out)
    late = run(q.at[:, 96:].set(jnp.nan), k, v, d_out.at[:, 96:].set(jnp.nan))
    np.testing.assert_array_equal(early[0][:, 96:], out[:, 96:])
    np.testing.assert_array_equal(early[1][:, 96:], d_q[:, 96:])
    np.testing.assert_array_equal(late[2][:, :64], d_k[:, :64])
    np.testing.assert_array_equal(late[3][:, :64], d_v[:, :64])


@pytest.mark.parametrize(
    ("window", "head", "dtype", "target", "expected"),
    [
        (None, 128, "bfloat16", H100, "cudnn"),
        (1024, 128, "bfloat16", H100, "triton"),
        (None, 128, "bfloat16", Target("gpu", 80), "triton"),  # documents of a row, which cuDNN cannot keep apart there
        (None, 128, "bfloat16", Target("gpu", 80, 1), "cudnn"),
        (1024, 72, "bfloat16", H100, "cudnn"),
        (None, 128, "float32", H100, "reference"),
        (512, 128, "float32", CPU, "reference"),
    ],
)
def test_best_implementation_follows_target_and_case(monkeypatch, window, head, dtype, target, expected):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert api.choose(head, jnp.dtype(dtype), window, None, target) == expected


@pytest.mark.parametrize(
    ("implementation", "head", "dtype", "target", "reason"),
    [
        ("triton", 72, "bfloat16", H100, "heads of 64, 96, 128, 192, 256, got 72"),
        ("triton", 64, "float32", H100, "bfloat16 and float16, got float32"),
        ("triton", 64, "bfloat16", CPU, "TRITON_INTERPRET=1"),
        ("triton", 64, "bfloat16", Target("gpu"), "system.compute_capability is not set"),
        ("cudnn", 64, "bfloat16", CPU, "cuDNN runs on GPUs"),
        ("cudnn", 264, "bfloat16", H100, "multiple of 8 up to 256 here, got 264"),
        ("cudnn", 192, "bfloat16", Target("gpu", 80, 1), "multiple of 8 up to 128 here, got 192"),
        ("cudnn", 64, "bfloat16", Target("gpu", 80), "max_documents=1"),
        ("flash", 64, "bfloat16", H100, "it has cudnn, reference, triton"),
    ],
)
def test_explicit_choice_that_cannot_run_is_refused(monkeypatch, implementation, head, dtype, target, reason):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelError, match=reason):
        api.choose(head, jnp.dtype(dtype), None, implementation, target)


ROW = jnp.ones((2, 8, 4, 16))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out": ROW[:, :4]}, "out is float32.2, 4, 4, 16.; expected that of q"),
        ({"d_out": ROW.astype(jnp.bfloat16)}, "d_out is bfloat16.2, 8, 4, 16.; expected that of q"),
        ({"lse": jnp.ones((2, 4, 4))}, "the log-sum-exp has shape .2, 4, 4.; expected that of the forward pass, .2, 4, 8."),
    ],
)
def test_bad_arguments_of_the_backward_pass_are_refused_while_tracing(changed, message):
    operands = {"out": ROW, "lse": jnp.ones((2, 4, 8)), "d_out": ROW} | changed
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *x: api.backward(ROW, ROW, ROW, None, *x, window=None, implementation=None, target=CPU), *operands.values())


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_documents_of_all_rows_reach_cudnn_where_they_begin(rows):
    """By the function that JAX itself puts between its interface and cuDNN's."""
    from jax._src.cudnn.fused_attention_stablehlo import _fix_seqlen_offsets

    from megascale_jax.kernels.attention.cudnn import _documents

    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 2, 2, 3, 3], [1] * 8, [1, 1, 0, 0, 0, 0, 0, 0]][:rows], jnp.int32)
    lengths, firsts = _documents(ids, 3)
    q = jnp.zeros((rows, 8, 1, 1))
    lengths, _, firsts, _, *_ = _fix_seqlen_offsets(lengths, lengths, firsts, firsts, q, q)
    expected = [(0, 3), (3, 5), (8, 4), (12, 2), (14, 2), (16, 8), (24, 2)][: (2, 5, 6, 7)[rows - 1]]
    count = len(expected)
    assert list(zip(firsts.ravel().tolist()[:count], lengths.ravel().tolist()[:count], strict=True)) == expected
    assert set(lengths.ravel().tolist()[count:]) <= {0} and set(firsts.ravel().tolist()[count:]) == {rows * 8}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((ROW, ROW[:, :, :3], ROW[:, :, :3]), {}, "query heads 4 must be a multiple of the key heads 3"),
        ((ROW, ROW[:, :4], ROW[:, :4]), {}, "batch, length and head size must agree"),
        ((ROW, ROW, ROW[..., :8]), {}, "expected .B, S, H, K. and twice"),
        ((ROW, ROW.astype(jnp.bfloat16), ROW), {}, "cast them to one"),
        ((ROW, ROW, ROW, jnp.ones((2, 7), jnp.int32)), {}, r"segment ids are int32\[2, 7\]; expected int32 \[2, 8\]"),
        ((ROW, ROW, ROW, jnp.ones((2, 8))), {}, "segment ids are float32"),
        ((ROW, ROW, ROW), {"window": 0}, "window is 0; a query sees itself"),
    ],
)
def test_bad_arguments_are_refused_while_tracing(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *x: attention(*x, **options, target=CPU), *arguments)


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
    segments = [index for index, length in enumerate(lengths, 1) for _ in range(length)]
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
    np.testing.assert_allclose(out[0, :2], 1.0)
    np.testing.assert_array_equal(out[0, 2:], 0.0)


@pytest.mark.parametrize(
    ("wanted", "found", "fits"), [(90, "9.0", True), (90, "8.0", False), (80, "8.6", True), (80, "9.0", False), (None, "7.0", True)]
)
def test_gpus_of_another_compute_capability_are_refused(wanted, found, fits):
    devices = [SimpleNamespace(platform="gpu", compute_capability=found, device_kind="NVIDIA X")]
    if fits:
        Target("gpu", wanted).check(devices)
    else:
        with pytest.raises(
            ConfigError, match=rf"system.compute_capability is {wanted}, but there are GPUs of {float(found) * 10:.0f} .NVIDIA X."
        ):
            Target("gpu", wanted).check(devices)

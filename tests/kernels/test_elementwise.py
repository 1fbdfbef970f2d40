"""Norm, activation and loss: the shared suite on every implementation that runs here, choices and refusals."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

from megascale_jax.kernels.gelu import api as gelu
from megascale_jax.kernels.loss import api as loss
from megascale_jax.kernels.norm import api as norm
from megascale_jax.kernels.target import KernelError, Target
from tests.kernels import elementwise_suite as suite

CPU = Target("cpu")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: run `make aot`")
implementations = pytest.mark.parametrize("implementation", ["reference", pytest.param("triton", marks=needs_triton)])
dtypes = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])


@implementations
@pytest.mark.parametrize("added", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize(("width", "dtype"), [*((width, "float32") for width in suite.WIDTHS), (33, "float16"), (100, "bfloat16")])
@pytest.mark.parametrize("kind", norm.KINDS)
def test_norm_equals_float64(kind, width, added, dtype, implementation):
    suite.check_norm(kind, width, dtype, added, implementation, CPU)


@implementations
@pytest.mark.parametrize(("rows", "offset"), [(1, 0.0), (31, 0.0), (5, 100.0)], ids=["one-row", "many-rows", "far-from-zero"])
def test_norm_equals_float64_for_odd_rows(rows, offset, implementation):
    suite.check_norm("layernorm", 48, "float32", True, implementation, CPU, rows, offset)


@implementations
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "gelu"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 16), (5, 37), (9, 130)], ids=str)
def test_activation_equals_float64(shape, gated, biased, dtype, implementation):
    suite.check_activation(gated, biased, shape, dtype, implementation, CPU)


@implementations
@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "gelu"])
def test_activation_is_finite_when_inputs_are_extreme(gated, implementation):
    suite.check_activation(gated, False, (3, 20), "float32", implementation, CPU, size=100.0)


@implementations
@dtypes
@pytest.mark.parametrize("size", [1.0, 1e3])
@pytest.mark.parametrize("ways", [1, 2, 4])
def test_loss_of_a_split_vocabulary_equals_float64(ways, size, dtype, implementation):
    suite.check_loss(ways, 9, dtype, implementation, CPU, size)


@pytest.mark.parametrize("operator", ["norm", "activation", "loss"])
def test_explicit_choice_that_cannot_run_is_refused(monkeypatch, operator):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = jnp.ones((1, 4, 8))
    run = {
        "norm": lambda: norm.add_norm(x, None, x[0, 0], None, kind="rmsnorm", epsilon=1e-5, implementation="triton", target=CPU),
        "activation": lambda: gelu.activate(x, implementation="triton", target=CPU),
        "loss": lambda: loss.local_statistics(x, jnp.ones((1, 4), jnp.int32), jnp.int32(0), 8, implementation="triton", target=CPU),
    }[operator]
    with pytest.raises(KernelError, match=f"{operator} by triton cannot run: Triton kernels run on GPUs"):
        jax.eval_shape(run)


X = jnp.ones((2, 4, 8))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: norm.add_norm(X, X[:1], X[0, 0], None, kind="rmsnorm", epsilon=1e-5, target=CPU), "what is added float32.1, 4, 8."),
        (lambda: norm.add_norm(X, None, X[0, 0, :7], None, kind="rmsnorm", epsilon=1e-5, target=CPU), r"scale has shape \(7,\); expected"),
        (lambda: norm.add_norm(X, None, X[0, 0], X[0, 0], kind="rmsnorm", epsilon=1e-5, target=CPU), "rmsnorm has no bias"),
        (lambda: norm.add_norm(X, None, X[0, 0], None, kind="batchnorm", epsilon=1e-5, target=CPU), "there are layernorm and rmsnorm"),
        (lambda: gelu.activate(X, X[..., :4], target=CPU), "gate float32.2, 4, 4.; they must agree"),
        (lambda: gelu.activate(X, None, X[0, 0, :3], target=CPU), r"the bias has shape \(3,\); expected \(8,\)"),
        (lambda: gelu.activate(X, None, None, X[0, 0], target=CPU), "a gate bias without a gate"),
        (lambda: loss.local_statistics(X, jnp.ones((2, 3), jnp.int32), jnp.int32(0), 8, target=CPU), "expected int32 .2, 4., one a token"),
        (lambda: loss.local_statistics(X, jnp.ones((2, 4)), jnp.int32(0), 8, target=CPU), "targets are float32"),
    ],
)
def test_bad_arguments_are_refused_while_tracing(run, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run)

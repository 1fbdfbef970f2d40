"""The step on meshes without a pipeline against the float64 one-device reference: loss and every gradient."""

from functools import cache

import jax
import numpy as np
import pytest

from megascale_jax.train.state import initial_state
from megascale_jax.train.step import make_steps, place_batch
from tests.build import experiment, logical, perturbed, plan_of, random_batch
from tests.reference import mean_loss, x64

MESHES = [(1, 1), (2, 1), (1, 2), (4, 2), (1, 8)]
MODELS = {
    "parallel-layernorm-gelu-learned-tied-biases": {
        "position": "learned",
        "tied_head": True,
        "attention_bias": True,
        "mlp_bias": True,
        "window": (1, "full"),
    },
    "serial-rmsnorm-swiglu-rotary-gqa": {
        "block": "serial",
        "norm": "rmsnorm",
        "norm_bias": False,
        "activation": "swiglu",
        "num_heads": 16,
        "num_kv_heads": 8,
        "window": 3,
    },
    "parallel-swiglu-rotary-gqa": {
        "activation": "swiglu",
        "num_heads": 16,
        "num_kv_heads": 8,
        "mlp_bias": True,
        "window": (99, 3),
    },
    "parallel-partly-rotary-head-bias": {"rotary_size": 2, "rotary_layers": "windowed", "head_bias": True},
}
"""Chunks of two layers, of one serial layer, and of two."""
CASES = [
    (mesh, list(MODELS)[(i + j) % 3], ("none", "selective", "full")[(i + 2 * j) % 3]) for i, mesh in enumerate(MESHES) for j in range(2)
]
CASES += [((2, 2), "parallel-partly-rotary-head-bias", "selective")]
FP32_TOLERANCE = 2e-5
"""Relative to the largest element: 2**-24 times the square root of the reduction length, and some."""


@cache
def reference(kind):
    """Loss and gradients of the float64 reference; the same for every mesh, since initial values and batch are."""
    config = experiment(**MODELS[kind])
    plan = plan_of(config)
    params = perturbed(plan, initial_state(plan, make_steps(config, plan).optimizer, 0).params)
    with x64():
        plain = {name: np.asarray(p, np.float64) for name, p in logical(plan, params).items()}
        loss, gradients = jax.jit(jax.value_and_grad(lambda p: mean_loss(config.model, p, random_batch(config))))(plain)
        return float(loss), jax.tree.map(np.asarray, gradients)


def relative_error(got, expected, floor=0.0):
    """Largest difference over the largest expected element, or over ``floor`` where the exact value is zero."""
    return np.abs(np.asarray(got, np.float64) - expected).max() / max(np.abs(expected).max(), floor)


def assert_gradients_equal(plan, gradients, expected):
    """Every gradient equals the reference, relative to its largest element, and no pad has one."""
    floor = 1e-2 * max(np.abs(g).max() for g in expected.values())
    errors = {name: relative_error(g, expected[name], floor) for name, g in logical(plan, gradients).items()}
    assert max(errors.values()) < FP32_TOLERANCE, errors
    for name, gradient in gradients.items():
        whole, kept = np.asarray(gradient, np.float64), logical(plan, {name: gradient})[name].astype(np.float64)
        assert np.square(whole).sum() == pytest.approx(np.square(kept).sum()), f"{name}: a pad has a gradient"


def check(kind, config):
    """Loss and every gradient of a plan against the reference of its kind."""
    plan = plan_of(config)
    steps = make_steps(config, plan)
    params = perturbed(plan, initial_state(plan, steps.optimizer, 0).params)
    loss, gradients = steps.gradients(params, place_batch(plan, random_batch(config)))
    expected_loss, expected = reference(kind)
    assert abs(float(loss) - expected_loss) < FP32_TOLERANCE * expected_loss
    assert_gradients_equal(plan, gradients, expected)


@pytest.mark.parametrize(
    ("mesh", "kind", "remat"), CASES, ids=lambda value: value if isinstance(value, str) else f"data{value[0]}-tensor{value[1]}"
)
def test_loss_and_gradients_equal_float64_reference(mesh, kind, remat):
    check(kind, experiment(*mesh, parallel={"remat": remat}, **MODELS[kind]))


def test_bfloat16_compute_stays_within_its_precision():
    """Gradients of weights with 8 bits of mantissa: 2**-8 times a few roundings on the way."""
    kind = "serial-rmsnorm-swiglu-rotary-gqa"
    config = experiment(2, 2, train={"compute_dtype": "bfloat16"}, **MODELS[kind])
    plan = plan_of(config)
    steps = make_steps(config, plan)
    params = perturbed(plan, initial_state(plan, steps.optimizer, 0).params)
    loss, gradients = steps.gradients(params, place_batch(plan, random_batch(config)))
    expected_loss, expected = reference(kind)
    assert abs(float(loss) - expected_loss) < 2**-7 * expected_loss
    errors = {name: relative_error(g, expected[name]) for name, g in logical(plan, gradients).items()}
    assert 1e-4 < max(errors.values()) < 20 * 2**-8, errors
    assert all(g.dtype == np.float32 for g in gradients.values())

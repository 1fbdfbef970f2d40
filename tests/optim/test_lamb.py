"""The optimizer chain on plain trees."""

import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from megascale_jax.config.schema import OptimizerConfig, ScheduleConfig
from megascale_jax.errors import ConfigError
from megascale_jax.optim.lamb import make_optimizer
from megascale_jax.optim.schedule import learning_rate

LR = 0.03


def one_update(config, params, gradients, decays):
    optimizer = make_optimizer(config, lambda count: jnp.float32(LR), decays)
    return optimizer.update(gradients, optimizer.init(params), params)[0]


def test_zero_bias_moves_by_the_learning_rate_when_its_gradient_is_one():
    params, gradients = {"bias": jnp.zeros(5)}, {"bias": jnp.ones(5)}
    update = one_update(OptimizerConfig(learning_rate=LR, weight_decay=0.5), params, gradients, {"bias": False})
    np.testing.assert_allclose(update["bias"], -LR, rtol=1e-5)


def test_update_has_the_length_of_the_weight_times_the_rate_when_both_norms_are_positive():
    params, gradients = {"q": jnp.full((2, 8), 3.0)}, {"q": jnp.arange(1.0, 17.0).reshape(2, 8)}
    update = one_update(OptimizerConfig(learning_rate=LR, weight_decay=0.0), params, gradients, {"q": True})
    assert float(jnp.linalg.norm(update["q"])) == pytest.approx(LR * 12.0, rel=1e-5)


def test_weight_does_not_move_when_gradient_and_decay_are_zero():
    params = {"q": jnp.full((2, 8), 3.0)}
    update = one_update(OptimizerConfig(learning_rate=LR, weight_decay=0.0), params, {"q": jnp.zeros((2, 8))}, {"q": True})
    np.testing.assert_array_equal(update["q"], 0.0)


def test_decay_spares_what_the_mask_leaves_out():
    config = OptimizerConfig(name="adamw", learning_rate=LR, weight_decay=0.5)
    params = {"q": jnp.full(3, 2.0), "norm_scale": jnp.full(3, 2.0)}
    update = one_update(config, params, {name: jnp.zeros(3) for name in params}, {"q": True, "norm_scale": False})
    np.testing.assert_allclose(update["q"], -LR * 0.5 * 2.0, rtol=1e-6)
    np.testing.assert_array_equal(update["norm_scale"], 0.0)


@pytest.mark.parametrize("beta", [-0.1, 1.0, 1.5])
@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_beta_outside_the_unit_interval_is_refused(name, beta):
    with pytest.raises(ValidationError, match=name):
        OptimizerConfig(learning_rate=LR, **{name: beta})
    unchecked = OptimizerConfig.model_construct(**(OptimizerConfig(learning_rate=LR).model_dump() | {name: beta}))
    with pytest.raises(ConfigError, match=f"{name} is {beta}"):
        make_optimizer(unchecked, lambda count: jnp.float32(LR), {})


def test_cosine_rises_linearly_then_falls_to_its_fraction():
    rate = learning_rate(ScheduleConfig(warmup_steps=4, final_fraction=0.1), 1.0, steps=24)
    np.testing.assert_allclose([rate(jnp.int32(c)) for c in range(4)], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    assert float(rate(jnp.int32(14))) == pytest.approx(0.55)
    assert float(rate(jnp.int32(24))) == pytest.approx(0.1)
    assert float(rate(jnp.int32(99))) == pytest.approx(0.1)


def test_constant_stays_at_its_peak_after_warm_up():
    rate = learning_rate(ScheduleConfig(name="constant", warmup_steps=2), 0.5, steps=10)
    np.testing.assert_allclose([rate(jnp.int32(c)) for c in (0, 1, 9)], [0.25, 0.5, 0.5])

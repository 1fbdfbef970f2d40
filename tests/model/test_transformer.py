"""The model without a mesh: one device, plain weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megascale_jax.kernels.dispatch import select
from megascale_jax.model.attention import Rotary, rotate
from megascale_jax.model.branch import Rows, dropout
from megascale_jax.model.parameters import fused_groups, parameter_specs
from megascale_jax.model.transformer import Transformer
from tests.build import experiment


def build(**model):
    config = experiment(**({"num_layers": 6, "window": (2, "full")} | model))
    transformer = Transformer(config.model, select(config.model, config.system))
    specs, rng = parameter_specs(config.model), np.random.default_rng(0)
    layers = {}
    for group in fused_groups(config.model):
        width = sum(specs[name].columns() for name in group.members)
        shape = (config.model.num_layers, config.model.hidden_size, width) if group.has_embed else (config.model.num_layers, width)
        layers[group.name] = jnp.asarray(0.2 * rng.standard_normal(shape), jnp.float32)
    x = jnp.asarray(rng.standard_normal((2, 16, config.model.hidden_size)), jnp.float32)
    rows = Rows(jnp.broadcast_to(jnp.arange(16), (2, 16)), jnp.ones((2, 16), jnp.int32))
    return config, transformer, layers, x, rows


def test_scanned_layers_equal_layers_one_by_one():
    config, transformer, layers, x, rows = build()
    together = transformer.layers(layers, x, rows, config.model.windows)
    for index, window in enumerate(config.model.windows):
        x = transformer.layers({name: value[index : index + 1] for name, value in layers.items()}, x, rows, (window,))
    np.testing.assert_allclose(together, x, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("block", ["parallel", "serial"])
def test_future_tokens_have_no_influence(block):
    config, transformer, layers, x, rows = build(num_layers=2, block=block)
    gradient = jax.grad(lambda x: transformer.layers(layers, x, rows, config.model.windows)[0, 7].sum())(x)
    seen = np.abs(np.asarray(gradient)).sum((0, 2)) > 0
    assert seen[:8].all() and not seen[8:].any()


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(i, j):
        return (rotate(q, jnp.array([[i]]), Rotary(100.0, 8)) * rotate(k, jnp.array([[j]]), Rotary(100.0, 8))).sum()

    assert float(score(9, 4)) == pytest.approx(float(score(105, 100)), rel=1e-4)
    assert float(score(9, 4)) != pytest.approx(float(score(9, 5)), rel=1e-2)
    assert float(jnp.linalg.norm(rotate(q, jnp.array([[77]]), Rotary(100.0, 8)))) == pytest.approx(float(jnp.linalg.norm(q)), rel=1e-5)


def test_dropout_keeps_the_mean_and_its_share():
    x = jnp.ones((200, 200))
    dropped = dropout(x, 0.3, jax.random.key(0))
    assert float((dropped == 0).mean()) == pytest.approx(0.3, abs=0.01)
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.02)
    assert dropout(x, 0.3, None) is x

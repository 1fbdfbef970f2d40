"""1F1B against the float64 one-device reference: loss, every gradient, the evaluation's loss. Interleaved: `test_interleaved.py`."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from megascale_jax.parallel.pipeline import shape as shapes
from megascale_jax.parallel.pipeline.interleaved import Pipeline
from megascale_jax.parallel.plan import BATCH_PARTITION
from megascale_jax.train.step import make_steps, place_batch
from tests.build import experiment, logical, plan_of, random_batch, random_parameters
from tests.parity.test_step import FP32_TOLERANCE, assert_gradients_equal, relative_error
from tests.reference import mean_loss, x64

ROWS = 4
VALID = (1, 7, 0, -1, 3, 16, -1, 5)
"""Valid tokens of the micro-batches in turn; -1: all."""
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"position": "learned", "tied_head": True, "attention_bias": True, "mlp_bias": True, "num_heads": 8},
    "serial": {"block": "serial", "norm": "rmsnorm", "norm_bias": False, "activation": "swiglu", "num_heads": 8, "num_kv_heads": 4},
    "gqa": {"activation": "swiglu", "num_heads": 8, "num_kv_heads": 4, "mlp_bias": True},
    "partly-rotary": {"num_heads": 8, "rotary_size": 2, "rotary_layers": "windowed", "head_bias": True},
}
SHAPES = [
    # pipe, virtual stages, micro-batches, data, tensor
    (2, 1, 2, 1, 1),
    (2, 1, 4, 2, 2),
    (2, 1, 2, 4, 1),
    (2, 1, 4, 1, 4),
    (2, 1, 6, 1, 2),
    (2, 1, 8, 2, 1),
    (4, 1, 4, 1, 2),
    (4, 1, 8, 2, 1),
    (8, 1, 8, 1, 1),
    (2, 2, 2, 1, 2),
    (2, 2, 4, 2, 1),
    (2, 3, 4, 1, 2),
    (2, 3, 2, 2, 1),
    (4, 2, 4, 2, 1),
]
BF16_TOLERANCE = 2 * 2**-8 * (4 * 10) ** 0.5
"""Four layers round about ten times each on the way there and back; such errors add up like a random walk, of which two sigma."""
REMATS = ("none", "selective", "full")
KINDS = {1: ("tied", "serial", "gqa"), 2: ("tied", "gqa"), 3: ("gqa", "tied")}
"""Serial blocks, twice the branches, only where chunks are few: compiling is what these tests pay for."""
EVERY_REMAT = {(2, 1, 4, 2, 2), (4, 1, 4, 1, 2), (2, 2, 4, 2, 1), (2, 3, 4, 1, 2)}
"""Other shapes have one remat each, in turn: it changes the backward pass of a chunk, which knows nothing of the schedule. Every
pair of kind, remat, delay, chunks a stage and axis is still among the cases, but for those of eight stages."""
CASES = [
    (shape, remat, KINDS[shape[1]][(i + j) % len(KINDS[shape[1]])], (i + j) % 2)
    for i, shape in enumerate(SHAPES)
    for j, remat in enumerate(REMATS)
    if shape in EVERY_REMAT or j == i % len(REMATS)
]
CASES += [((2, 1, 4, 2, 2), "none", "partly-rotary", 1), ((4, 1, 4, 1, 2), "full", "partly-rotary", 0)]


def case_id(value):
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def configured(kind, shape, remat="none", delay=1, layers=None, num_layers=None, overlap="plain", **train):
    pipe, chunks, m, data, tensor = shape
    deep = pipe * chunks == 2 and m == 4 and layers is None
    parallel = {
        "pipe": pipe,
        "virtual_stages": chunks,
        "micro_batch_size": ROWS // data,
        "remat": remat,
        "backward_delay": delay,
        "layers": layers,
        "tensor_overlap": overlap,
    }
    window = (3, "full") if deep else (3,)
    return experiment(
        data,
        tensor,
        parallel=parallel,
        train={"global_batch_size": m * ROWS, **train},
        num_layers=num_layers or pipe * chunks * (2 if deep else 1),
        window=window,
        **MODELS[kind],
    )


@cache
def reference(kind, shape, num_layers=None, layers=None):
    """Loss and gradients of the float64 reference; batch and parameters are those of every mesh."""
    config = configured(kind, shape, num_layers=num_layers, layers=layers)
    plain, _ = random_parameters(plan_of(config))
    with x64():
        exact = {name: value.astype(np.float64) for name, value in plain.items()}
        batch = batch_of(config)
        loss, gradients = jax.jit(jax.value_and_grad(lambda p: mean_loss(config.model, p, batch)))(exact)
        return float(loss), jax.tree.map(np.asarray, gradients)


def batch_of(config):
    return random_batch(config, valid=(VALID * 2)[: config.num_micro_batches])


def check(kind, shape, config, **placement):
    plan = plan_of(config)
    steps = make_steps(config, plan)
    _, params = random_parameters(plan)
    batch = place_batch(plan, batch_of(config))
    loss, gradients = steps.gradients(params, batch)
    expected_loss, expected = reference(kind, (shape[0], shape[1], shape[2], 1, 1), **placement)
    assert abs(float(loss) - expected_loss) < FP32_TOLERANCE * expected_loss
    assert_gradients_equal(plan, gradients, expected)


@pytest.mark.parametrize(("shape", "remat", "kind", "delay"), [case for case in CASES if case[0][1] == 1], ids=case_id)
def test_loss_and_gradients_equal_float64_reference(shape, remat, kind, delay):
    check(kind, shape, configured(kind, shape, remat, delay))


@pytest.mark.parametrize(("shape", "delay"), [((1, 1, 1, 1, 1), 1), ((1, 2, 3, 1, 2), 0)], ids=case_id)
def test_one_stage_equals_the_reference(shape, delay):
    """The smallest plan of all, and backward passes that begin in the tick of their forward pass's end."""
    check("gqa", shape, configured("gqa", shape, delay=delay))


@pytest.mark.parametrize(
    ("shape", "remat", "kind"),
    [
        ((1, 2, 3, 1, 2), "none", "gqa"),
        ((2, 1, 4, 1, 4), "none", "tied"),
        ((2, 1, 4, 2, 2), "full", "gqa"),
        ((2, 2, 4, 1, 2), "selective", "gqa"),
    ],
    ids=case_id,
)
def test_ring_products_equal_the_reference(shape, remat, kind):
    config = configured(kind, shape, remat, overlap="ring")
    executor = plan_of(config).executor
    assert isinstance(executor, Pipeline) and executor.shape.ring and not executor.shape.split
    check(kind, shape, config)


def test_bfloat16_stays_within_its_precision_on_three_axes():
    kind, shape = "gqa", (2, 2, 4, 2, 2)
    config = configured(kind, shape, compute_dtype="bfloat16")
    plan = plan_of(config)
    _, params = random_parameters(plan)
    loss, gradients = make_steps(config, plan).gradients(params, place_batch(plan, batch_of(config)))
    expected_loss, expected = reference(kind, (2, 2, 4, 1, 1))
    assert abs(float(loss) - expected_loss) < 2**-8 * expected_loss
    floor = 1e-2 * max(np.abs(g).max() for g in expected.values())
    errors = {name: relative_error(g, expected[name], floor) for name, g in logical(plan, gradients).items()}
    assert 1e-4 < max(errors.values()) < BF16_TOLERANCE, errors
    assert all(g.dtype == np.float32 for g in gradients.values())


@pytest.mark.parametrize(("kind", "shape"), [("tied", (2, 2, 2, 4, 1)), ("gqa", (2, 2, 2, 2, 2))], ids=case_id)
def test_halved_weight_gradients_and_a_light_head_equal_the_reference(monkeypatch, kind, shape):
    """As large models have them: weight gradients in two parts, pieces that ride on them, the head's GEMMs outside the phases."""
    monkeypatch.setattr(shapes, "COVERING_FLOPS", 0)
    monkeypatch.setattr(shapes, "LIGHT", float("inf"))
    config = configured(kind, shape)
    executor = plan_of(config).executor
    assert isinstance(executor, Pipeline) and executor.shape.halved and executor.light
    check(kind, shape, config)


def test_evaluation_equals_the_reference_in_a_forward_pass_alone():
    kind, shape = "gqa", (2, 2, 4, 1, 2)
    config = configured(kind, shape)
    plan = plan_of(config)
    steps = make_steps(config, plan)
    _, params = random_parameters(plan)
    nats, tokens = steps.evaluate(params, place_batch(plan, batch_of(config)))
    expected, _ = reference(kind, (2, 2, 4, 1, 1))
    assert float(nats) / int(tokens) == pytest.approx(expected, rel=FP32_TOLERANCE)


def test_uneven_stages_equal_the_reference_and_their_pads_stay_zero():
    kind, shape, layers = "tied", (2, 1, 4, 2, 1), (1, 2)
    check(kind, shape, configured(kind, shape, layers=layers, num_layers=3), num_layers=3, layers=layers)


@pytest.mark.parametrize("pipe", [1, 2])
def test_micro_batches_add_up_to_one_joined_batch(pipe):
    """Without a pipeline a joined batch is one micro-batch, with all of its backward pass in the cool-down."""
    results, batch = [], {}
    for m, rows in ((4, 2), (pipe, 8 // pipe)):
        config = experiment(1, 2, parallel={"pipe": pipe, "micro_batch_size": rows}, train={"global_batch_size": 8}, num_layers=2, window=3)
        plan = plan_of(config)
        steps = make_steps(config, plan)
        _, params = random_parameters(plan)
        if not results:
            batch = random_batch(config, valid=(20, 30, 5, 1))
        loss, gradients = steps.gradients(params, place_batch(plan, {key: rows_.reshape(m, rows, -1) for key, rows_ in batch.items()}))
        results.append((float(loss), logical(plan, gradients)))
    (loss, apart), (joined_loss, joined) = results
    assert loss == pytest.approx(joined_loss, rel=1e-6)
    assert max(relative_error(apart[name], joined[name], 1e-3) for name in apart) < FP32_TOLERANCE


def test_dropout_draws_the_same_masks_forward_and_backward():
    """A step along the gradient changes the loss by its squared norm: it would not, had a backward mask differed."""
    config = configured("gqa", (2, 1, 2, 1, 2))
    config = config.model_copy(update={"model": config.model.model_copy(update={"dropout": 0.3})})
    plan = plan_of(config)
    _, params = random_parameters(plan)
    batch = place_batch(plan, batch_of(config))
    key = jax.random.key(3)

    @jax.jit
    @partial(
        plan.shard_map,
        in_specs=(plan.zero.partitions, dict.fromkeys(batch, BATCH_PARTITION)),
        out_specs=(PartitionSpec(), plan.zero.partitions),
    )
    def gradients(params, batch):
        loss, gradients = plan.executor.loss_and_gradients(params, batch, jnp.float32(0.01), key)
        return jax.lax.psum(loss, "data"), gradients

    loss, slope = gradients(params, batch)
    squared = sum(float((g.astype(jnp.float32) ** 2).sum()) for g in slope.values())
    size = 1e-3 / squared**0.5
    ends = [float(gradients({n: p + sign * size * slope[n] for n, p in params.items()}, batch)[0]) for sign in (1, -1)]
    assert (ends[0] - ends[1]) / (2 * size) == pytest.approx(squared, rel=2e-2)
    undropped, _ = reference("gqa", (2, 1, 2, 1, 1))
    assert abs(float(loss) / (0.01 * (batch["targets"] >= 0).sum()) - undropped) > 1e-3, "nothing was dropped"

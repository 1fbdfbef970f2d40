"""A whole step with Triton's kernels, in its interpreter, against the same step with the references."""

from importlib.util import find_spec

import jax
import numpy as np
import pytest

from megascale_jax.config.schema import KernelConfig, SystemConfig
from megascale_jax.train.state import initial_state
from megascale_jax.train.step import make_steps, place_batch
from tests.build import experiment, plan_of, random_batch

SHAPE = {"num_layers": 2, "hidden_size": 48, "num_heads": 2, "head_size": 16, "window": (5, "full"), "sequence_length": 16}
MODELS = {
    "layernorm-gelu": {"norm_bias": True, "mlp_bias": True, "attention_bias": True},
    "rmsnorm-swiglu-groups": {"norm": "rmsnorm", "norm_bias": False, "activation": "swiglu", "num_kv_heads": 1, "block": "serial"},
}


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: run `make aot`")
@pytest.mark.parametrize(
    ("model", "remat", "tensor"),
    [
        ("layernorm-gelu", "full", 1),
        ("rmsnorm-swiglu-groups", "selective", 1),
        ("layernorm-gelu", "none", 2),  # the vocabulary is split; without remat nothing depends on the model
    ],
)
def test_step_with_triton_kernels_gives_the_loss_and_gradients_of_the_references(model, remat, tensor):
    found = {}
    for name in ("reference", "triton"):
        kernels = KernelConfig(attention=name, norm=name, activation=name, loss=name)
        parallel = {"micro_batch_size": 1, "remat": remat}
        config = experiment(1, tensor, train={"global_batch_size": 2}, parallel=parallel, **SHAPE, **MODELS[model])
        config = config.model_copy(update={"system": SystemConfig(platform="cpu", device="CPU", kernels=kernels)})
        plan = plan_of(config)
        steps = make_steps(config, plan)
        params = initial_state(plan, steps.optimizer, 0).params
        found[name] = steps.gradients(params, place_batch(plan, random_batch(config, valid=(7, -1))))
    (loss, gradients), (wanted_loss, wanted) = found["triton"], found["reference"]
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(wanted), strict=True):
        size = float(np.abs(want).max())
        np.testing.assert_allclose(got, want, atol=2e-5 * max(size, 1e-3), err_msg=jax.tree_util.keystr(path))

"""Time stamps are results beside the others: they change no bit of these."""

import jax
import numpy as np
import pytest

from megascale_jax.train.state import initial_state
from megascale_jax.train.step import make_steps, place_batch, place_vote
from tests.build import experiment, plan_of, random_batch


def trained(stamps, pipe, dtype):
    """Loss, norm and parameters after two steps, and the stamps of the second one."""
    parallel = {"pipe": pipe, "virtual_stages": 2 // pipe, "micro_batch_size": 4}
    train = {"global_batch_size": 16, "compute_dtype": dtype, "events": {"stamps": stamps}}
    config = experiment(2, 2, parallel=parallel, train=train)
    plan = plan_of(config)
    steps = make_steps(config, plan)
    state, batch = initial_state(plan, steps.optimizer, 0), place_batch(plan, random_batch(config, valid=(-1, 7)))
    state, _ = steps.train(state, batch, place_vote(plan, False))
    state, metrics = steps.train(state, batch, place_vote(plan, False))
    numbers = {"loss": metrics["loss"], "norm": metrics["grad_norm"], **state.params}
    return jax.tree.map(np.asarray, numbers), metrics.get("stamps"), plan.executor.stamps(2)


@pytest.mark.parametrize(("pipe", "dtype"), [(1, "bfloat16"), (2, "float32")])
def test_a_step_with_stamps_has_the_same_bits_and_as_many_as_planned(pipe, dtype):
    (with_, stamps, planned), (without, none, _) = trained(True, pipe, dtype), trained(False, pipe, dtype)
    assert none is None and stamps.shape == (4 * pipe, planned.count, 2)
    different = [name for name, value in without.items() if not np.array_equal(value, with_[name])]
    assert different == [] and np.isfinite(without["loss"])

"""Cross-entropy over a split vocabulary against log-softmax in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megascale_jax.kernels.loss.reference import IGNORE, join_statistics, local_statistics, logits_gradient

VOCAB, PADDED = 13, 16


def loss_and_gradient(logits, targets, vocab):
    """Inside ``shard_map`` over ``tensor``: the loss of every token, equal on all ranks, and the gradient of their sum."""
    offset = jax.lax.axis_index("tensor") * logits.shape[-1]
    everyone = jax.lax.all_gather(local_statistics(logits, targets, offset, vocab), "tensor")
    loss, log_total = join_statistics(everyone, targets)
    return loss, logits_gradient(logits, log_total, targets, offset, vocab, jnp.ones_like(loss))


def expected(logits, targets):
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(logits, np.float64)[..., :VOCAB])

        def total(x):
            picked = jnp.take_along_axis(jax.nn.log_softmax(x), jnp.maximum(targets, 0)[..., None], -1)[..., 0]
            return -jnp.where(targets >= 0, picked, 0.0)

        gradient = jax.grad(lambda x: total(x).sum())(wide)
        return np.asarray(total(wide)), np.pad(np.asarray(gradient), ((0, 0), (0, 0), (0, PADDED - VOCAB)))


@pytest.mark.parametrize("ways", [1, 2, 4])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_loss_and_gradient_equal_log_softmax_when_vocabulary_is_split(ways, scale):
    rng = np.random.default_rng(0)
    logits = (scale * rng.standard_normal((2, 5, PADDED))).astype(np.float32)
    targets = rng.integers(0, VOCAB, (2, 5))
    targets[0, 1] = targets[1, 4] = IGNORE
    mesh = Mesh(np.array(jax.devices()[:ways]), ("tensor",))

    split = P(None, None, "tensor")
    sharded = jax.shard_map(
        lambda x, t: loss_and_gradient(x, t, VOCAB), mesh=mesh, in_specs=(split, P()), out_specs=(P(), split), check_vma=False
    )
    loss, gradient = jax.jit(sharded)(logits, targets.astype(np.int32))
    want_loss, want_gradient = expected(logits, targets)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(gradient, want_gradient, atol=2e-6)
    assert (np.asarray(gradient)[..., VOCAB:] == 0).all()


def test_ranks_without_a_real_column_take_no_part():
    """Five ids over four ranks of two: the last rank holds padding only."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))
    logits = np.random.default_rng(0).standard_normal((1, 3, 8)).astype(np.float32)
    function = jax.shard_map(
        lambda x: loss_and_gradient(x, jnp.asarray([[0, 4, 2]]), 5)[0],
        mesh=mesh,
        in_specs=P(None, None, "tensor"),
        out_specs=P(),
        check_vma=False,
    )
    want = -np.asarray(jax.nn.log_softmax(logits[..., :5]))[0, np.arange(3), [0, 4, 2]]
    np.testing.assert_allclose(jax.jit(function)(logits)[0], want, rtol=1e-5)

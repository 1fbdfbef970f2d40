"""The fused operations as rings against their plain meaning: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megascale_jax.parallel import ring, tensor


@pytest.mark.parametrize("ways", [1, 2, 3, 4, 8])
def test_rings_equal_plain_operations(ways):
    """Two ranks have one hop; three have two ways of one hop; four and eight have ways of different lengths."""
    rng = np.random.default_rng(ways)
    x, dy = (rng.standard_normal((2, 2 * ways, width)).astype(np.float32) for width in (6, 5 * ways))
    y, dx = (rng.standard_normal((2, 2 * ways, width)).astype(np.float32) for width in (5 * ways, 6))
    w = rng.standard_normal((6, 5 * ways)).astype(np.float32)

    def both(module, x, dy, y, dx, w):
        gathered, pull_in = jax.vjp(module.all_gather_matmul, x, w)
        scattered, pull_out = jax.vjp(module.matmul_reduce_scatter, y, w)
        return gathered, pull_in(dy), scattered, pull_out(dx), ring.gathered_outer(x, dy)

    sequence, columns, weights = P(None, "tensor"), P(None, None, "tensor"), P(None, "tensor")
    specs = (sequence, columns, columns, sequence, weights)
    out = (columns, (sequence, weights), sequence, (columns, weights), weights)
    mesh = Mesh(np.array(jax.devices()[:ways]), ("tensor",))
    results = [
        jax.jit(jax.shard_map(lambda *a, m=module: both(m, *a), mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))(x, dy, y, dx, w)
        for module in (ring, tensor)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *results)
    np.testing.assert_allclose(results[0][0], x @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(results[0][2], y @ jnp.asarray(w).T, rtol=1e-4, atol=1e-4)

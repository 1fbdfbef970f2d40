"""A GPU's global timer, read by a kernel of one warp. GPU targets only: the interpreter has no timer."""

import jax
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from megascale_jax.kernels.launch import Architecture, Launch, Tile, like, run

_TILE = Tile({}, warps=1, stages=1)


@triton.jit
def _kernel(after, previous, stamp):
    now = globaltimer()
    tl.store(stamp, now.to(tl.int32))
    tl.store(stamp + 1, (now >> 32).to(tl.int32))


def stamp_launch(after: jax.Array, previous: jax.Array) -> Launch:
    """The launch that takes one stamp; it reads neither operand."""
    return Launch("clock", _kernel, (after, previous), like(previous), (1,), {}, _TILE, flops=0.0, reads=False)


def stamp(after: jax.Array, previous: jax.Array, *, architecture: Architecture) -> jax.Array:
    """The time in nanoseconds, int32 ``[2]``, low word first."""
    return run(stamp_launch(after, previous), architecture)[0]

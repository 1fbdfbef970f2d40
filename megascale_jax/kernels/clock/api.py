"""Time stamps inside a compiled program: a device's clock, read where the program has come to.

A stamp is one call with two operands that it need not read: a value that must be there before, and the stamp before it, so
that stamps are taken in the order of the program, and none is merged with another or moved out of a loop. What is to come after a
stamp is tied to it by a barrier (`Stamps.tie`). Stamps are results like any other: no host waits for them.

CPU devices also count their stamps in memory that the host reads while the program runs (`Clock.taken`), so that one which hangs says
where it is. A GPU would need pages of the host mapped for it, which XLA does not give to kernels.

On GPUs a kernel of one warp reads the global timer, in nanoseconds of the GPU's own epoch; on CPUs a native handler reads
``CLOCK_MONOTONIC`` of the host, the clock of `time.monotonic_ns`. JAX has no 64-bit integers by default, so a stamp is int32 ``[2]``,
the low word first: an array ``[..., 2]`` of them is an int64 ``[...]`` on the host (`nanoseconds`).
"""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megascale_jax.kernels.target import Target

STAMP = jax.ShapeDtypeStruct((2,), jnp.int32)


class Clock:
    """Reads the clock of the devices of a target; see `Stamps`."""

    def __init__(self, target: Target, axes: tuple[str, ...] = ()):
        """``axes``: mesh axes over which the programs are mapped; with them stamps of CPU devices are counted."""
        on_gpus = target.platform == "gpu"
        self.is_of_host = not on_gpus
        """Whether it is `time.monotonic_ns`; else a device's own, which counts from elsewhere."""
        self._module = import_module(f"megascale_jax.kernels.clock.{'triton' if on_gpus else 'host'}")
        self._options: dict[str, Any] = {"architecture": target.architecture} if on_gpus else {}
        self._counted: dict[str, Any] = {"axes": axes} if axes and not on_gpus else {}

    def stamp(self, after: jax.Array, previous: jax.Array, *, counts: bool = True) -> jax.Array:
        """The time once ``after`` and the stamp ``previous`` are there, int32 ``[2]``; ``counts``: it is one of those `taken`."""
        return self._module.stamp(after, previous, **self._options, **(self._counted if counts else {}))

    def taken(self, device: int) -> int | None:
        """Stamps that a device of this process has taken since the process began, by its index in the mesh; ``None``: not counted."""
        return self._module.taken(device) if self._counted else None


class Stamps:
    """Stamps of one stretch of a program, taken while it is traced; without a clock none are, and nothing changes.

    ``last`` is the stamp before the stretch, int32 ``[2]``, afterwards its own last one; ``None`` without a clock.
    """

    def __init__(self, clock: Clock | None, last: jax.Array | None = None):
        self.clock = clock
        self.last = jnp.zeros(STAMP.shape, STAMP.dtype) if last is None and clock is not None else last
        self._taken: list[jax.Array] = []

    @property
    def is_of_host(self) -> bool:
        """Whether these are stamps of CPU devices."""
        return self.clock is not None and self.clock.is_of_host

    def take(self, after: Any) -> None:
        """A stamp once all of ``after`` is there, a tree of arrays. What reads them does not wait for it."""
        if self.clock is not None:
            assert self.last is not None, "there is a clock"
            *others, final = jax.tree.leaves(after)
            for array in others:
                self.last = self.clock.stamp(array, self.last, counts=False)
            self.last = self.clock.stamp(final, self.last)
            self._taken.append(self.last)

    def tie(self, values: Any) -> Any:
        """``values``, which are there once the last stamp is taken: what reads them runs after it."""
        if self.clock is None:
            return jax.lax.optimization_barrier(values)
        self.last, values = jax.lax.optimization_barrier((self.last, values))
        return values

    def mark(self, values: Any) -> Any:
        """A stamp once the first array of ``values`` is there, and ``values`` behind it."""
        if self.clock is None:
            return values
        self.take(jax.tree.leaves(values)[0])
        return self.tie(values)

    def append(self, stamps: jax.Array | None, last: jax.Array) -> None:
        """Stamps of another stretch, in order: int32 ``[..., 2]``, with its last one."""
        if stamps is not None:
            self._taken.append(stamps)
            self.last = last

    def all(self) -> jax.Array | None:
        """All stamps in order, int32 ``[n, 2]``; ``None`` without a clock."""
        if self.clock is None:
            return None
        return jnp.concatenate([taken.reshape(-1, *STAMP.shape) for taken in self._taken])


def nanoseconds(stamps: np.ndarray) -> np.ndarray:
    """Stamps int32 ``[..., 2]`` as int64 ``[...]`` nanoseconds of the device's clock."""
    assert stamps.dtype == np.int32 and stamps.shape[-1:] == STAMP.shape, f"{stamps.dtype}{list(stamps.shape)} are no stamps"
    return np.ascontiguousarray(stamps).view("<i8")[..., 0]

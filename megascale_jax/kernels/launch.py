"""A Triton kernel together with all that it takes to run it, as a value; and the two engines that run one.

What a kernel is to compute is decided by ``kernels/*/triton.py``, which give `Launch` values; `run` acts: in a program for
GPUs it becomes a call of the compiled kernel, and in a process started with ``TRITON_INTERPRET=1`` Triton's own
interpreter computes it on the host (`interpreter.py`). `resources.py` compiles the same value to read what it takes of a chip.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

Architecture = int | str
"""Compute capability times ten of the GPUs to compile for: 80, 90 or 100; or `INTERPRETED`."""
INTERPRETED = "interpreter"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton's default, which it warns of unless it is asked for
_PTX_VERSION = 86
"""Triton would emit the newest version that the assembler beside it knows, which XLA's own may refuse."""


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut: its block sizes by the name of the parameter, warps of a block, stages of its loop's pipeline."""

    blocks: Mapping[str, int]
    warps: int
    stages: int

    @property
    def text(self) -> str:
        """One line: ``BLOCK_Q 128, BLOCK_K 64, 8 warps, 3 stages``."""
        return ", ".join([*(f"{name} {size}" for name, size in self.blocks.items()), f"{self.warps} warps, {self.stages} stages"])


@dataclass(frozen=True)
class Launch:
    """One run of ``kernel``, whose parameters are the operands, then the results, then ``constants`` and the tile's blocks by name."""

    name: str
    kernel: Any
    operands: tuple[jax.Array, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    grid: Any
    constants: Mapping[str, Any]
    tile: Tile
    flops: float
    reads: bool = True
    """Whether it reads its operands; else they only say when it may run."""

    @property
    def keywords(self) -> dict[str, Any]:
        """All compile-time parameters."""
        return {**self.constants, **self.tile.blocks}

    @property
    def bytes(self) -> int:
        """Size of the operands that it reads, and of its results."""
        moved = (*self.operands, *self.results) if self.reads else self.results
        return sum(array.size * array.dtype.itemsize for array in moved)


def is_interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter; fixed when Triton is first imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def run(launch: Launch, architecture: Architecture) -> tuple[jax.Array, ...]:
    """The results of a launch. On a GPU target inside ``shard_map``, where there is more than one device."""
    if is_interpreted():
        from megascale_jax.kernels.interpreter import interpret

        return interpret(launch)
    jax_triton = _jax_triton()
    with jax.named_scope(launch.name):
        return tuple(
            jax_triton.triton_call(
                *launch.operands,
                kernel=launch.kernel,
                out_type=launch.results,
                grid=launch.grid,
                num_warps=launch.tile.warps,
                num_stages=launch.tile.stages,
                compute_capability=int(architecture),
                backend_options={"ptx_version": _PTX_VERSION},
                cost_estimate={"flops": int(launch.flops), "bytes_accessed": launch.bytes},
                **launch.keywords,
            )
        )


@cache
def _jax_triton() -> Any:
    from triton.backends.nvidia import driver  # pyright: ignore[reportMissingImports]

    if not hasattr(driver, "TMA_TF32"):
        driver.TMA_TF32 = 0  # jax-triton 0.4.1 takes its absence (Triton 3.6) for that of the whole backend
    import jax_triton  # pyright: ignore[reportMissingImports]

    return jax_triton


def cdiv(length: int, block: int) -> int:
    """Blocks that cover a length."""
    return -(-length // block)


def like(*arrays: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Results of the shapes and types of arrays."""
    return tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)

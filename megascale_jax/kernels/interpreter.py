"""Runs a `Launch` in Triton's interpreter, on the host: what a kernel computes can be seen without a GPU.

The process must have been started with ``TRITON_INTERPRET=1``. Arrays go in and out by a host callback, so a launch works
inside ``jit`` too. Results are filled with NaN (the largest number, where the type has none) before the kernel runs: what it
does not write is seen. The interpreter is sequential and slow; races, alignment and the pipelining of loads are invisible.

Its bf16 is repaired here: by itself it multiplies bit patterns in ``dot`` and cuts floats off instead of rounding them.
"""

from functools import cache
from threading import Lock
from typing import Any

import jax
import ml_dtypes
import numpy as np

from megascale_jax.kernels.launch import Launch


class _HostArray:
    """A NumPy buffer as the interpreter wants to see a tensor."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype
        self.shape = array.shape

    def data_ptr(self) -> int:
        """Address of the first element."""
        return self.array.ctypes.data

    def __str__(self) -> str:
        return f"{self.dtype}{self.shape}"


_one_at_a_time = Lock()
"""The interpreter rebinds Triton's language while a kernel runs; callbacks of a program come from several threads."""


def interpret(launch: Launch) -> tuple[jax.Array, ...]:
    """The results of a launch."""
    return tuple(jax.pure_callback(lambda *operands: _run(launch, operands), launch.results, *launch.operands))


def _run(launch: Launch, operands: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
    grid_executor = _grid_executor()
    inputs = [np.array(operand) for operand in operands]
    results = [np.full(result.shape, _poison(result.dtype), result.dtype) for result in launch.results]
    kernel = launch.kernel
    executor = grid_executor(kernel.rewrite(), kernel.arg_names, launch.grid)
    with _one_at_a_time:
        executor(*(_HostArray(array) for array in (*inputs, *results)), **launch.keywords)
    return tuple(results)


def _poison(dtype: Any) -> Any:
    dtype = np.dtype(dtype)
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.nan


@cache
def _grid_executor() -> type:
    """The interpreter's executor, taking NumPy arrays; repairs bf16 on the way."""
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    if not _understands_interpretation():
        raise RuntimeError("Triton was imported without TRITON_INTERPRET=1; set it before the process starts")

    class HostGridExecutor(interpreter.GridExecutor):
        def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
            return list(args_dev), dict(kwargs)

        def _restore_args_dev(self, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
            pass

    builder: Any = interpreter.InterpreterBuilder
    plain_dot, plain_cast = builder.create_dot, builder.cast_impl

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(handle.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return plain_dot(self, wide(a), wide(b), d, *options)

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar == tl.bfloat16 and to.scalar == tl.float32:
            return wide(source)
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            rounded = source.data.astype(ml_dtypes.bfloat16)
            return interpreter.TensorHandle(rounded.view(np.uint16), tl.bfloat16)
        return plain_cast(self, source, to)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    return HostGridExecutor


def _understands_interpretation() -> bool:
    import triton  # pyright: ignore[reportMissingImports]
    from triton.runtime.interpreter import InterpretedFunction  # pyright: ignore[reportMissingImports]

    @triton.jit
    def probe():
        pass

    return isinstance(probe, InterpretedFunction)

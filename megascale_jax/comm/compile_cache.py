"""Compiled programs that outlive a process: JAX's persistent cache, also for the ranks that JAX leaves out.

JAX writes the cache from process 0 alone, since on GPUs all processes have one key for a program. On CPUs the key holds a fingerprint
of the process's own devices, so every other rank would compile anew at each start: 20 s of the 30 s that four ranks need to be back.
There is no setting for that, so this module, and no other, replaces a private function of JAX.
"""

import warnings
from pathlib import Path
from typing import Any

import jax

CACHED_COMPILE_S = 0.1
"""Programs that took longer to compile than this are kept for the next start."""


def keep_compiled(folder: Path, *, every_rank: bool) -> None:
    """Have JAX keep compiled programs in ``folder``. ``every_rank``: of all processes, where their keys differ."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHED_COMPILE_S)
    if every_rank:
        _write_from_every_rank()


def _write_from_every_rank() -> None:
    from jax._src import compilation_cache, compiler

    if not hasattr(compiler, "_cache_write") or not hasattr(compilation_cache, "put_executable_and_time"):
        warnings.warn("this release of JAX keeps compiled programs in another way; ranks above 0 compile at every start", stacklevel=2)
        return

    def write(cache_key: str, compile_time_secs: float, module_name: str, backend: Any, executable: Any) -> None:
        if compile_time_secs < CACHED_COMPILE_S:
            return
        try:
            compilation_cache.put_executable_and_time(cache_key, module_name, executable, backend, int(compile_time_secs))
        except Exception as error:  # as JAX does: a cache that cannot be written stops nobody
            warnings.warn(f"{module_name} is not kept for the next start: {type(error).__name__}: {error}", stacklevel=2)

    compiler._cache_write = write

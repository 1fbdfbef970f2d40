"""What a `Launch` takes of a chip: registers, spills, shared and tensor memory, read from the assembler without a GPU.

Triton's own PTX goes to ``ptxas -v``. A program that XLA compiles proves nothing of this: it passes with kernels that
spill, or that ask for more shared memory than a block can have.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megascale_jax.errors import ConfigError
from megascale_jax.kernels.launch import Launch

_TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32"}
_CHIPS = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""Shared memory that a block can have, by compute capability."""
TENSOR_COLUMNS = 512
"""Columns of tensor memory on compute capability 100."""
_LIMIT_S = 300


@dataclass(frozen=True)
class Resources:
    """Per thread: registers and spilled bytes. Per block: shared bytes, columns of tensor memory."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_columns: int

    def problems(self, architecture: int) -> list[str]:
        """Why the kernel should not, or cannot, run on a chip; empty when all is well."""
        found = []
        if self.spill_bytes:
            found.append(f"{self.spill_bytes} bytes a thread are spilled")
        if self.shared_bytes > SHARED_BYTES[architecture]:
            found.append(f"{self.shared_bytes} bytes of shared memory, a block has {SHARED_BYTES[architecture]}")
        if self.tensor_columns > TENSOR_COLUMNS:
            found.append(f"{self.tensor_columns} columns of tensor memory, there are {TENSOR_COLUMNS}")
        return found


def resources(launch: Launch, architecture: int) -> Resources:
    """Compile a launch for a compute capability and read what it takes.

    Raises ConfigError when the assembler is not installed.
    """
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]
    from triton.compiler.compiler import make_backend  # pyright: ignore[reportMissingImports]

    names = launch.kernel.arg_names
    arrays = (*launch.operands, *launch.results)
    pointers = dict(zip(names, (_TYPES[str(array.dtype)] for array in arrays), strict=False))
    signature = pointers | dict.fromkeys(launch.keywords, "constexpr")
    attributes = {(index,): [["tt.divisibility", 16]] for index in range(len(pointers))}
    constants = {(names.index(name),): value for name, value in launch.keywords.items()}
    source = ASTSource(launch.kernel, signature, constants, attributes)
    backend = make_backend(GPUTarget("cuda", architecture, 32))
    options = backend.parse_options({"num_warps": launch.tile.warps, "num_stages": launch.tile.stages, "ptx_version": 86})
    ptx, metadata = _to_ptx(source, backend, options, architecture)
    registers, spills = _assemble(ptx, architecture)
    return Resources(registers, spills, int(metadata["shared"]), int(metadata.get("tmem_size") or 0))


def _to_ptx(source, backend, options, architecture: int):
    from triton._C.libtriton import ir  # pyright: ignore[reportMissingImports]

    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict = {}
    backend.add_stages(stages, options, source.language)
    module = source.make_ir(backend.target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    metadata: dict = {"target": backend.target, **options.__dict__}
    for name in ("ttir", "ttgir", "llir", "ptx"):
        module = stages[name](module, metadata)
    return module, metadata


def _assemble(ptx: str, architecture: int) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(assembler()), "-v", f"--gpu-name={_CHIPS[architecture]}", str(path), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas refused the kernel: {done.stderr.strip()[-500:]}")
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", done.stderr))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr))
    return registers, spills


def assembler() -> Path:
    """ptxas of the installed wheel. Raises ConfigError when there is none."""
    found = find_spec("nvidia.cu13") if find_spec("nvidia") else None
    for folder in found.submodule_search_locations or () if found else ():
        if (path := Path(folder) / "bin" / "ptxas").exists():
            return path
    raise ConfigError("no ptxas here: run `make aot`, or pip install nvidia-cuda-nvcc")

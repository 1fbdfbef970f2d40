"""Launches of every kernel on abstract arrays, in the form that takes most of a chip; also a command that prints what they take.

``python -m tests.kernels.launches`` compiles every candidate of the table (two minutes), prints a line of JSON for each: kernel,
architecture, shape class, tile, registers, problems; and where there is no problem it writes `COMPILED`, the digest of all that
this depends on. ``--sample`` compiles `sample` alone and writes nothing. A process of its own, because Triton must not be in
interpreter mode.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp

import megascale_jax.kernels
from megascale_jax.kernels.launch import Architecture, Launch, Tile
from megascale_jax.kernels.tiles import every_candidate

COMPILED = Path(__file__).with_name("compiled.sha256")
SAMPLE_HEAD = 128
Candidate = tuple[str, Architecture, int, Tile]

WIDTHS = {"norm": (1024, 2048, 5120, 8192, 12288, 16384), "activation": (6144, 1048576), "loss": (1000, 64000, 1048576)}
"""Of rows, each in the shape class that it belongs to: those of the models here, and the widest."""


def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def launches(kernel: str, width: int, tile: Tile) -> Iterator[Launch]:
    """Grouped heads, window and segments for attention; residual and biases for the others."""
    operator = kernel.split(".")[0]
    if operator == "attention":
        yield from _attention(kernel, width, tile)
        return
    below = max((known for known in classes_of(kernel) if known < width), default=0)
    for size in (size for size in WIDTHS[operator] if below < size <= width):
        yield from {"norm": _norm, "activation": _activation, "loss": _loss}[operator](kernel, size, tile)


def classes_of(kernel: str) -> set[int]:
    """All shape classes of a kernel, of whatever architecture."""
    return {width for name, _, width, _ in every_candidate() if name == kernel}


def _attention(kernel: str, head: int, tile: Tile) -> Iterator[Launch]:
    from megascale_jax.kernels.attention import triton

    q, k, ids, lse = (
        array(1, 2048, 16, head),
        array(1, 2048, 4, head),
        array(1, 2048, dtype=jnp.int32),
        array(1, 16, 2048, dtype=jnp.float32),
    )
    if kernel == "attention.forward":
        yield triton.forward_launch(q, k, k, ids, 1024, tile)
    elif kernel == "attention.backward_q":
        yield triton.backward_q_launch(q, k, k, ids, q, lse, q, 1024, tile)
    else:
        yield from triton.backward_kv_launches(q, k, k, ids, lse, q, lse, 1024, tile)


def _norm(kernel: str, width: int, tile: Tile) -> Iterator[Launch]:
    from megascale_jax.kernels.norm import triton

    x, vector = array(4096, width), array(width, dtype=jnp.float32)
    if kernel == "norm.forward":
        yield triton.forward_launch(x, x, vector, vector, "layernorm", 1e-5, tile)
    elif kernel == "norm.sums":
        yield triton.sums_launch(x, vector, x, array(4096, dtype=jnp.float32), array(4096, dtype=jnp.float32), tile)
    else:
        yield triton.backward_launch(x, vector, vector, x, x, "layernorm", 1e-5, tile)


def _activation(kernel: str, width: int, tile: Tile) -> Iterator[Launch]:
    from megascale_jax.kernels.gelu import triton

    x, vector = array(2048, width), array(width)
    for gate in (None, x):
        biases = (vector, None if gate is None else vector)
        if kernel == "activation.forward":
            yield triton.forward_launch(x, gate, *biases, tile)
        else:
            yield triton.backward_launch(x, gate, *biases, x, tile)


def _loss(kernel: str, width: int, tile: Tile) -> Iterator[Launch]:
    from megascale_jax.kernels.loss import triton

    logits, targets, offset = array(1, 2048, width), array(1, 2048, dtype=jnp.int32), array(1, dtype=jnp.int32)
    rows = array(1, 2048, dtype=jnp.float32)
    if kernel == "loss.statistics":
        yield triton.statistics_launch(logits, targets, offset, width - 3, tile)
    else:
        yield triton.gradient_launch(logits, rows, targets, offset, rows, width - 3, tile)


def sample() -> list[Candidate]:
    """Of every kernel and architecture the tile that is used first: of heads of `SAMPLE_HEAD`, or of the narrowest rows."""
    found: dict[tuple[str, Architecture], Candidate] = {}
    for kernel, architecture, width, tile in every_candidate():
        if architecture != "interpreter" and (width == SAMPLE_HEAD or not kernel.startswith("attention.")):
            found.setdefault((kernel, architecture), (kernel, architecture, width, tile))
    return list(found.values())


def digest() -> str:
    """Hexadecimal SHA-256 of kernels, launches, table, and the versions of Triton and of the assembler."""
    kernels = Path(megascale_jax.kernels.__file__).parent
    sources = [*kernels.glob("*/triton*.py"), kernels / "launch.py", kernels / "resources.py", kernels / "tiles.yaml", Path(__file__)]
    content = hashlib.sha256(f"{version('triton')} {version('nvidia-cuda-nvcc')}".encode())
    for source in sorted(sources):
        content.update(hashlib.sha256(source.read_bytes()).digest())
    return content.hexdigest()


def main(candidates: list[Candidate]) -> bool:
    """Print a line for every launch of the candidates; whether none has a problem."""
    from megascale_jax.kernels.resources import resources

    is_well = True
    for kernel, architecture, width, tile in candidates:
        assert isinstance(architecture, int), "the interpreter compiles nothing"
        for launch in launches(kernel, width, tile):
            taken = resources(launch, architecture)
            problems = taken.problems(architecture)
            line = {"kernel": kernel, "architecture": architecture, "width": width, "tile": tile.text, "registers": taken.registers}
            print(json.dumps(line | {"shared": taken.shared_bytes, "problems": problems}), flush=True)
            is_well &= not problems
    return is_well


if __name__ == "__main__":
    if sys.argv[1:] == ["--sample"]:
        sys.exit(not main(sample()))
    before = digest()
    if not main([one for one in every_candidate() if one[1] != "interpreter"]):
        sys.exit("error: some candidates have problems, see above; the digest is not written")
    COMPILED.write_text(f"{before}\n")

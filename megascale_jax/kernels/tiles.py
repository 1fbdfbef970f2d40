"""The table of tiles: which block sizes, warps and stages a kernel gets, by architecture and shape class.

``tiles.yaml`` is checked in. Of each entry's candidates the first is used, the others are there to be ranked by ``make
gpu-check``; every one of them fits the chip without spilling a register: ``python -m tests.kernels.launches`` compiles
them all to see, and a test sees that this was done since anything changed. A shape class is the largest width that an
entry is for; wider than all of them gets the last one and one log line. Nothing is tuned while a run goes on.
"""

import logging
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import jax
import yaml

from megascale_jax.errors import ConfigError
from megascale_jax.kernels.launch import Architecture, Tile

Table = Mapping[str, Any]
_log = logging.getLogger(__name__)


@cache
def table() -> Table:
    """Kernel, then architecture, then shape class; beside them ``triton``, the version that the candidates were compiled with."""
    return yaml.safe_load((files("megascale_jax.kernels") / "tiles.yaml").read_text(encoding="utf-8"))


def tile_of(kernel: str, architecture: Architecture, operand: jax.Array) -> Tile:
    """The tile for an operand whose last dim is the shape class: a head's width, a row's.

    Raises ConfigError for GPUs that are older than all of the table's.
    """
    return candidates(kernel, architecture, operand.shape[-1])[0]


def candidates(kernel: str, architecture: Architecture, width: int) -> tuple[Tile, ...]:
    """All tiles of a kernel for a shape class, best first."""
    entry = table()["kernels"][kernel]
    by_width = entry["tiles"].get(architecture)
    if by_width is None:
        by_width = entry["tiles"][_nearest(kernel, architecture)]
    classes = sorted(by_width)
    found = next((known for known in classes if width <= known), None)
    if found is None:
        found = classes[-1]
        _note_wider(kernel, architecture, width, found)
    return tuple(_tile(entry["blocks"], numbers) for numbers in by_width[found])


def every_candidate() -> list[tuple[str, Architecture, int, Tile]]:
    """Kernel, architecture, shape class and tile of the whole table."""
    return [
        (kernel, architecture, width, _tile(entry["blocks"], numbers))
        for kernel, entry in table()["kernels"].items()
        for architecture, by_width in entry["tiles"].items()
        for width, found in by_width.items()
        for numbers in found
    ]


@cache
def _nearest(kernel: str, architecture: Architecture) -> int:
    """The newest compute capability of the table that is older than one that it does not know; said once."""
    known = sorted(name for name in table()["kernels"][kernel]["tiles"] if isinstance(name, int))
    older = [name for name in known if isinstance(architecture, int) and name < architecture]
    if not older:
        raise ConfigError(f"no tiles of {kernel} for compute capability {architecture}; the kernels need one of {known} or later")
    _log.warning("no tile of %s for compute capability %s: those for %d are used", kernel, architecture, older[-1])
    return older[-1]


@cache
def _note_wider(kernel: str, architecture: Architecture, width: int, known: int) -> None:
    _log.warning("no tile of %s for width %d on %s: that for %d is used", kernel, width, architecture, known)


def _tile(blocks: list[str], numbers: list[int]) -> Tile:
    *sizes, warps, stages = numbers
    return Tile(dict(zip(blocks, sizes, strict=True)), warps, stages)

"""A scheduled XLA module read from its text: computations, instructions in order, shapes. No JAX.

Only what a report on time and overlap needs is understood; attributes stay text, asked for by name.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from megascale_jax.aot.sources import source_lines

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s16": 16, "u16": 16}
_BITS |= {"f32": 32, "s32": 32, "u32": 32, "f64": 64, "s64": 64, "u64": 64, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e[0-9]m[0-9][a-z]*)?)\[([0-9,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_START = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = ")


@dataclass(frozen=True)
class Array:
    """Type and dims of an array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size; types of fewer than 8 bits are packed."""
        return self.elements * _BITS.get(self.dtype, 8) // 8


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``arrays`` are those of its result, a tuple flattened; ``attributes`` the text behind the operands."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def bytes(self) -> int:
        """Size of the result."""
        return sum(array.bytes for array in self.arrays)

    def reference(self, attribute: str) -> str | None:
        """Name of the computation in an attribute such as ``calls`` or ``body``."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None

    def text(self, attribute: str) -> str | None:
        """A quoted attribute such as ``custom_call_target``."""
        found = re.search(rf'\b{attribute}="([^"]*)"', self.attributes)
        return found.group(1) if found else None

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """A list of numbers such as ``lhs_contracting_dims={1}``."""
        found = re.search(rf"\b{attribute}=\{{([0-9,]*)\}}", self.attributes)
        return tuple(int(n) for n in found.group(1).split(",") if n) if found else ()


@dataclass(frozen=True)
class Computation:
    """Instructions in the order of the schedule."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}


@dataclass(frozen=True)
class Module:
    """A whole program. ``sources`` are lines of this package by stack frame."""

    computations: dict[str, Computation]
    entry: Computation
    sources: Mapping[int, str]

    def source_of(self, instruction: Instruction) -> str:
        """The innermost line of this package that made an instruction; empty where the text does not tell."""
        found = re.search(r"\bstack_frame_id=(\d+)", instruction.attributes)
        return self.sources.get(int(found.group(1)), "") if found else ""


def parse_module(text: str) -> Module:
    """Read a module as ``compiled.as_text()`` prints it. Raises ValueError for a module that is not scheduled, or has no entry."""
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError("the module is not scheduled: there is no order to read; expected the text of a compiled executable")
    computations: dict[str, Computation] = {}
    entry, name, body = None, None, []
    lines = text.splitlines()
    for line in lines:
        if header := _HEADER.match(line):
            name, body = header.group(2), []
            if header.group(1):
                entry = name
        elif line == "}" and name is not None:
            computations[name] = Computation(name, tuple(body))
            name = None
        elif name is not None and (instruction := _parse_instruction(line)):
            body.append(instruction)
    if entry is None:
        raise ValueError("the module has no ENTRY computation")
    return Module(computations, computations[entry], source_lines(lines))


def trip_count(loop: Instruction) -> int:
    """Known trip count of a ``while``. Raises ValueError when XLA found none."""
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if not found:
        raise ValueError(f"loop {loop.name} has no known trip count")
    return int(found.group(1))


def branches_of(conditional: Instruction) -> tuple[str, ...]:
    """Names of the computations that a ``conditional`` chooses from."""
    listed = re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes)
    if listed:
        return tuple(name.strip().removeprefix("%") for name in listed.group(1).split(","))
    return tuple(name for which in ("true", "false") if (name := conditional.reference(f"{which}_computation")))


def _parse_instruction(line: str) -> Instruction | None:
    start = _START.match(line)
    if not start:
        return None
    rest = line[start.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    opcode = rest[:opening]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    arrays = tuple(Array(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(kind))
    return Instruction(start.group(2), opcode, arrays, operands, rest[closing + 1 :], bool(start.group(1)))


def _closing(text: str, opening: int) -> int:
    depth = 0
    for position in _parentheses(text, opening):
        depth += 1 if text[position] == "(" else -1
        if depth == 0:
            return position
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def _parentheses(text: str, start: int) -> Iterator[int]:
    return (match.start() for match in re.compile(r"[()]").finditer(text, start))

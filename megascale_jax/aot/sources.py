"""Source lines of a program's instructions, from the tables at the head of its text. No JAX.

    FileNames        1 "/.../megascale_jax/parallel/tensor.py"
    FileLocations    1 {file_name_id=1 function_name_id=1 line=18 end_line=18 column=11 end_column=11}
    StackFrames      2 {file_location_id=1 parent_frame_id=2}

An instruction names its innermost frame: ``stack_frame_id=2``. XLA prints a frame's parent one too high: here it is frame 1.
Failure case: tables or rows that are missing; what they would have told is not there, and nothing fails.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def source_lines(lines: Iterable[str]) -> dict[int, str]:
    """Number of a stack frame -> its innermost line in this package, ``megascale_jax/parallel/tensor.py:18``, if it has one.

    ``lines`` are those of a module's text.
    """
    tables = _tables(lines)
    files = {number: _ours(row.strip('"')) for number, row in tables["FileNames"].items()}
    places = {number: _pair(row, "file_name_id", "line") for number, row in tables["FileLocations"].items()}
    frames = {number: _pair(row, "file_location_id", "parent_frame_id") for number, row in tables["StackFrames"].items()}
    own: dict[int, str] = {}
    for number, (location, _) in frames.items():
        file, line = places.get(location, (0, 0))
        if line and (name := files.get(file)):
            own[number] = f"{name}:{line}"
    parents = {number: parent - 1 for number, (_, parent) in frames.items()}
    return {number: line for number in frames if (line := _innermost(number, own, parents))}


def _tables(lines: Iterable[str]) -> dict[str, dict[int, str]]:
    """Rows by number of each table at the head of a text, which ends where the first computation begins."""
    tables: dict[str, dict[int, str]] = {title: {} for title in _TABLES}
    title = ""
    for line in takewhile(lambda line: not line.startswith(("%", "ENTRY")), lines):
        if row := re.match(r"(\d+) (.*)", line):
            tables.get(title, {})[int(row.group(1))] = row.group(2)
        else:
            title = line
    return tables


def _pair(row: str, *keys: str) -> tuple[int, int]:
    """Two numbers of a row; 0, which no row has, where one is missing."""
    first, second = (int(found.group(1)) if (found := re.search(rf"\b{key}=(\d+)", row)) else 0 for key in keys)
    return first, second


def _ours(file: str) -> str:
    """Path from the package's parent on; empty for a file of others."""
    path = Path(file)
    return str(path.relative_to(_PACKAGE.parent)) if path.is_relative_to(_PACKAGE) else ""


def _innermost(number: int, own: Mapping[int, str], parents: Mapping[int, int]) -> str:
    """The frame's own line, or that of its nearest caller with one."""
    for _ in parents:  # a damaged table may lead in a circle
        if number in own or number not in parents:
            break
        number = parents[number]
    return own.get(number, "")

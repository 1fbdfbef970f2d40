"""Files that other programs read: whole or not at all, and valid JSON.

`replace_file` writes a neighbour file and renames it over the target, so a reader, a crash or a full disk never meets half
a file. `write_json` is the one writer behind every `--json PATH`; `check_json_path` is called before the work whose result it
is to hold. JSON has no NaN and no infinity: they become null. If the write fails, the old file stays and the neighbour is removed.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from megascale_jax.errors import UsageError


def replace_file(path: Path, content: bytes) -> None:
    """Make `content` the file at `path` in one step; a pipe or a device such as /dev/stdout is written to directly.

    Raises OSError (disk full, no permission); the former file is then untouched.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = path.resolve()
    neighbour = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with neighbour.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        neighbour.replace(target)
    except BaseException:
        neighbour.unlink(missing_ok=True)
        raise


def check_output_path(path: Path | None, option: str) -> None:
    """Raise UsageError unless a file can be made at `path`; None (the option was not given) is fine. Writes nothing."""
    if path is None:
        return
    parent = path.parent
    if not parent.is_dir():
        raise UsageError(f"{option} {path}: the folder {parent} does not exist; make it first or name another file")
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder, expected a file; add a file name")
    is_device = path.exists() and not path.is_file()
    if not os.access(path if is_device else parent, os.W_OK):
        raise UsageError(f"{option} {path}: no permission to write there; name another file")


def check_json_path(path: Path | None) -> None:
    """`check_output_path` for `--json`: call it before the work, so that a mistyped folder costs nothing."""
    check_output_path(path, "--json")


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, in one step: mappings, sequences, dataclasses, pydantic models, paths and numbers.

    Raises UsageError if `path` cannot be a file, OSError if the write fails, TypeError for a value that JSON cannot hold.
    """
    check_json_path(path)
    text = json.dumps(json_ready(value), indent=2, allow_nan=False, ensure_ascii=False)
    replace_file(path, f"{text}\n".encode())


def json_ready(value: object) -> Any:
    """`value` in JSON's own types; NaN and infinities become None, NumPy and JAX scalars become numbers."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case BaseModel():
            return json_ready(value.model_dump())
        case Mapping():
            return {str(key): json_ready(item) for key, item in value.items()}
        case Path():
            return str(value)
        case set() | frozenset():
            return [json_ready(item) for item in sorted(value)]
        case Sequence() if not isinstance(value, bytes | bytearray):
            return [json_ready(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_ready(getattr(value, field.name)) for field in dataclasses.fields(value)}
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        return json_ready(tolist())
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")

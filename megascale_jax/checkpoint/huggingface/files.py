"""Folders of safetensors as Hugging Face lays them: one file, or numbered ones with an index that says which holds what."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from ml_dtypes import bfloat16
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megascale_jax.errors import CheckpointError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES: Mapping[str, np.dtype] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(bfloat16)}
"""What a model can be exported in."""
READABLE = ("F32", "BF16", "F16")
"""Types, as safetensors names them, whose every value fp32 holds."""


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model. Raises CheckpointError."""
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {CONFIG}; expected the folder of a model that transformers saved") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{folder / CONFIG} holds no mapping; expected what transformers saves")
    return settings


class TensorFolder:
    """The tensors of a model's folder, read one at a time; a context manager."""

    def __init__(self, folder: Path):
        """Raises CheckpointError when there are none, or a file is missing or damaged."""
        self.folder, self._stack = folder, ExitStack()
        self._file_of: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            try:
                names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
            except (ValueError, KeyError, AttributeError) as error:
                raise CheckpointError(f"{folder / INDEX} is damaged: {error}") from error
        else:
            names = [WEIGHTS]
        if not all((folder / name).is_file() for name in names):
            missing = next(name for name in names if not (folder / name).is_file())
            raise CheckpointError(f"{folder} has no {missing}; save the model with safe_serialization=True, or fetch all of its files")
        for name in names:
            try:
                file = self._stack.enter_context(safe_open(folder / name, framework="numpy"))
            except (OSError, SafetensorError) as error:
                self._stack.close()
                raise CheckpointError(f"{folder / name} is damaged: {error}") from error
            self._file_of |= dict.fromkeys(file.keys(), file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Type of a tensor, as safetensors names it."""
        return str(self._file_of[name].get_slice(name).get_dtype())

    def read(self, name: str) -> np.ndarray:
        """A tensor of one of the `READABLE` types in fp32. Raises CheckpointError when it cannot be read."""
        try:
            return self._file_of[name].get_tensor(name).astype(np.float32)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read: {error}") from error


def write_tensors(folder: Path, sizes: Mapping[str, int], tensors: Iterable[tuple[str, np.ndarray]], limit_bytes: int) -> list[str]:
    """Write ``tensors``, in the order of ``sizes`` (bytes by name), into files of at most ``limit_bytes``; the files' names.

    A tensor that is larger has a file of its own. One file's tensors are in memory at a time. Raises OSError.
    """
    files = _files(sizes, limit_bytes)
    pending: Iterator[tuple[str, np.ndarray]] = iter(tensors)
    names = [WEIGHTS] if len(files) == 1 else [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    for name, held in zip(names, files, strict=True):
        content = dict(next(pending) for _ in held)
        assert list(content) == held, "tensors come in the order of their sizes"
        try:
            save_file(content, folder / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{name}: {error}") from error
    if len(files) > 1:
        weight_map = {tensor: name for name, held in zip(names, files, strict=True) for tensor in held}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return names


def _files(sizes: Mapping[str, int], limit_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file."""
    files: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if files[-1] and used + size > limit_bytes:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files

"""A checkpoint as a Hugging Face model, and such a model as a checkpoint; neither needs a device.

Both go through the logical parameters, so a checkpoint may have been saved on any mesh and is loaded on any. Values keep their
bits, but for bfloat16 files (rounded once) and a ``logit_scale``, which multiplies the final norm's scale: exact for a power of two.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megascale_jax.checkpoint.arrays import BlockReader, merge, rank_folder, write_blocks
from megascale_jax.checkpoint.grid import KINDS, StateGrid
from megascale_jax.checkpoint.huggingface.architectures import Architecture
from megascale_jax.checkpoint.huggingface.files import CONFIG, DTYPES, READABLE, TensorFolder, write_tensors
from megascale_jax.checkpoint.huggingface.settings import ForeignModel, to_settings
from megascale_jax.checkpoint.huggingface.tensors import Tensor, TensorFormat
from megascale_jax.checkpoint.inspect import assemble
from megascale_jax.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from megascale_jax.checkpoint.stored import Index, Region
from megascale_jax.comm.storage import Storage
from megascale_jax.config.layout import Layout
from megascale_jax.config.schema import Experiment, ModelConfig, ParallelConfig
from megascale_jax.errors import CheckpointError
from megascale_jax.model.parameters import parameter_specs

LAUNCH = "imported"
"""Folder of an imported checkpoint's arrays."""
_IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Ends of names that older files have besides parameters: masks and frequencies."""
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def export_model(
    source: Storage,
    step: int,
    model: ModelConfig,
    architecture: Architecture,
    folder: Path,
    *,
    dtype: str,
    limit_bytes: int,
    end_token: int | None,
    progress: Progress,
) -> list[str]:
    """Write a checkpoint's parameters and ``config.json`` into ``folder``, which exists; the names of the weight files.

    ``architecture`` fits the model. In memory: one file, and the layers of one block of a parameter. Raises CheckpointError.
    """
    manifest, tensor_format = read_manifest(source, step), TensorFormat(model, architecture.turns_halves)
    specs, reader, done = parameter_specs(model), BlockReader(source, manifest), 0
    for name, spec in specs.items():
        stored = manifest.arrays.get(f"params.{name}")
        expected = (model.num_layers, *spec.shape) if spec.per_layer else spec.shape
        if stored is None or stored.shape != expected:
            have = "lacks it" if stored is None else list(stored.shape)
            raise CheckpointError(f"the checkpoint is of another model: params.{name}: checkpoint {have}, expected {list(expected)}")
    runs = [
        (tensor, layers) for tensor in architecture.tensors if tensor_format.is_present(tensor) for layers in _runs(tensor, model, manifest)
    ]
    sizes = {
        tensor.name.format(layer=layer): int(np.prod(tensor_format.shape(tensor))) * DTYPES[dtype].itemsize
        for tensor, layers in runs
        for layer in layers
    }
    total = sum(sizes.values())

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal done
        for tensor, layers in runs:
            parts = {member: read(member, layers) for member in tensor.members if member in specs}
            for layer in layers:
                own = {member: value[layer - layers.start] if tensor.per_layer else value for member, value in parts.items()}
                name = tensor.name.format(layer=layer)
                yield name, tensor_format.encode(tensor, own).astype(DTYPES[dtype])
                done += sizes[name]
                progress(done, total)

    def read(member: str, layers: range) -> np.ndarray:
        array = manifest.arrays[f"params.{member}"]
        start, stop = [0] * len(array.shape), list(array.shape)
        if specs[member].per_layer:
            start[0], stop[0] = layers.start, layers.stop
        return assemble(reader, array, Region(tuple(start), tuple(stop), tuple(start)))

    names = write_tensors(folder, sizes, tensors(), limit_bytes)
    settings = to_settings(architecture, model, dtype, end_token)
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return names


def _runs(tensor: Tensor, model: ModelConfig, manifest: Manifest) -> Iterator[range]:
    """Layers that lie in one block, run by run; what belongs to no layer is one run."""
    if not tensor.per_layer:
        yield range(1)
        return
    stored = manifest.arrays.get(f"params.{tensor.members[0]}")
    at_once = stored.chunk[0] if stored is not None else 1
    for first in range(0, model.num_layers, at_once):
        yield range(first, min(first + at_once, model.num_layers))


def check_tensors(foreign: ForeignModel, files: TensorFolder) -> None:
    """Raise CheckpointError unless the files hold the model: every tensor with its shape, none that we would not read."""
    tensor_format = TensorFormat(foreign.model, foreign.architecture.turns_halves)
    names = _Names(foreign, files)
    problems, known = [], set()
    for tensor in foreign.architecture.tensors:
        for layer in range(foreign.model.num_layers) if tensor.per_layer else (0,):
            name = names.of(tensor, layer)
            known.add(name)
            if not tensor_format.is_present(tensor):
                if name in files.names and not (foreign.model.tied_head and tensor.members == ("head",)):
                    problems.append(f"{name}: there, but config.json knows no such tensor")
            elif name not in files.names:
                problems.append(f"{name}: missing, expected {list(tensor_format.shape(tensor))}")
            elif files.shape(name) != tensor_format.shape(tensor):
                problems.append(f"{name}: {list(files.shape(name))}, expected {list(tensor_format.shape(tensor))}")
            elif files.dtype(name) not in READABLE:
                problems.append(f"{name}: {files.dtype(name)}, expected {' or '.join(READABLE)}")
    problems += [f"{name}: unknown" for name in sorted(files.names - known) if not name.endswith(_IGNORED)]
    if problems:
        shown = "\n  - ".join(["", *problems[:10], *([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])])
        raise CheckpointError(f"{files.folder} is no {foreign.architecture.name} model that ours can be:{shown}")


def import_model(
    foreign: ForeignModel, files: TensorFolder, target: Storage, experiment: Experiment, description: Mapping[str, Any], progress: Progress
) -> Manifest:
    """Publish a checkpoint of step 0: the files' parameters, zero moments, the counters of a run that has not begun.

    ``check_tensors`` has passed. Blocks of one layer, whatever the experiment's mesh. Raises CheckpointError when the target has
    step 0 already.
    """
    if target.has(f"0/{MANIFEST}"):
        raise CheckpointError(f"{target.url} has a checkpoint of step 0 already; name another folder")
    model, compression = experiment.model, experiment.train.checkpoint.compression
    layout = Layout.of(model.model_copy(update={"window": "full"}), ParallelConfig(virtual_stages=model.num_layers))
    grid = StateGrid(parameter_specs(model), layout, model.num_layers)
    counters = _counters(experiment.train.seed)
    read = _LogicalReader(foreign, files)
    data, done, whole = f"0/{LAUNCH}", 0, sum(one.chunk_bytes * len(list(one.indices())) for one in grid.stored.values())

    def blocks() -> Iterator[tuple[str, Index, np.ndarray]]:
        nonlocal done
        for name, array in grid.stored.items():
            for block in grid.blocks(name, 0):
                kind, _, parameter = name.partition(".")
                if name in counters:
                    value = counters[name]
                elif kind == KINDS[0]:
                    value = read(parameter, block.index[0])
                else:
                    value = np.zeros(array.chunk, np.float32)
                assert value.size == np.prod(array.chunk), "one device has no pads"
                yield name, block.index, np.ascontiguousarray(value).reshape(-1).view(np.uint8)
                done += value.nbytes
                progress(done, whole)

    total = write_blocks(target, rank_folder(data, 0), grid.stored, blocks(), compression)[1]
    merge(target, data, grid.stored, 1, compression)
    manifest = Manifest(0, LAUNCH, grid.stored, 1, total, compression, time.time(), description)
    target.write(f"0/{MANIFEST}", manifest.to_bytes())
    target.sync("0")
    return manifest


def _counters(seed: int) -> dict[str, np.ndarray]:
    """Of a run that has not begun; the key is the seed's own."""
    key = np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
    return {"step": np.zeros((), np.int32), "updates": np.zeros((), np.int32), "rng": key}


class _Names:
    """Names of tensors as the files have them: those of a base model lack its prefix."""

    def __init__(self, foreign: ForeignModel, files: TensorFolder):
        self._base = foreign.architecture.base
        self._is_bare = not any(name.startswith(self._base) for name in files.names)

    def of(self, tensor: Tensor, layer: int) -> str:
        """The name of a tensor, or of one layer's."""
        name = tensor.name.format(layer=layer)
        return name.removeprefix(self._base) if self._is_bare else name


class _LogicalReader:
    """Logical parameters from the files."""

    def __init__(self, foreign: ForeignModel, files: TensorFolder):
        self._files, self._names, self._scale = files, _Names(foreign, files), np.float32(foreign.logit_scale)
        self._tensor_format = TensorFormat(foreign.model, foreign.architecture.turns_halves)
        self._tensor_of = {member: tensor for tensor in foreign.architecture.tensors for member in tensor.members}

    def __call__(self, parameter: str, layer: int) -> np.ndarray:
        """A parameter of the model, or of one layer."""
        tensor = self._tensor_of[parameter]
        value = self._tensor_format.decode(tensor, self._files.read(self._names.of(tensor, layer)), parameter)
        return value * self._scale if parameter in ("final_norm_scale", "final_norm_bias") else value

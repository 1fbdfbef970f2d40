"""A checkpoint cut anew for another mesh, without a device: what loads anywhere then loads there without any exchange."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from megascale_jax.checkpoint.arrays import BlockReader, merge, rank_folder, write_blocks
from megascale_jax.checkpoint.cipher import KEY_FILE
from megascale_jax.checkpoint.grid import StateGrid
from megascale_jax.checkpoint.inspect import assemble, chunk_region
from megascale_jax.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from megascale_jax.checkpoint.stored import Index
from megascale_jax.comm.storage import Storage
from megascale_jax.errors import CheckpointError


def reshard(
    source: Storage, step: int, target: Storage, grid: StateGrid, description: dict[str, Any], progress: Callable[[int, int], None]
) -> Manifest:
    """Write a step of ``source`` to ``target`` in the blocks of ``grid``; the manifest that is published.

    One block is in memory at a time. Raises CheckpointError when the arrays are of another model, or the target has the step already.
    """
    old = read_manifest(source, step)
    if target.has(f"{step}/{MANIFEST}"):
        raise CheckpointError(f"{target.url} has a checkpoint of step {step} already; name another folder")
    for name, array in grid.stored.items():
        if name not in old.arrays or (old.arrays[name].shape, old.arrays[name].dtype) != (array.shape, array.dtype):
            have = list(old.arrays[name].shape) if name in old.arrays else "lacks it"
            raise CheckpointError(f"the checkpoint is of another model: {name}: checkpoint {have}, expected {list(array.shape)}")
    if old.key_id and not target.key_file:
        raise CheckpointError(f"step {step} of {source.url} is encrypted; name its key file for the new one too, in {KEY_FILE}")
    reader, launch, done = BlockReader(source, old), f"{old.launch}-resharded", 0
    data = f"{step}/{launch}"

    def blocks(rank: int) -> Iterator[tuple[str, Index, np.ndarray]]:
        nonlocal done
        for name, array in grid.stored.items():
            for block in grid.blocks(name, rank):
                if block.is_owned:
                    part = assemble(reader, old.arrays[name], chunk_region(array, block.index))
                    whole = np.zeros(array.chunk, array.dtype)
                    whole[tuple(map(slice, part.shape))] = part
                    yield name, block.index, whole.reshape(-1).view(np.uint8)
                    done += whole.nbytes
                    progress(done, sum(one.chunk_bytes * len(list(one.indices())) for one in grid.stored.values()))

    ranks, total = grid.layout.mesh.size, 0
    for rank in range(ranks):
        total += write_blocks(target, rank_folder(data, rank), grid.stored, blocks(rank), old.compression)[1]
    merge(target, data, grid.stored, ranks, old.compression)
    manifest = Manifest(step, launch, grid.stored, ranks, total, old.compression, old.created_unix_s, description, old.run, old.key_id)
    target.write(f"{step}/{MANIFEST}", manifest.to_bytes())
    target.sync(str(step))
    return manifest

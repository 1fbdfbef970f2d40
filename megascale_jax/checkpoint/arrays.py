"""The arrays of a checkpoint on its storage: zarr3 in OCDBT, every block with a CRC-32C that TensorStore verifies on reading.

Each rank writes a database of its own, so ranks never wait for each other; merging copies the nodes of their trees, not the
data. Anything that reads zarr3 through TensorStore reads the result, Orbax included (``_METADATA`` is its table of leaves).
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from megascale_jax.checkpoint.cipher import Cipher, cipher_for
from megascale_jax.checkpoint.manifest import Manifest
from megascale_jax.checkpoint.stored import Index, StoredArray
from megascale_jax.comm.storage import Storage, StorageError, wait, wait_all
from megascale_jax.errors import CheckpointError, DamagedCheckpointError

BATCH_BYTES = 64 << 20
"""Blocks written in one transaction: few files, and little memory beside the blocks themselves."""
_RANK = "ocdbt.process_"
_DAMAGE = ("NOT_FOUND", "DATA_LOSS", "OUT_OF_RANGE", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "")
"""TensorStore's status (none for what cannot be decoded) for what is missing, short or not as its checksum says; all others, such as a
disk's or network's errors, say nothing about the checkpoint."""
_STATUS = re.compile(r"([A-Z_]{4,}): ")


def rank_folder(data: str, rank: int) -> str:
    """Folder of one rank's database. The name is Orbax's."""
    return f"{data}/{_RANK}{rank}"


def write_blocks(
    storage: Storage,
    folder: str,
    arrays: Mapping[str, StoredArray],
    blocks: Iterable[tuple[str, Index, np.ndarray]],
    compression: str,
) -> tuple[int, int]:
    """Write blocks (array, place, its bytes) into the database in ``folder``; number of blocks and bytes. Raises OSError.

    With a key file of the storage the blocks are sealed, and are values of the database that only `BlockReader` understands.
    """
    database = storage.database(folder)
    cipher = Cipher(storage.key_file) if storage.key_file else None
    opened: dict[str, ts.TensorStore] = {}
    number, total, waiting, in_batch = 0, 0, [], 0
    transaction = ts.Transaction()
    for name, index, raw in blocks:
        array = arrays[name]
        if cipher is not None:
            key = _sealed_key(name, index)
            sealed = cipher.seal(raw.tobytes(), f"{folder.rpartition('/')[0]}/{key}")
            waiting.append(database.with_transaction(transaction).write(key, sealed))
        else:
            if name not in opened:
                opened[name] = _open(database, array, compression, assume_metadata=True)
            where, inside = _chunk(array, index)
            block = raw.view(array.dtype).reshape(array.chunk)[inside]
            writing = opened[name].with_transaction(transaction)[where].write(block, can_reference_source_data_indefinitely=True)
            waiting.append(writing)
        number, total, in_batch = number + 1, total + raw.nbytes, in_batch + raw.nbytes
        if in_batch >= BATCH_BYTES:
            wait_all(waiting)
            wait(transaction.commit_async())
            transaction, waiting, in_batch = ts.Transaction(), [], 0
    wait_all(waiting)
    wait(transaction.commit_async())
    return number, total


def merge(storage: Storage, data: str, arrays: Mapping[str, StoredArray], ranks: int, compression: str) -> None:
    """Make one database of those of all ranks, with the arrays' metadata. Raises OSError, also when a block is missing."""
    merged = storage.database(data)
    transaction = ts.Transaction(atomic=True)
    into = merged.with_transaction(transaction)
    wait_all([storage.database(rank_folder(data, rank)).experimental_copy_range_to(into) for rank in range(ranks)])
    blocks, expected = len(wait(into.list())), sum(math.prod(array.grid) for array in arrays.values())
    if blocks != expected:
        raise StorageError(f"{blocks} blocks were written, expected {expected}")
    if not storage.key_file:
        for array in arrays.values():
            _open(into, array, compression, create=True)
        storage.write(f"{data}/_METADATA", json.dumps(_orbax_metadata(arrays)).encode())
    wait(transaction.commit_async())


class BlockReader:
    """Blocks of a published checkpoint, verified. ``bytes_read`` counts what came back, for whoever wants to know."""

    def __init__(self, storage: Storage, manifest: Manifest):
        """Raises CheckpointError when it cannot be opened: another key, a damaged root."""
        self._manifest, self._where = manifest, f"checkpoint {storage.url}/{manifest.step}"
        self._cipher = cipher_for(manifest.key_id, storage.key_file, self._where)
        try:
            self._database = storage.database(manifest.data)
        except StorageError as error:
            raise self._error("", error) from error
        self._opened: dict[str, ts.TensorStore] = {}
        self.bytes_read = 0

    def size(self, name: str) -> int:
        """Bytes of one block of an array."""
        return self._manifest.arrays[name].chunk_bytes

    def start(self, name: str, index: Index) -> Any:
        """Begin to read a block; give the result to `finish`."""
        array = self._manifest.arrays[name]
        if self._cipher is not None:
            return self._database.read(_sealed_key(name, index))
        try:
            if name not in self._opened:
                self._opened[name] = _open(self._database, array, self._manifest.compression)
            return self._opened[name][_chunk(array, index)[0]].read()
        except StorageError as error:
            raise self._error(f"array {name}: ", error) from error

    def finish(self, name: str, index: Index, reading: Any) -> np.ndarray:
        """The block with its grid's shape, less at the upper edge of the array.

        Raises DamagedCheckpointError for a missing or altered one, CheckpointError when the storage cannot be asked.
        """
        try:
            block = wait(reading)
            if self._cipher is not None:
                block = self._unsealed(name, index, block)
        except StorageError as error:
            raise self._error(f"block {list(index)} of {name}: ", error) from error
        self.bytes_read += block.nbytes
        return block

    def _unsealed(self, name: str, index: Index, found: Any) -> np.ndarray:
        assert self._cipher is not None, "only what is sealed is opened"
        if found.state == "missing":
            raise DamagedCheckpointError(f"{self._where}: block {list(index)} of {name} is missing")
        array = self._manifest.arrays[name]
        raw = np.frombuffer(self._cipher.open(found.value, f"{self._manifest.data}/{_sealed_key(name, index)}"), array.dtype)
        return raw.reshape(array.chunk)[_chunk(array, index)[1]]

    def _error(self, what: str, error: StorageError) -> CheckpointError:
        status = _STATUS.match(str(error))
        if (status[1] if status else "") in _DAMAGE:
            return DamagedCheckpointError(f"{self._where}: {what}{error}")
        return CheckpointError(f"{self._where} cannot be read now: {what}{error}; nothing is wrong with it as far as one can see")

    def read(self, name: str, index: Index) -> np.ndarray:
        """`start` and `finish`."""
        return self.finish(name, index, self.start(name, index))


def _sealed_key(name: str, index: Index) -> str:
    return f"{name}/sealed/{'/'.join(map(str, index))}"


def _chunk(array: StoredArray, index: Index) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where a block lies in its array, and what of the block that is: at the upper edge less than all."""
    starts = [place * step for place, step in zip(index, array.chunk, strict=True)]
    stops = [min(start + step, size) for start, step, size in zip(starts, array.chunk, array.shape, strict=True)]
    where = tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))
    return where, tuple(slice(0, part.stop - part.start) for part in where)


def _open(database: ts.KvStore, array: StoredArray, compression: str, **options: Any) -> ts.TensorStore:
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if compression == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": 1}})
    metadata = {
        "shape": array.shape,
        "data_type": array.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.chunk}},
        "fill_value": 0,
        "codecs": [*codecs, {"name": "crc32c"}],
    }
    spec = {
        "driver": "zarr3",
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,  # a block of zeros is data too: a missing one must not look like it
        "fill_missing_data_reads": False,
        "recheck_cached_data": False,
    }
    return wait(ts.open(spec, kvstore=database / f"{array.name}/", open=True, **options))


def _orbax_metadata(arrays: Mapping[str, StoredArray]) -> dict[str, Any]:
    tree: defaultdict[str, Any] = defaultdict(dict)
    for name, array in arrays.items():
        keys = tuple(name.split("."))
        tree[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": array.chunk},
        }
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }

"""What lies on storage: readable by Orbax, every flipped byte found, nothing missing taken for zeros."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from megascale_jax.checkpoint.arrays import BlockReader
from megascale_jax.checkpoint.manifest import MANIFEST, Manifest, newest_good, published_steps, read_manifest, scan
from megascale_jax.comm.storage import Storage
from megascale_jax.errors import CheckpointError, DamagedCheckpointError
from tests.build import logical
from tests.checkpoint.states import plan, published, random_state


def read_everything(folder, step=7):
    """Number of all values' bytes, in order."""
    storage = Storage(folder)
    manifest = read_manifest(storage, step)
    reader, values = BlockReader(storage, manifest), zlib.crc32(b"")
    for name, array in manifest.arrays.items():
        for index in array.indices():
            values = zlib.crc32(reader.read(name, index).tobytes(), values)
    return values


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_orbax_reads_the_arrays(compression, tmp_path):
    here = plan(data=3, tensor=2)
    manifest = published(tmp_path, here, compression=compression)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {}
    for name, array in manifest.arrays.items():
        *above, leaf = name.split(".")
        level = wanted if not above else wanted.setdefault(above[0], {})
        level[leaf] = jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype), sharding=where)
    found = ocp.StandardCheckpointer().restore(tmp_path / manifest.data, wanted)
    state = random_state(here)
    for kind in ("params", "first_moment"):
        expected = logical(here, {name: state[f"{kind}.{name}"] for name in here.zero.specs})
        jax.tree.map(np.testing.assert_array_equal, found[kind], expected)
    assert int(found["step"]) == 7


def test_every_flipped_byte_is_found_or_harmless(tmp_path):
    """Each file of the checkpoint, at several places: reading gives the written values or says that it is damaged.

    Reading never touches Orbax's table of leaves, nor the roots of each rank's own tree, which the merged tree replaces.
    """
    published(tmp_path, plan(data=2, tensor=2))
    whole, harmless = read_everything(tmp_path), set()
    for file in sorted(path for path in (tmp_path / "7").rglob("*") if path.is_file()):
        content, found = file.read_bytes(), 0
        places = np.linspace(0, len(content) - 1, 7).astype(int)
        for place in places:
            file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            try:
                assert read_everything(tmp_path) == whole, file
            except DamagedCheckpointError:
                found += 1
        file.write_bytes(content)
        if not found:
            harmless.add(file.relative_to(tmp_path / "7/launch").as_posix())
    # besides, a file of a rank may hold nothing but nodes that later ones replaced
    assert {name for name in harmless if "/d/" not in name} == {"_METADATA", "ocdbt.process_0/manifest.ocdbt"}


@pytest.mark.parametrize("how", ["truncated", "missing", "empty"])
def test_short_and_missing_files_are_damage(how, tmp_path):
    published(tmp_path, plan(data=2))
    files = [path for path in (tmp_path / "7/launch/ocdbt.process_0/d").iterdir() if path.stat().st_size > 10_000]
    victim = max(files, key=lambda path: path.stat().st_size)
    content = victim.read_bytes()
    if how == "missing":
        victim.unlink()
    else:
        victim.write_bytes(content[: len(content) // 2] if how == "truncated" else b"")
    with pytest.raises(DamagedCheckpointError, match="block"):
        read_everything(tmp_path)


def test_missing_block_is_not_taken_for_zeros(tmp_path):
    manifest = published(tmp_path, plan(data=2))
    database = Storage(tmp_path).database(manifest.data)
    database.write("params.q/c/1/0/0/0", None).result()
    with pytest.raises(DamagedCheckpointError, match=r"block \[1, 0, 0, 0\] of params\.q"):
        read_everything(tmp_path)


def test_every_block_is_written_once(tmp_path):
    here = plan(data=2, tensor=2, pipe=2)
    manifest = published(tmp_path, here)
    grid_bytes = sum(array.chunk_bytes * len(list(array.indices())) for array in manifest.arrays.values())
    assert manifest.num_bytes == grid_bytes


def test_published_is_what_has_a_manifest(tmp_path):
    here = plan(data=2)
    for step in (3, 12):
        published(tmp_path, here, step)
    (tmp_path / "20/abc").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    assert published_steps(tmp_path) == [3, 12]
    assert newest_good(Storage(tmp_path)).step == 12
    (tmp_path / "12" / MANIFEST).write_text("{")
    assert published_steps(tmp_path) == [3, 12]
    assert newest_good(Storage(tmp_path)).step == 3
    assert "damaged" in str(scan(Storage(tmp_path))[1].problem)


def test_manifest_of_a_newer_format_and_of_another_step_are_refused(tmp_path):
    manifest = published(tmp_path, plan(data=2))
    assert Manifest.from_bytes(manifest.to_bytes(), "here") == manifest
    newer = Manifest(**{**vars(manifest), "format": 2})
    with pytest.raises(CheckpointError, match="has format 2, this release reads up to 1"):
        Manifest.from_bytes(newer.to_bytes(), "here")
    (tmp_path / "7").rename(tmp_path / "8")
    with pytest.raises(CheckpointError, match="is of step 7: the folder was renamed"):
        read_manifest(Storage(tmp_path), 8)
    with pytest.raises(CheckpointError, match="is not complete"):
        read_manifest(Storage(tmp_path), 9)


def test_files_are_for_the_owner_only_when_the_keeper_writes_them(tmp_path):
    """The keeper's umask; see `keeper_process.serve`."""
    import os

    old = os.umask(0o077)
    try:
        published(tmp_path / "checkpoints", plan(data=2))
    finally:
        os.umask(old)
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "checkpoints").rglob("*")}
    assert modes == {0}

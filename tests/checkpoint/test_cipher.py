"""Encrypted checkpoints: nothing of the state is readable, the wrong key is told from damage, a moved block does not open."""

import numpy as np
import pytest

from megascale_jax.checkpoint.arrays import BlockReader
from megascale_jax.checkpoint.cipher import Cipher, cipher_for
from megascale_jax.checkpoint.manifest import published_steps, read_manifest
from megascale_jax.checkpoint.restore import load_arrays
from megascale_jax.checkpoint.two_stage import CheckpointStore
from megascale_jax.comm.storage import Storage
from megascale_jax.config.schema import CheckpointConfig
from megascale_jax.errors import CheckpointError, DamagedCheckpointError, UsageError
from tests.checkpoint.states import check_state, plan, random_state


def key_file(folder, name="key", content=b"k" * 32, mode=0o600):
    path = folder / name
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


@pytest.fixture
def sealed(tmp_path, monkeypatch):
    """An encrypted checkpoint of step 7 and its key file."""
    monkeypatch.setenv("MEGASCALE_KEEPER", str(tmp_path / "keeper"))
    key, here = key_file(tmp_path), plan(data=3)
    store = CheckpointStore(tmp_path / "checkpoints", tmp_path.name, here, CheckpointConfig(key_file=key), pytest.fail)
    store.save(7, random_state(here), {"note": 7})
    store.close(is_over=True)
    return tmp_path / "checkpoints", key


def test_state_comes_back_on_another_mesh_and_is_not_readable_without_the_key(sealed):
    folder, key = sealed
    target = plan(tensor=2)
    check_state(target, load_arrays(Storage(folder, key), 7, target))
    content = b"".join(path.read_bytes() for path in folder.rglob("d/*"))
    state = random_state(plan())
    for name in ("params.embedding", "second_moment.up"):
        rows = np.asarray(state[name]).reshape(-1, np.asarray(state[name]).shape[-1])
        assert not any(row.tobytes() in content for row in rows)
    assert not [path for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]


def test_wrong_and_missing_key_are_named_and_no_damage(sealed, tmp_path):
    folder, _ = sealed
    other = key_file(tmp_path, "other", b"00" * 32)
    with pytest.raises(CheckpointError, match=r"is encrypted with key [0-9a-f]{16}, but .*other holds key [0-9a-f]{16}") as raised:
        load_arrays(Storage(folder, other), 7, plan())
    assert not isinstance(raised.value, DamagedCheckpointError)
    with pytest.raises(CheckpointError, match=r"is encrypted \(key [0-9a-f]{16}\); name the key file"):
        load_arrays(Storage(folder), 7, plan())
    assert published_steps(folder) == [7]


def test_key_of_the_environment_serves_the_command_line(sealed, monkeypatch):
    folder, key = sealed
    monkeypatch.setenv("MEGASCALE_KEY_FILE", key)
    check_state(plan(), load_arrays(Storage(folder), 7, plan()))


def test_flipped_exchanged_and_missing_blocks_are_damage(sealed):
    folder, key = sealed
    storage = Storage(folder, key)
    manifest = read_manifest(storage, 7)
    database = storage.database(manifest.data)
    first, second = "params.q/sealed/0/0/0/0", "params.q/sealed/1/0/0/0"
    values = [database.read(name).result().value for name in (first, second)]

    def damage(name, value, match):
        database.write(name, value).result()
        with pytest.raises(DamagedCheckpointError, match=match):
            BlockReader(storage, manifest).read("params.q", (0, 0, 0, 0))
        database.write(name, values[0]).result()

    damage(first, values[0][:40] + bytes([values[0][40] ^ 1]) + values[0][41:], "does not open")
    damage(first, values[1], "does not open")
    damage(first, b"", "does not open")
    damage(first, None, "is missing")
    assert BlockReader(storage, manifest).read("params.q", (0, 0, 0, 0)).shape == (1, 12, 8, 4)


@pytest.mark.parametrize(
    ("content", "mode", "match"),
    [(b"short", 0o600, "holds 5 bytes; expected 32"), (b"k" * 32, 0o640, "can be read by others"), (b"z" * 64, 0o600, "holds 64 bytes")],
)
def test_files_that_are_no_keys_are_refused(content, mode, match, tmp_path):
    with pytest.raises(UsageError, match=match):
        Cipher(key_file(tmp_path, content=content, mode=mode))
    with pytest.raises(UsageError, match="cannot be read"):
        Cipher(tmp_path / "nothing")


def test_hex_and_raw_forms_are_the_same_key(tmp_path):
    raw = bytes(range(32))
    assert Cipher(key_file(tmp_path, "a", raw)).key_id == Cipher(key_file(tmp_path, "b", raw.hex().encode() + b"\n")).key_id
    assert cipher_for("", None, "here") is None

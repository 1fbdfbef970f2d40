"""The store alone: what counts as a checkpoint, retention, damage."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megascale_jax.checkpoint.store import CheckpointStore, published_steps, read_description
from megascale_jax.errors import CheckpointError


def tree(value=1.0, width=4):
    return {"params": {"q": jnp.full((3, width), value), "o": jnp.arange(5.0) + value}, "step": jnp.int32(value)}


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


@pytest.fixture
def store(tmp_path):
    with_errors = []
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, on_error=with_errors.append)
    yield store
    store.close()
    assert not with_errors


def save(store, *steps):
    for step in steps:
        store.save(step, tree(float(step)), {"note": f"step {step}"})
    store.wait()


def test_values_and_description_come_back(store, tmp_path):
    save(store, 7)
    restored = store.restore(7, abstract(tree()))
    jax.tree.map(np.testing.assert_array_equal, restored, tree(7.0))
    assert read_description(tmp_path / "checkpoints", 7) == {"note": "step 7"}


def test_newest_two_stay_when_keep_is_two(store, tmp_path):
    save(store, 1, 2, 10)
    assert published_steps(tmp_path / "checkpoints") == [2, 10]
    assert store.latest() == 10


def test_unpublished_folder_is_no_checkpoint(store, tmp_path):
    save(store, 3)
    shutil.copytree(tmp_path / "checkpoints/3", tmp_path / "checkpoints/9")
    (tmp_path / "checkpoints/9/commit_success.txt").unlink()
    (tmp_path / "checkpoints/12.orbax-checkpoint-tmp").mkdir()
    assert store.latest() == 3


def test_another_shape_is_refused_by_name(store):
    save(store, 1)
    with pytest.raises(CheckpointError, match=r"of another model: params\.q: checkpoint \(3, 4\), expected \(3, 8\)"):
        store.restore(1, abstract(tree(width=8)))
    with pytest.raises(CheckpointError, match=r"params\.gate: checkpoint lacks it"):
        wanted = tree()
        wanted["params"]["gate"] = jnp.ones(2)
        store.restore(1, abstract(wanted))


def test_part_of_the_tree_can_be_read(store):
    save(store, 1)
    restored = store.restore(1, {"params": abstract(tree())["params"]})
    assert sorted(restored) == ["params"]
    np.testing.assert_array_equal(restored["params"]["q"], 1.0)


def test_missing_data_file_raises(store, tmp_path):
    save(store, 1)
    for file in (tmp_path / "checkpoints/1/state").rglob("*"):
        if file.is_file() and "/d/" in str(file):
            file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.restore(1, abstract(tree()))


def test_unreadable_description_raises(store, tmp_path):
    save(store, 1)
    (tmp_path / "checkpoints/1/run/metadata").write_text("{")
    with pytest.raises(CheckpointError, match="no readable description"):
        read_description(tmp_path / "checkpoints", 1)


def test_reading_store_touches_nothing(store, tmp_path):
    save(store, 1)
    (tmp_path / "checkpoints/5.orbax-checkpoint-tmp").mkdir()
    before = sorted(tmp_path.rglob("*"))
    reader = CheckpointStore(tmp_path / "checkpoints", keep=None)
    reader.restore(1, abstract(tree()))
    reader.close()
    assert sorted(tmp_path.rglob("*")) == before

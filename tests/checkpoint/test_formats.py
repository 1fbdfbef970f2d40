"""A checkpoint made by an earlier release loads for ever after; the fixtures were made once (`make_fixture.py`) and are never changed."""

import json

import pytest

from megascale_jax.checkpoint.inspect import verify
from megascale_jax.checkpoint.manifest import FORMAT, read_manifest
from megascale_jax.checkpoint.restore import load_arrays
from megascale_jax.comm.storage import Storage
from megascale_jax.config.schema import Experiment
from tests.checkpoint.make_fixture import FIXTURES, MODEL, STEP, digests
from tests.checkpoint.states import plan

FORMATS = sorted(path for path in FIXTURES.iterdir() if path.name.startswith("format-"))


@pytest.mark.parametrize("folder", FORMATS, ids=lambda folder: folder.name)
def test_checkpoint_of_an_earlier_release_loads_with_the_same_values(folder):
    storage = Storage(folder)
    assert verify(storage, STEP).problems == []
    assert digests(folder) == json.loads((folder / "expected.json").read_text())
    arrays = load_arrays(storage, STEP, plan(data=2, tensor=2, **MODEL))
    assert int(arrays["step"]) == STEP


@pytest.mark.parametrize("folder", FORMATS, ids=lambda folder: folder.name)
def test_configuration_of_an_earlier_release_is_understood(folder):
    """What `megascale train` compares before it goes on from a checkpoint."""
    description = read_manifest(Storage(folder), STEP).description
    assert Experiment.model_validate_json(description["experiment"]).model.num_layers == MODEL["num_layers"]


def test_there_is_a_fixture_of_the_format_that_this_release_writes():
    assert f"format-{FORMAT}" in [folder.name for folder in FORMATS]

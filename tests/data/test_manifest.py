"""Refusing folders that are not complete prepared data of this version."""

import json

import pytest

from megascale_jax.data.manifest import MANIFEST_FILE, read_manifest
from megascale_jax.errors import DataError


def test_missing_folder_and_missing_manifest_are_refused_with_the_command(tmp_path):
    with pytest.raises(DataError, match=r"No prepared data at .*megascale data prepare"):
        read_manifest(tmp_path / "absent")
    with pytest.raises(DataError, match="unfinished"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version 99"),
        ({"version": None}, "version None"),
        ({"sequence_length": "32"}, "damaged: sequence_length"),
        ({"extra": 1}, "damaged: extra"),
    ],
)
def test_manifest_of_another_shape_is_refused(make_prepared, change, message):
    file = make_prepared() / MANIFEST_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match=message):
        read_manifest(file.parent)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_manifest_that_is_no_json_object_is_refused(make_prepared, content):
    file = make_prepared() / MANIFEST_FILE
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be read|version None"):
        read_manifest(file.parent)

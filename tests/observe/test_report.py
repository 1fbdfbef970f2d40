"""The one JSON writer: valid JSON, whole files, refusals before the work."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.errors import UsageError
from megascale_jax.observe import report
from megascale_jax.observe.report import check_json_path, check_output_path, json_ready, replace_file, write_json


@dataclass
class Point:
    x: float
    name: str


def test_values_are_read_back_when_of_mixed_types(tmp_path: Path) -> None:
    value = {"p": Point(1.5, "é"), "n": np.float32(0.5), "i": np.int64(3), "a": np.arange(2), "f": Path("a/b"), "s": {2, 1}, 4: True}
    write_json(tmp_path / "r.json", value)
    read = json.loads((tmp_path / "r.json").read_text())
    assert read == {"p": {"x": 1.5, "name": "é"}, "n": 0.5, "i": 3, "a": [0, 1], "f": "a/b", "s": [1, 2], "4": True}


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@settings(max_examples=50)
@given(
    st.recursive(
        _LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4), max_leaves=12
    )
)
def test_json_is_strict_when_numbers_are_not_finite(value: object) -> None:
    def without_nonfinite(item: object) -> object:
        if isinstance(item, float) and (item != item or item in (float("inf"), float("-inf"))):
            return None
        if isinstance(item, list):
            return [without_nonfinite(part) for part in item]
        return {k: without_nonfinite(v) for k, v in item.items()} if isinstance(item, dict) else item

    assert json.loads(json.dumps(json_ready(value), allow_nan=False)) == without_nonfinite(value)


@pytest.mark.parametrize("value", [b"bytes", object(), Point])
def test_type_error_when_json_cannot_hold_the_value(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        json_ready(value)


def test_path_is_refused_when_its_folder_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        check_json_path(tmp_path / "absent" / "r.json")
    with pytest.raises(UsageError, match="--json"):
        write_json(tmp_path / "absent" / "r.json", {})


def test_path_is_refused_when_it_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--output .* is a folder"):
        check_output_path(tmp_path, "--output")


def test_path_is_refused_when_the_folder_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write anywhere, so the answer of the system is given here.
    monkeypatch.setattr(report.os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    with pytest.raises(UsageError, match="no permission"):
        check_json_path(tmp_path / "r.json")


def test_check_writes_nothing_when_the_path_is_good(tmp_path: Path) -> None:
    check_json_path(None)
    check_json_path(tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


def test_old_file_stays_and_no_neighbour_is_left_when_the_write_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    write_json(path, {"old": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_target_of_a_link_is_replaced_when_the_path_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    replace_file(tmp_path / "link.json", b"new")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real.json").read_bytes() == b"new"


def test_device_stays_a_device_when_written_to() -> None:
    replace_file(Path("/dev/null"), b"gone")
    assert Path("/dev/null").is_char_device()

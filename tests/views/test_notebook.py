"""Tables say where each number is from, pictures are PNG bytes, results are a checkout's."""

import json

import pytest

from megascale_jax.errors import UsageError
from megascale_jax.views.notebook import Table, result, show


def test_a_table_is_markdown_with_the_kind_in_every_head():
    table = Table([("GPUs", ""), ("s", "published"), ("s", "simulated")], [["256", "40.0", "39.9"], ["a|b", "1", "2"]])
    assert table._repr_markdown_().splitlines() == [
        "| GPUs | s *published* | s *simulated* |",
        "| --- | --: | --: |",
        "| 256 | 40.0 | 39.9 |",
        "| a/b | 1 | 2 |",
    ]
    with pytest.raises(ValueError, match="2 cells, expected 1"):
        Table([("GPUs", "")], [["1", "2"]])


def test_a_picture_is_what_was_drawn_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    picture = show(lambda text, path: path.write_bytes(text), b"png")
    assert picture._repr_png_() == b"png" and not list(tmp_path.iterdir())


def test_a_result_has_a_kind_or_says_what_to_do(tmp_path):
    with pytest.raises(UsageError, match="has no benchmarks"):
        result("made", tmp_path)
    folder = tmp_path / "benchmarks/results"
    folder.mkdir(parents=True)
    with pytest.raises(UsageError, match=r"not there; benchmarks/bench_made\.py makes it"):
        result("made", tmp_path)
    (folder / "made.json").write_text(json.dumps({"seeds": 3}))
    with pytest.raises(UsageError, match="does not say whether"):
        result("made", tmp_path)
    (folder / "made.json").write_text(json.dumps({"kind": "measured"}))
    assert result("made", tmp_path) == {"kind": "measured"}

"""A small corpus of many documents, and prepared folders of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megascale_jax.data.prepare import prepare
from tests.data.texts import make_texts


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of 60 text files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(make_texts(60)):
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def make_prepared(corpus: Path, tmp_path: Path) -> Callable[..., Path]:
    """``make_prepared(name, **options)`` prepares ``corpus``, at sequence length 32 and a quarter held out if not said otherwise."""

    def make(name: str = "prepared", **options) -> Path:
        folder = tmp_path / name
        prepare(str(corpus), folder, **{"sequence_length": 32, "held_out_fraction": 0.25} | options)
        return folder

    return make

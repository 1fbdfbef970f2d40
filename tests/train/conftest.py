"""A tiny prepared corpus and a compilation cache shared by the loop's tests."""

import jax
import numpy as np
import pytest

from megascale_jax.data.prepare import prepare
from megascale_jax.data.prepared import open_prepared
from tests.build import MODEL

SEQUENCE = MODEL["sequence_length"]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """About 90 training rows: an epoch is under four steps of 24 rows, and does not divide by them."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    words = ["def ", "return ", "x", "y", " = ", "\n", "(", ")", "for "]
    for index in range(40):
        (folder / f"{index:02}.txt").write_text("".join(rng.choice(words, 16)))
    output = tmp_path_factory.mktemp("prepared") / "data"
    prepare(str(folder), output, sequence_length=SEQUENCE, held_out_fraction=0.2, progress=False)
    return open_prepared(output, sequence_length=SEQUENCE)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """The tests build the same program many times; production has the cache on too."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", None)

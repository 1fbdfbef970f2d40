"""The table of tiles: every candidate fits its chip without spilling, and a shape finds its class. See `launches.py`."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

from megascale_jax.errors import ConfigError
from megascale_jax.kernels.resources import Resources, assembler
from megascale_jax.kernels.tiles import candidates, every_candidate, table, tile_of
from tests.kernels.launches import COMPILED, digest

ARCHITECTURES = {80, 90, 100}


def compiler_missing() -> str | None:
    """Why nothing can be compiled here."""
    if find_spec("triton") is None:
        return "Triton is not installed: run `make aot`"
    try:
        assembler()
    except ConfigError as error:
        return str(error)
    return None


needs_compiler = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))


@needs_compiler
def test_every_candidate_is_as_it_was_when_all_were_compiled_and_fitted_without_a_spill():
    """They are compiled where something changed, which takes minutes; a sample always is."""
    assert COMPILED.read_text().strip() == digest(), "compile all candidates: `python -m tests.kernels.launches`"


@needs_compiler
def test_first_tile_of_every_kernel_fits_every_chip_without_a_spill():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.launches", "--sample"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [line for line in lines if line["problems"]]
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = {(line["kernel"], line["architecture"]) for line in lines}
    assert compiled == {(kernel, found) for kernel, found, *_ in every_candidate() if found != "interpreter"}
    assert {architecture for _, architecture in compiled} == ARCHITECTURES


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: run `make aot`")
def test_table_names_the_triton_that_compiled_it():
    assert table()["triton"] == version("triton"), "compile the table anew and name this version"


def test_problems_of_a_kernel_are_named():
    taken = Resources(registers=255, spill_bytes=8, shared_bytes=200_000, tensor_columns=640)
    assert taken.problems(90) == ["8 bytes a thread are spilled", "640 columns of tensor memory, there are 512"]
    assert "200000 bytes of shared memory, a block has 166912" in taken.problems(80)


def test_width_takes_the_class_it_lies_in():
    x = jax.ShapeDtypeStruct((4, 96), jnp.bfloat16)
    assert tile_of("attention.forward", 90, x) == candidates("attention.forward", 90, 96)[0] != candidates("attention.forward", 90, 192)[0]
    assert candidates("norm.backward", 90, 5000) == candidates("norm.backward", 90, 8192) != candidates("norm.backward", 90, 8193)


def test_width_beyond_the_table_takes_the_last_class_and_says_so_once(caplog):
    widest = candidates("loss.statistics", 90, 1048576)
    assert [candidates("loss.statistics", 90, 2_000_001) for _ in range(3)] == [widest] * 3
    assert [record.message for record in caplog.records] == ["no tile of loss.statistics for width 2000001 on 90: that for 1048576 is used"]


def test_unknown_architecture_takes_the_tiles_of_the_nearest_older_one_and_says_so_once(caplog):
    assert [candidates("loss.gradient", 86, 1000) for _ in range(3)] == [candidates("loss.gradient", 80, 1000)] * 3
    assert [record.message for record in caplog.records] == ["no tile of loss.gradient for compute capability 86: those for 80 are used"]


def test_architecture_older_than_all_is_refused():
    with pytest.raises(
        ConfigError, match=r"no tiles of norm\.forward for compute capability 75; the kernels need one of \[80, 90, 100\] or later"
    ):
        candidates("norm.forward", 75, 1024)

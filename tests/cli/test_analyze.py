"""`megascale analyze`: numbers on the terminal, in JSON and as a picture; what the user got wrong ends with exit code 2."""

import json
import subprocess
import sys

import pytest
from PIL import Image
from typer.testing import CliRunner

from megascale_jax.cli.analyze import parse_steps
from megascale_jax.cli.main import app
from megascale_jax.errors import UsageError
from megascale_jax.parallel.pipeline.schedule import Schedule
from tests.views.made_trace import made_trace
from tests.views.public_traces import published, trace_file
from tests.views.test_straggler_trace import as_public, write


def run(*arguments):
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def trace(tmp_path):
    made = made_trace(Schedule(2, 2, 8), data=2, steps=3, scale=lambda o, p, d, *_: 1.3 if (o, p, d) == ("backward", 1, 1) else 1)
    return write(tmp_path, as_public(made))


def test_a_slow_rank_is_shown_written_and_drawn(trace, tmp_path):
    result = run(trace, "--json", tmp_path / "a.json", "--heat-map", tmp_path / "a.png", "--top", 1)
    assert result.exit_code == 0
    assert "worker    rank 3 slower than peers: 3" in result.stdout and "rank 3 (pipe 1 data 1)" in result.stdout
    assert "rank 0 (" not in result.stdout, "--top 1"
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["slowdown"] > 1.1 and written["causes"][0]["kind"] == "worker" and written["causes"][0]["ranks"] == [3]
    assert 0.5 < written["causes"][0]["share"] <= 1
    assert written["ranks"][0]["rank"] == 3 and len(written["ranks"]) == 4
    assert [step["step"] for step in written["steps"]] == [0, 1, 2]
    assert Image.open(tmp_path / "a.png").size == (1200, 700)


def test_a_window_of_steps_is_another_analysis(trace, tmp_path):
    run(trace, "--steps", "1:3", "--json", tmp_path / "a.json")
    assert [step["step"] for step in json.loads((tmp_path / "a.json").read_text())["steps"]] == [1, 2]
    with pytest.raises(UsageError, match="chooses no step of the trace, which has steps 0 to 2"):
        run(trace, "--steps", "7:")


@pytest.mark.parametrize(("text", "window"), [("3:9", (3, 9)), (":9", (None, 9)), ("3:", (3, None)), (":", (None, None))])
def test_steps_are_parsed(text, window):
    assert parse_steps(text) == window


@pytest.mark.parametrize("text", ["3", "a:b", "1:2:3", ""])
def test_other_steps_are_refused(text):
    with pytest.raises(UsageError, match="expected a:b"):
        parse_steps(text)


def test_outputs_are_checked_before_the_trace_is_read(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        run("trace-X.parquet", "--json", tmp_path / "no" / "a.json")
    with pytest.raises(UsageError, match="expected a name that ends in"):
        run("trace-X.parquet", "--heat-map", tmp_path / "a.txt")


def test_a_damaged_trace_ends_with_exit_code_2(tmp_path, trace):
    trace.write_bytes(trace.read_bytes()[:-9])
    ended = subprocess.run([sys.executable, "-m", "megascale_jax.cli.main", "analyze", trace], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and "is no readable Parquet file" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(("name", "words"), [("SE", "sequence  micro-batches vary"), ("ST", "stage     the last stage has")])
def test_the_public_traces(name, words, tmp_path):
    result = run(trace_file(name), "--json", tmp_path / "a.json")
    assert result.exit_code == 0 and words in result.stdout
    assert json.loads((tmp_path / "a.json").read_text())["slowdown"] == pytest.approx(published(name)["blocking_slowdown"], rel=0.03)

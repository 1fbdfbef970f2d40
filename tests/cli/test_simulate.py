"""`megascale simulate`: a plan, a scaling table with plans that cannot be, traces, validation, and what it refuses."""

import gzip
import json

import pytest
from typer.testing import CliRunner

from megascale_jax.cli.main import app
from megascale_jax.errors import ConfigError, UsageError


def run(*arguments):
    return CliRunner().invoke(app, ["simulate", *arguments])


def refused(*arguments):
    found = run(*arguments)
    assert isinstance(found.exception, UsageError), found.output
    return str(found.exception)


def test_a_plan_is_told_and_written(tmp_path):
    path, trace = tmp_path / "out.json", tmp_path / "step.json.gz"
    found = run("gpt-175b", "--json", str(path), "--events", "--trace", str(trace))
    assert found.exit_code == 0, found.output
    assert "12,288 x NVIDIA A100" in found.output and "pipeline bubble" in found.output and "simulated" in found.output
    data = json.loads(path.read_text())
    point = data["points"][0]
    assert sum(point["parts_s"].values()) == pytest.approx(point["iteration_s"])
    assert point["tokens_per_s"] == pytest.approx(6144 * 2048 / point["iteration_s"])
    assert point["days"] == pytest.approx(300e9 / point["tokens_per_s"] / 86400)
    assert data["events"]["healthy_s"] == pytest.approx(point["iteration_s"] - point["parts_s"]["stragglers_s"], rel=1e-3)
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def test_a_sweep_lists_what_cannot_be_and_computes_the_rest(tmp_path):
    path = tmp_path / "out.json"
    found = run("gpt-175b", "--nodes", "384,1000", "--nodes", "7", "--nodes", "1536", "--json", str(path))
    assert found.exit_code == 0, found.output
    data = json.loads(path.read_text())
    assert [point["nodes"] for point in data["points"]] == [384, 1536]
    assert [item["nodes"] for item in data["invalid"]] == [1000, 7]
    assert "nearest nodes whose replicas divide the batch: 768, 1024" in data["invalid"][0]["reason"]
    assert "56 devices are not divisible by pipe 8 x tensor 8 = 64; nearest nodes: 8" in data["invalid"][1]["reason"]


def test_programs_and_their_fields_are_overrides(tmp_path):
    seconds = []
    for more in ([], ["software=megatron-lm"], ["software=megatron-lm", "software.data_wait_s=10"]):
        path = tmp_path / "out.json"
        assert run("gpt-175b", *more, "--json", str(path)).exit_code == 0
        seconds.append(json.loads(path.read_text())["points"][0]["iteration_s"])
    assert seconds[0] < seconds[1]
    assert seconds[2] == pytest.approx(seconds[1] + 9.7)


def test_a_plan_without_room_for_activations_says_what_would_help():
    found = run("gpt-175b", "parallel.data=12", "parallel.micro_batch_size=8")
    assert found.exit_code == 1
    assert "does not fit; what would help: parallel.remat=selective or full" in found.output


def test_validation_prints_the_rows_and_fails_where_a_target_is_missed(tmp_path):
    path = tmp_path / "out.json"
    found = run("--validate", "table2", "--ladder", "--json", str(path))
    assert found.exit_code == 0, found.output
    data = json.loads(path.read_text())
    assert {"name", "published", "predicted", "error", "role"} <= set(data["rows"][0])
    assert {row["role"] for row in data["rows"]} == {"calibration", "held-out"} and data["met"]
    assert data["means"]["simulated"]["mean"] <= 0.025 and len(data["ladder"]["micro-batch 2"]) == 6
    missed = run("--validate", "table3")
    assert missed.exit_code == 1 and "missed: wrong sign: sliding-window attention" in missed.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name an experiment"),
        (["gpt-175b", "--validate", "table2"], "scores fixed runs"),
        (["--validate", "table9"], "known: table2, table3"),
        (["--validate", "table3", "--ladder"], "belongs to --validate table2"),
        (["gpt-175b", "--nodes", "few"], "expected numbers of nodes"),
        (["gpt-175b", "--nodes", "8", "parallel.data=3"], "decide the same thing"),
        (["gpt-175b", "--nodes", "8,16", "--events"], "take one plan"),
        (["gpt-175b", "--nodes", "7"], "none of the plans"),
        (["gpt-175b", "parallel.pipe=7"], "cannot run"),
        (["gpt-175b", "software=megatron"], "did you mean 'megatron-lm'"),
        (["gpt-175b", "software.hosts=1"], "did you mean 'host_s'"),
        (["quickstart"], r"system.hardware is missing"),
    ],
)
def test_what_it_refuses(arguments, says):
    assert says in refused(*arguments)


def test_help_teaches():
    text = run("--help").output
    assert "megascale simulate gpt-175b" in text and "Nothing runs or compiles" in text


def test_bad_hardware_names_the_field():
    found = run("gpt-175b", "system.hardware.network_link.gbps=-1")
    assert isinstance(found.exception, ConfigError) and "network_link.gbps: got -1" in str(found.exception)

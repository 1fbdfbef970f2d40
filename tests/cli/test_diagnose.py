"""`megascale diagnose`: table, JSON, exit codes; usage errors before anything runs."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from megascale_jax.cli.main import app
from megascale_jax.cluster.diagnose.checks import Number, Outcome, not_run, outcome
from megascale_jax.cluster.diagnose.fleet import judge_all
from megascale_jax.cluster.diagnose.nic import Baseline
from megascale_jax.cluster.diagnose.report import as_data, shown
from megascale_jax.cluster.diagnose.request import Node
from megascale_jax.errors import UsageError
from megascale_jax.observe.report import json_ready

ROOT = Path(__file__).parents[2]


@pytest.fixture
def megascale(monkeypatch):
    for name in ("MEGASCALE_COORDINATOR", "MEGASCALE_NUM_PROCESSES", "MEGASCALE_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    return lambda *arguments: CliRunner().invoke(app, ["diagnose", *map(str, arguments)])


def test_the_host_alone(megascale, tmp_path):
    result = megascale("--only", "host", "--folder", tmp_path, "--json", tmp_path / "d.json")
    assert result.exit_code in (0, 10), result.output  # what the host of the tests is like is not up to them
    data = json.loads((tmp_path / "d.json").read_text())
    (found,) = data["outcomes"].values()
    assert data["exit_code"] == result.exit_code and "disk" in result.output
    assert [one["check"] for one in found][:2] == ["disk", "storage"] and all(one["reason"] or one["status"] == "pass" for one in found)


def test_a_folder_that_is_not_there_is_a_fault_of_the_host(megascale, tmp_path):
    result = megascale("--only", "host", "--folder", tmp_path / "gone")
    assert result.exit_code == 10 and "BAD" in result.output and "do: free space" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--only", "disk"], "known: host, gpu, nic"),
        (["--json", "/no/such/folder/x"], "does not exist"),
        (["--baseline", "/gone"], "No such file"),
    ],
)
def test_usage(megascale, arguments, text):
    result = megascale(*arguments)
    assert isinstance(result.exception, UsageError) and text in str(result.exception)


def test_help_states_the_exit_codes(megascale):
    text = " ".join(megascale("--help").output.split())
    for code in ("0 nothing bad", "15 silent corruption", "11 GPU", "10 host", "12 NIC", "14 network", "13 slow", "16 a node"):
        assert code in text


def text_of(outcomes):
    verdict = judge_all({name: Node(address="-", ports=()) for name in outcomes}, outcomes, Baseline())
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(shown(outcomes, verdict))
    return console.export_text(), json_ready(as_data(outcomes, verdict))


def test_the_table_names_the_bad_node_first_and_says_what_to_do():
    fine = [Outcome(check="memory", status="pass"), not_run("gpu_xid", "no NVIDIA driver")]
    slow = [outcome("gemm", numbers=[Number(name="m", value=value, unit="TFLOP/s")], facts={"device": "H100"}) for value in (600, 601, 400)]
    text, data = text_of({name: [*fine, one] for name, one in zip("abc", slow, strict=True)})
    lines = text.splitlines()
    assert (
        lines[0].startswith("BAD c")
        and "exit code 13" in lines[0]
        and "33% below the median" in lines[1]
        and "do: check clocks" in lines[2]
    )
    assert next(line for line in lines if line.startswith("gemm")).split()[2] == "slow"
    assert (
        "400 .. 601 TFLOP/s, median 600" in text
        and "3 x no NVIDIA driver" in text
        and "nothing is known of gpu_xid" in " ".join(text.split())
    )
    assert data["bad_nodes"] == ["c"] and data["verdict"]["bad"][0]["fault"] == "slow" and len(data["outcomes"]["a"]) == 3


def test_the_table_of_a_blind_node_and_of_suspects():
    text, data = text_of({"a": [not_run("gpu_xid", "no NVIDIA driver")]})
    assert text.startswith("NOTHING COULD BE CHECKED") and data["exit_code"] == 16
    text, _ = text_of({"a": [outcome("corruption", facts={"digest": "x"})], "b": [outcome("corruption", facts={"digest": "y"})]})
    assert text.startswith("SUSPECT a, b: not proven") and "differs" in text


def test_three_processes_started_like_training_compare_themselves(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA", "MEGASCALE", "JAX"))}
    environment |= {"MEGASCALE_COMMAND": f"{sys.executable} -m megascale_jax.cli.main", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [ROOT / "launch/local.sh", "-n", "3", "diagnose", "--only", "host", "--folder", tmp_path, "--json", tmp_path / "d.json"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    data = json.loads((tmp_path / "d.json").read_text())
    assert len(data["outcomes"]) == 3 and done.returncode == data["exit_code"], done.stdout + done.stderr

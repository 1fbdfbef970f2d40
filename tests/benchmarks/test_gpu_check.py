"""The script for a machine with a GPU, dry on this one: its operators' part; what it says of the targets."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/gpu_check.py"


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: run `make aot`")
def test_dry_run_takes_every_operator_through_the_measurement(tmp_path):
    command = [sys.executable, str(SCRIPT), "--dry", "--only", "operators", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["kind"] == "dry run, nothing measured"
    results = {row["name"]: row["result"] for row in record["operators"]}
    assert not [name for name, result in results.items() if "failed" in result or "not run" in result]
    assert {name.split()[0] for name in results} == {"ceiling:", "attention", "norm", "gelu", "loss"}
    assert "| MFU of the 1.3B step | 0.6 | - | - |" in (tmp_path / "results.md").read_text()


def test_machine_without_a_gpu_is_refused_before_anything_is_written(tmp_path):
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, (tmp_path / "out").exists()) == (2, False)
    assert "no GPU here; on a CPU add --dry" in done.stderr


def test_targets_are_ratios_of_what_the_same_run_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu_report import verdicts

    def attention(way, window, by, tflops, seconds):
        case = {"shape": "target", "way": way, "window": window, "implementation": by}
        return {"name": f"{way} {window} {by}", "result": "", "tflops": tflops, "seconds_each": seconds, **case}

    operators = [
        {"name": "ceiling: GEMM", "result": "", "tflops": 700.0},
        {"name": "ceiling: copy", "result": "", "gbps": 4000.0},
        attention("forward", None, "triton", 420.0, 4.0),
        attention("forward", None, "triton", 350.0, 5.0),
        attention("forward", None, "cudnn", 560.0, 3.0),
        attention("forward", 1024, "triton", 300.0, 1.0),
        attention("forward", 1024, "cudnn", 300.0, 0.9),
        {"name": "norm", "result": "", "operator": "norm", "gbps": {"forward": 3600.0, "both": 3000.0}},
        {"name": "gelu", "result": "failed: ValueError", "operator": "activation", "gbps": {"forward": 4000.0}},
    ]
    found = {row["target"]: (row["got"], row["met"]) for row in verdicts({"operators": operators})}
    assert found["Triton forward, of the GEMM ceiling"] == (pytest.approx(0.6), False)
    assert found["best forward, of the GEMM ceiling"] == (pytest.approx(0.8), True)
    assert found["window 1024 over full, Triton, times faster"] == (pytest.approx(4.0), True)
    assert found["window 1024, Triton over cuDNN, times faster"] == (pytest.approx(0.9), False)
    assert found["norm, of the copy bandwidth"] == (pytest.approx(0.75), False)
    assert found["activation, of the copy bandwidth"] == (None, None)

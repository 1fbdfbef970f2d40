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
def test_dry_run_takes_every_part_to_its_end(tmp_path):
    command = [sys.executable, str(SCRIPT), "--dry", "--out", str(tmp_path), "--limit-s", "900"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["kind"] == "dry run, nothing measured"
    results = [(part, row["name"], row["result"]) for part in ("rates", "step", "suites", "tiles", "swaps") for row in record[part]]
    assert not [row for row in results if "failed" in row[2] or "not run" in row[2] or "wrong" in row[2]]
    assert {name.split()[0] for part, name, _ in results if part == "rates"} == {"ceiling:", "attention", "norm", "gelu", "loss"}
    swapped = [name for part, name, _ in results if part == "swaps"][1:]
    assert swapped == [f"tiny {operator}=triton" for operator in ("attention", "norm", "activation", "loss")]
    page = (tmp_path / "results.md").read_text()
    assert "| MFU of the 1.3B step | 0.6 | - | - |" in page and "## which tile is best" in page


def test_machine_without_a_gpu_is_refused_before_anything_is_written(tmp_path):
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, (tmp_path / "out").exists()) == (2, False)
    assert "no GPU here; on a CPU add --dry" in done.stderr


def test_targets_are_ratios_of_what_the_same_run_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu_report import verdicts

    def attention(way, window, by, tflops):
        case = {"shape": "target", "way": way, "window": window, "implementation": by}
        return {"name": f"{way} {window} {by}", "result": "", "tflops": tflops, **case}

    rates = [
        {"name": "ceiling: GEMM", "result": "", "tflops": 700.0},
        {"name": "ceiling: copy", "result": "", "gbps": 4000.0},
        attention("forward", None, "triton", 350.0),
        attention("forward", None, "cudnn", 560.0),
        attention("forward", 1024, "triton", 300.0),
        attention("forward", 1024, "cudnn", 330.0),
        {"name": "norm", "result": "", "operator": "norm", "gbps": {"forward": 3600.0, "both": 3000.0}},
        {"name": "gelu", "result": "failed: ValueError"},
    ]
    tiles = [attention("forward", None, "triton", 420.0), {"name": "x", "result": "wrong: off"}]
    found = {row["target"]: (row["got"], row["met"]) for row in verdicts({"rates": rates, "tiles": tiles})}
    assert found["Triton forward, of the GEMM ceiling"] == (pytest.approx(0.6), False)
    assert found["best forward, of the GEMM ceiling"] == (pytest.approx(0.8), True)
    # 4.27 times fewer pairs at 300 / 420 of the rate
    assert found["window 1024 over full, Triton, times faster"] == (pytest.approx(3.05, abs=0.01), True)
    assert found["window 1024, Triton over cuDNN, times faster"] == (pytest.approx(0.909, abs=1e-3), False)
    assert found["norm, of the copy bandwidth"] == (pytest.approx(0.75), False)
    assert found["activation, of the copy bandwidth"] == (None, None)


def test_ranking_sets_the_best_tile_beside_the_first(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu_report import ranking

    case = {"head": 128, "length": 8192, "window": None, "way": "forward", "name": "", "result": ""}
    tiles = [case | {"tile": "a", "tflops": 300.0}, case | {"tile": "b", "tflops": 360.0}, case | {"name": "no rate"}]
    assert [(row["best tile"], row["first tile"], row["faster"]) for row in ranking({"tiles": tiles})] == [("b", "a", pytest.approx(1.2))]


LOSSES = [([2.0, 1.0], "MFU"), ([2.0, 1.1], "wrong: losses differ"), ([2.0, float("nan")], "wrong: losses")]


@pytest.mark.parametrize(("losses", "verdict"), LOSSES)
def test_swapped_operator_that_changes_the_losses_is_wrong(monkeypatch, losses, verdict):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_steps

    rows = iter([[2.0, 1.0], losses])
    result = {"micro_batch_size": 8, "norms": [1.0, 1.0], "result": "MFU 50 %"}
    monkeypatch.setattr(gpu_steps, "largest", lambda *_: result | {"losses": next(rows)})
    expected = {}
    gpu_steps.compared("1.3B", [], "", False, expected)
    assert gpu_steps.compared("1.3B", [], "norm=reference", False, expected)["result"].startswith(verdict)

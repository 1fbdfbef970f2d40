"""`megascale compare` as a script sees it: exit code, text, JSON, and refusals that write nothing."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megascale_jax.cli.compare import compare
from megascale_jax.errors import RunFolderError, UsageError
from tests.views.fake_run import make_run

app = typer.Typer()
app.command()(compare)


def call(*arguments: object) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output, result.exception


@pytest.mark.parametrize(
    ("scale", "digest", "verdict", "code"),
    [(1.0, "d1", "equivalent", 0), (0.9, "d1", "better", 0), (1.1, "d1", "worse", 1), (1.0, "d2", "incomparable", 2)],
)
def test_exit_code_follows_the_verdict_when_compared(tmp_path: Path, scale: float, digest: str, verdict: str, code: int) -> None:
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", scale=scale, summary={"data_digest": digest}, config={"model.block": "serial"})
    exit_code, output, _ = call(a, b, "--output", tmp_path / "c.png", "--json", tmp_path / "c.json")
    assert exit_code == code, output
    assert f"Verdict: {verdict}" in output and "Rule: B is equivalent to A if" in output
    assert "model.block" in output and "serial" in output and "held-out loss, final" in output
    report = json.loads((tmp_path / "c.json").read_text())
    assert report["verdict"] == verdict and report["rule"] in " ".join(output.split())
    assert {"field": "model.block", "a": "parallel", "b": "serial"} in report["config_differences"]
    assert report["train"]["difference"] == pytest.approx(scale - 1, abs=1e-9)
    assert report["summary_b"]["tokens_per_s"] == 20000.0 and report["common_range"]["smoothing_window"] > 0
    assert (tmp_path / "c.png").stat().st_size > 10_000


def test_report_is_strict_json_when_a_run_diverged(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", loss=lambda _: float("nan"))
    code, _, _ = call(a, b, "--output", tmp_path / "c.png", "--json", tmp_path / "c.json")
    text = (tmp_path / "c.json").read_text()
    assert code == 1 and "NaN" not in text and json.loads(text)["train"]["b"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tolerance", "-0.1"], "expected a fraction"),
        (["--tolerance", "nan"], "expected a fraction"),
        (["--output", "c.txt"], "ends in one of"),
        (["--output", "absent/c.png"], "does not exist"),
        (["--json", "absent/c.json"], "does not exist"),
    ],
)
def test_nothing_is_written_when_the_request_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = make_run(tmp_path / "a", steps=5), make_run(tmp_path / "b", steps=5)
    _, _, error = call(a, b, *options)
    assert isinstance(error, UsageError) and message in str(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_folder_is_refused_when_it_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, _, error = call(make_run(tmp_path / "a", steps=5), tmp_path)
    assert isinstance(error, RunFolderError) and not (tmp_path / "compare.png").exists()


def test_typer_refuses_when_the_axis_is_unknown(tmp_path: Path) -> None:
    code, output, _ = call(tmp_path, tmp_path, "--against", "hours")
    assert code == 2 and "hours" in output

"""`megascale analyze RUN`: the slow device on the terminal, in JSON and in a picture."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from PIL import Image
from typer.testing import CliRunner

from megascale_jax.cli.analyze_run import _doubts
from megascale_jax.cli.main import app
from megascale_jax.errors import RunFolderError, UsageError
from megascale_jax.views.run_what_if import RunCosts
from tests.views.made_run import made_run

HOST = socket.gethostname()


def run(*arguments):
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    scale = lambda of, p, d, t, s: 1.15 if (of, p, d, t) == ("backward", 1, 0, 1) else 1.0  # noqa: E731
    return made_run(tmp_path_factory.mktemp("made"), scale=scale)


def test_a_slow_device_is_shown_written_and_drawn(folder, tmp_path):
    result = run(folder, "--json", tmp_path / "a.json", "--heat-map", tmp_path / "a.png")
    assert result.exit_code == 0
    assert f"worker    device 5 (rank 0, {HOST})" in result.stdout and "slower than its peers: 15% in backward" in result.stdout
    row = next(line.split() for line in result.stdout.splitlines() if line.startswith("device 5"))
    assert row[5:10] == ["1", "0", "1", "backward", "15.0%"]
    written = json.loads((tmp_path / "a.json").read_text())
    assert 1.05 < written["slowdown"] < 1.1 and written["gaps"] == pytest.approx(1, abs=0.02)
    (cause,) = written["causes"]
    assert (cause["kind"], cause["optype"], cause["devices"], cause["ranks"]) == ("worker", "backward", [5], [0])
    assert (written["ranks"][0]["device"], written["ranks"][0]["rank"]) == (5, 0)
    assert (written["slow_devices"][0]["device"], written["slow_devices"][0]["rank"]) == (5, 0)
    assert "the replay of steps 8, 16 takes" in result.stdout and "shares are rough" not in result.stdout
    assert len(written["ranks"]) == 8 and written["slow_devices"][0]["waits_less"] > 0.5
    assert Image.open(tmp_path / "a.png").size == (1200, 900)


HOSTILE = "[red]a$b\\c$" + 90 * "\x1b[2J"


def test_names_are_text_and_the_numbers_are_there_before_the_picture(tmp_path, monkeypatch):
    """No markup of Rich, no escapes for the terminal, no formulas."""
    monkeypatch.setattr("socket.gethostname", lambda: HOSTILE)
    (tmp_path / "a$b\\c$").mkdir()
    folder = made_run(tmp_path / "a$b\\c$", scale=lambda of, p, d, t, s: 1.15 if (of, p, d, t) == ("backward", 1, 0, 1) else 1.0)
    result = run(folder, "--json", tmp_path / "a.json", "--heat-map", tmp_path / "a.png")
    assert result.exit_code == 0 and "\x1b" not in result.stdout and "[red]a$b" in result.stdout
    assert json.loads((tmp_path / "a.json").read_text())["slow_devices"][0]["host"] == HOSTILE
    assert Image.open(tmp_path / "a.png").size == (1200, 900)
    monkeypatch.setattr("megascale_jax.views.run_heat_map.plot_run", None)
    with pytest.raises(TypeError):
        run(folder, "--json", tmp_path / "b.json", "--heat-map", tmp_path / "b.png")
    assert (tmp_path / "b.json").exists()


def test_a_replay_that_is_off_is_said():
    costs = RunCosts(1.05, 1 / 1.17, (), 0.0, (), {}, {}, ())
    assert [*_doubts(costs)] == ["the replay takes 17.0% more time than recorded, not little beside a slowdown of 5.0%: shares are rough"]
    assert not [*_doubts(replace(costs, gaps=0.98))] and not [*_doubts(replace(costs, gaps=1.005, slowdown=1.0))]


def test_a_window_without_detailed_steps_says_so(folder, tmp_path):
    result = run(folder, "--steps", "9:16", "--json", tmp_path / "a.json", "--top", 0)
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["window"]["first"] == 9 and written["window"]["steps"] == 7 and written["slowdown"] is None
    assert "no whole detailed step" in result.stdout and "7 steps are too few" in result.stdout
    with pytest.raises(UsageError, match="no stamps of steps 90:"):
        run(folder, "--steps", "90:")


def test_other_folders_end_with_exit_code_2(tmp_path):
    with pytest.raises(RunFolderError, match="has no folder events"):
        run(tmp_path)
    environment = {**os.environ, "COLUMNS": "200"}
    command = [sys.executable, "-m", "megascale_jax.cli.main", "analyze", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr

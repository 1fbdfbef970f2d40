"""`megascale network`: every study prints, writes and draws what it found, and says that it is simulated."""

import json

import pytest
from typer.testing import CliRunner

from megascale_jax.cli import network
from megascale_jax.cli.main import app
from megascale_jax.errors import ConfigError
from megascale_jax.sim.congestion import study, workloads

PNG = b"\x89PNG\r\n"
SMALL = ("parallel.pipe=4", "parallel.data=32", "parallel.virtual_stages=null", "train.global_batch_size=256")


def run(*arguments):
    return CliRunner().invoke(app, ["network", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def quick(monkeypatch):
    """Studies of a few trials, and congestion of eight hosts."""
    monkeypatch.setattr(network, "UPLINK_TRIALS", 200)
    monkeypatch.setattr(network, "FLAPS", 500)
    monkeypatch.setattr(network, "PAPER_NODES", 256)
    monkeypatch.setattr(study, "HOSTS", 8)
    monkeypatch.setattr(study, "LEAVES", 2)
    few = (study.Workload("incast", "seven to one", lambda fabric, g: workloads.incast(fabric, 7, 100_000, g)),)
    monkeypatch.setattr(study, "all_workloads", lambda: few)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a100", "--study", "ecmp"), "mixed, one seed for all"),
        (("h100", "--study", "congestion"), "dcqcn-firmware"),
        (("a100", "--study", "flap"), "22 (system.limits)"),
        (("gpt-175b", "system=a100", *SMALL, "--study", "placement"), "data rings of 32 nodes"),
    ],
)
def test_studies_are_printed_written_and_drawn(quick, tmp_path, arguments, words):
    picture, path = tmp_path / "p.png", tmp_path / "r.json"
    result = run(*arguments, "--seeds", 2, "--json", path, "--picture", picture)
    assert result.exit_code == 0 and words in result.stdout
    assert "simulated; mean and standard deviation over 2 seeds" in result.stdout
    assert picture.read_bytes().startswith(PNG)
    written = json.loads(path.read_text())
    assert (written["kind"], written["seeds"], written["study"]) == ("simulated", 2, arguments[arguments.index("--study") + 1])


def test_packets_are_accounted_for(quick, tmp_path):
    run("a100", "--study", "congestion", "--seeds", 2, "--json", tmp_path / "r.json")
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert {(row["algorithm"], row["seed"]) for row in rows} == {(name, seed) for name in study.ALGORITHMS for seed in (0, 1)}
    assert all(row["lost"] == row["dropped"] == 0 and 0 < row["gbit_s"] <= 400 for row in rows)


def test_what_cannot_be_studied_is_refused():
    with pytest.raises(ConfigError, match=r"system\.network of CPU is null"):
        run("quickstart", "--study", "ecmp")
    with pytest.raises(ConfigError, match="a100 is a system; --study placement needs an experiment"):
        run("a100", "--study", "placement")
    with pytest.raises(ConfigError, match="no experiment named 'a1000'"):
        run("a1000", "--study", "flap")

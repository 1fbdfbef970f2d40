"""`megascale forecast`: what it prints and writes, what it lists, what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from megascale_jax.cli.goodput import classes_table
from megascale_jax.cli.main import app
from megascale_jax.config.load import load_experiment
from megascale_jax.errors import ConfigError, UsageError
from megascale_jax.observe.booked import KINDS
from megascale_jax.sim.analytic import predict

SMALL = ("gpt-1b", "--mfu", "0.5", "--seeds", "10", "--days", "20", "--spares", "1")


def run(*arguments):
    return CliRunner().invoke(app, ["forecast", *map(str, arguments)], catch_exceptions=False)


def test_a_forecast_is_printed_and_written_whole(tmp_path):
    data, picture = tmp_path / "f.json", tmp_path / "f.png"
    price = ("--price-per-gpu-hour", "2", "--price-date", "2025-06-01", "--node-kw", "10")
    result = run(*SMALL, "--fleet", "llama3-405b", "--what-if", *price, "--json", data, "--picture", picture)
    assert result.exit_code == 0
    text = result.stdout
    for said in ("simulated effective training time ratio", "the driver's own code", "checkpoint interval", "capacity", "Daly", "MWh"):
        assert said in text, said
    assert "2 USD a GPU-hour on 2025-06-01" in text and "no spares" in text
    written = json.loads(data.read_text())
    assert written["kind"] == "simulated" and written["refused"] == {}
    (point,) = written["points"]
    assert point["kind"] == "simulated" and list(point["booked_ns"]) == list(KINDS)
    assert sum(point["booked_ns"].values()) == point["wall_ns"] == 10 * 20 * 86_400 * 10**9
    assert point["effective_training_time_ratio"] == point["booked_ns"]["training"] / point["wall_ns"]
    assert point["decisions"]["effective_training_time_ratio"] == pytest.approx(point["decisions"]["arrays_on_the_same_draws"])
    hours = (point["nodes"] + 1) * 8 * 480
    assert point["cost"]["gpu_hours"] == pytest.approx(hours) and point["cost"]["amount"] == pytest.approx(2 * hours)
    assert written["what_if"]["half the failures"] >= written["what_if"]["twice the failures"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_is_that_of_a_real_job():
    table = classes_table(dict.fromkeys(KINDS, 1e9), 9e9)
    assert [column.header for column in table.columns] == ["class", "seconds", "share"] and table.row_count == len(KINDS) + 1


def test_the_same_seeds_give_the_same_forecast(tmp_path):
    found = []
    for number in range(2):
        run(*SMALL, "--json", tmp_path / f"{number}.json")
        found.append((tmp_path / f"{number}.json").read_text())
    assert found[0] == found[1]


def test_invalid_points_are_listed_and_the_rest_is_computed(tmp_path):
    data = tmp_path / "f.json"
    args = ("gpt-175b", "--mfu", "0.55", "--days", "3", "--seeds", "5", "--decisions", "0", "--fleet", "megascale,meta-rsc-1")
    result = run(*args, "--nodes", "512,1000,3", "--json", data)
    assert result.exit_code == 0
    written = json.loads(data.read_text())
    assert [(point["fleet"], point["nodes"]) for point in written["points"]] == [("megascale", 512), ("meta-rsc-1", 512)]
    assert len(written["refused"]) == 4
    assert "is not divisible" in written["refused"]["megascale, 1000 nodes"]
    assert "24 devices are not divisible by pipe 8 x tensor 8 = 64; nearest nodes: 8, 16" in written["refused"]["meta-rsc-1, 3 nodes"]
    assert "not computed: megascale, 3 nodes" in result.stdout


def test_a_step_that_is_not_given_is_predicted(tmp_path):
    run("gpt-1b", "--days", "1", "--seeds", "2", "--decisions", "0", "--json", tmp_path / "f")
    (point,) = json.loads((tmp_path / "f").read_text())["points"]
    assert point["step_s"] == predict(load_experiment("gpt-1b")).iteration_s


def test_tokens_are_trained_and_take_longer_with_more_failures(tmp_path):
    days = {}
    for fleet in ("meta-rsc-1", "meta-rsc-2"):
        run(
            "gpt-175b",
            "--tokens",
            "30e9",
            "--step-s",
            "6.34",
            "--seeds",
            "10",
            "--decisions",
            "0",
            "--fleet",
            fleet,
            "--json",
            tmp_path / "t",
        )
        (point,) = json.loads((tmp_path / "t").read_text())["points"]
        assert point["tokens"] == pytest.approx(30e9)
        days[fleet] = point["cost"]["wall_days"]
    assert days["meta-rsc-1"] > days["meta-rsc-2"] > 30e9 / (6144 * 2048) * 6.34 / 86_400


def test_measured_times_of_a_drill_take_the_place_of_the_fleets(tmp_path):
    drill = tmp_path / "drill.json"
    drill.write_text(json.dumps({"mttr_s": {"suspend": 0.4, "diagnose": 2.0, "replace": 1.0, "restore": 14.0, "total": 20.0}}))
    ratio = []
    for more in ((), ("--drill", drill)):
        run(*SMALL, "--json", tmp_path / "f.json", *more)
        ratio.append(json.loads((tmp_path / "f.json").read_text())["points"][0]["effective_training_time_ratio"])
    assert ratio[1] > ratio[0]
    drill.write_text(json.dumps({"mttr_s": {"suspend": 0.4, "diagnose": -2.0}}))
    with pytest.raises(ConfigError, match=r"drill\.json: mttr_s\.diagnose: got -2\.0, expected seconds"):
        run(*SMALL, "--drill", drill)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gpt-1b", "--mfu", "0.5"), "one of --days and --tokens"),
        (("gpt-1b", "--mfu", "0.5", "--days", "1", "--tokens", "1e9"), "one of --days and --tokens"),
        (("gpt-1b", "--days", "1", "--mfu", "0.5", "--step-s", "1"), "got both of --step-s and --mfu"),
        (("gpt-1b", "--days", "1", "--mfu", "1.5"), "--mfu 1.5: expected a fraction"),
        (("gpt-1b", "--days", "-1", "--mfu", "0.5"), "--days -1: expected a number above 0"),
        (("quickstart", "--days", "1", "--step-s", "1"), "devices_per_node of .* is null"),
        ((*SMALL, "train.checkpoint.every=null"), "give --checkpoint-interval"),
        ((*SMALL, "--price-per-gpu-hour", "2"), "belong together"),
        ((*SMALL, "--price-per-gpu-hour", "2", "--price-date", "soon"), "expected a day as YYYY-MM-DD"),
        ((*SMALL, "--price", "aws-capacity-block-h100", "--price-date", "2025-01-01"), "give one of them"),
        ((*SMALL, "--nodes", "a"), "expected numbers of nodes"),
        ((*SMALL, "--picture", "f.gif"), "expected a name that ends in"),
        ((*SMALL, "--fleet", "nobody"), "no fleet named 'nobody'"),
        (("gpt-175b", "--tokens", "300e9", "--step-s", "6.3", "--spares", "0", "--decisions", "0"), "are not done within"),
        (("gpt-175b", "--days", "1", "--step-s", "6.3", "--nodes", "512,1536"), "--step-s is the step of one size"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(arguments, said):
    with pytest.raises((ConfigError, UsageError), match=said):
        run(*arguments)

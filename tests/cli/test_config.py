import json

import pytest
from typer.testing import CliRunner

from megascale_jax.cli.config import app, header, summary_of
from megascale_jax.config.load import load_experiment
from megascale_jax.errors import ConfigError, UsageError


def test_show_prints_an_experiment_file_under_its_facts(tmp_path):
    result = CliRunner().invoke(app, ["show", "quickstart", "train.steps=77"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "# mesh:             pipe 2 x data 2 x tensor 2 = 8 devices\n" in result.stdout
    assert "# tokens per step:  4,096 (32 rows of 128); 315,392 in all\n" in result.stdout
    file = tmp_path / "again.yaml"
    file.write_text(result.stdout, encoding="utf-8")
    assert load_experiment(str(file)) == load_experiment("quickstart", ["train.steps=77"])


def test_show_writes_experiment_and_facts_when_json_is_given(tmp_path):
    path = tmp_path / "facts.json"
    assert CliRunner().invoke(app, ["show", "gpt-175b", "--json", str(path)], catch_exceptions=False).exit_code == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["experiment"]["model"]["num_layers"] == 96
    assert written["facts"]["devices"] == 12288
    assert written["facts"]["parameters"] == sum(written["facts"]["parameter_breakdown"].values()) > 175e9


def test_show_refuses_before_it_prints_when_the_experiment_is_wrong(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean train\.steps"):
        CliRunner().invoke(app, ["show", "quickstart", "train.stepz=1"], catch_exceptions=False)
    with pytest.raises(UsageError, match="does not exist"):
        CliRunner().invoke(app, ["show", "quickstart", "--json", str(tmp_path / "no/x.json")], catch_exceptions=False)


def test_list_names_every_experiment_with_its_first_sentence(tmp_path):
    path = tmp_path / "list.json"
    result = CliRunner().invoke(app, ["list", "--json", str(path)], catch_exceptions=False)
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["gpt-13b", "gpt-175b", "gpt-1b", "gpt-530b", "quickstart"]
    assert "The first run" in result.stdout
    assert list(json.loads(path.read_text(encoding="utf-8"))) == ["gpt-13b", "gpt-175b", "gpt-1b", "gpt-530b", "quickstart"]


def test_summary_is_empty_when_a_file_opens_without_a_comment(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("model: gpt\n", encoding="utf-8")
    assert summary_of(file) == ""


def test_header_is_only_comments():
    from megascale_jax.cli.config import facts_of

    experiment = load_experiment("gpt-530b")
    lines = header(experiment, facts_of(experiment)).splitlines()
    assert lines[0] == "# gpt-530b"
    assert all(line.startswith("# ") for line in lines)

"""The ``data`` verb."""

import json

import pytest
from typer.testing import CliRunner

from megascale_jax.cli.data import app
from megascale_jax.data.manifest import read_manifest
from megascale_jax.errors import DataError, UsageError


@pytest.fixture
def arguments(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"body": f"text number {n} of many"}) + "\n" for n in range(200)))
    options = ["--sequence-length", "16", "--text-field", "body", "--held-out", "0.2", "--json", str(tmp_path / "out.json")]
    return ["prepare", str(tmp_path / "corpus.jsonl"), "-o", str(tmp_path / "out"), *options]


def run(arguments, **options):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}, catch_exceptions=False, **options)


def test_prepare_writes_the_folder_and_reports_it_when_all_is_well(arguments, tmp_path):
    result = run(arguments)
    manifest = read_manifest(tmp_path / "out")
    assert result.exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text()) == manifest.model_dump()
    for text in (f"{manifest.train.tokens:,}", f"{manifest.unigram_nats:.4f}", f"{manifest.bigram_nats:.4f}", "257 ids"):
        assert text in result.output
    assert f"train.data.prepared={tmp_path / 'out'}" in result.output


def test_options_reach_the_request(arguments, tmp_path):
    run(arguments)
    run([*arguments, "--train-bpe", "280", "--seed", "5", "--force"])
    request = read_manifest(tmp_path / "out").request
    assert (request.train_bpe_vocab, request.seed, request.held_out_fraction, request.text_field) == (280, 5, 0.2, "body")


def test_existing_output_of_another_request_is_a_data_error(arguments):
    run(arguments)
    with pytest.raises(DataError, match="--force"):
        run([*arguments, "--seed", "5"])


def test_json_path_that_cannot_be_written_is_refused_before_the_work(arguments, tmp_path):
    arguments[-1] = str(tmp_path / "absent" / "out.json")
    with pytest.raises(UsageError, match="--json"):
        run(arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["-o"])
def test_missing_option_exits_with_2(arguments, missing):
    place = arguments.index(missing)
    assert run(arguments[:place] + arguments[place + 2 :]).exit_code == 2


def test_help_names_every_option():
    output = run(["prepare", "--help"]).output
    for option in ("--sequence-length", "--tokenizer", "--train-bpe", "--held-out", "--text-field", "--seed", "--force", "--json"):
        assert option in output

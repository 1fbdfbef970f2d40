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


def test_inspect_shows_rows_with_borders_and_the_counts(arguments, tmp_path):
    run(arguments)
    result = run(["inspect", str(tmp_path / "out"), "--rows", "2", "--json", str(tmp_path / "seen.json")])
    manifest = read_manifest(tmp_path / "out")
    assert result.exit_code == 0
    assert "text number" in result.output and "- end of document -" in result.output
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["rows"], seen["tokens"], seen["documents"]) == (manifest.train.rows, manifest.train.tokens, manifest.train.documents)
    for text in (f"{manifest.train.rows:,} rows", "fill rate", "duplicates: ", "0 documents", "'end of document'"):
        assert text in result.output
    held_out = run(["inspect", str(tmp_path / "out"), "--split", "held-out", "--rows", "0"])
    assert f"held-out: {manifest.held_out.rows:,} rows" in held_out.output and "text number" not in held_out.output


def test_inspect_of_what_is_no_prepared_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="No prepared data at"):
        run(["inspect", str(tmp_path / "absent")])
    with pytest.raises(DataError, match=r"no manifest\.json"):
        run(["inspect", str(tmp_path)])
    assert run(["inspect", str(tmp_path), "--split", "test"]).exit_code == 2


def test_inspect_obeys_no_control_characters_of_the_text(tmp_path):
    (tmp_path / "corpus.txt").write_text("\x1b[31mred \x07" * 200)
    run(["prepare", str(tmp_path / "corpus.txt"), "-o", str(tmp_path / "out"), "--sequence-length", "64"])
    output = run(["inspect", str(tmp_path / "out")]).output
    assert "[31mred" in output and "\x1b" not in output and "\x07" not in output

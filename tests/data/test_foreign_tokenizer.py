"""Tokenizer files beside a Hugging Face model: the end of a document goes out as a token, and comes back as an id above all."""

import json

import numpy as np
import pytest

from megascale_jax.data.foreign_tokenizer import END, run_tokenizer, take_tokenizer, write_tokenizer
from megascale_jax.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from megascale_jax.errors import DataError

TEXT = "def return x = for in"


@pytest.fixture
def ours():
    return train_bpe([TEXT] * 3, 265)


def written(document, folder):
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


def test_written_tokenizer_comes_back_as_the_same(ours, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "back").mkdir()
    write_tokenizer(ours, tmp_path / "out", 128)
    config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert config["eos_token"] == END and config["model_max_length"] == 128
    with_end = load_tokenizer("tokenizer.json", tmp_path / "out")
    assert with_end.encode(END).tolist() == [ours.end_of_document] and with_end.vocab_size == ours.vocab_size + 1
    assert take_tokenizer(tmp_path / "out", tmp_path / "back", ours.end_of_document) == "tokenizer.json"
    assert load_tokenizer("tokenizer.json", tmp_path / "back").digest == ours.digest


def test_an_end_that_is_in_the_vocabulary_too_is_taken_out(ours, tmp_path):
    """As in GPT-2's file."""
    document = json.loads(ours.json)
    document["model"]["vocab"]["<|endoftext|>"] = ours.end_of_document
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document["added_tokens"] = [{"id": ours.end_of_document, "content": "<|endoftext|>", **flags}]
    source = written(document, tmp_path / "model")
    (tmp_path / "run").mkdir()
    take_tokenizer(source, tmp_path / "run", ours.end_of_document)
    taken = load_tokenizer("tokenizer.json", tmp_path / "run")
    assert taken.end_of_document == ours.end_of_document
    np.testing.assert_array_equal(taken.encode(TEXT), ours.encode(TEXT))


@pytest.mark.parametrize("end_token", [None, 3, 263])
def test_a_tokenizer_whose_highest_id_ends_nothing_stays_as_it_is(ours, tmp_path, end_token):
    source = written(json.loads(ours.json), tmp_path / "model")
    (tmp_path / "run").mkdir()
    take_tokenizer(source, tmp_path / "run", end_token)
    assert load_tokenizer("tokenizer.json", tmp_path / "run").digest == ours.digest


def test_a_second_end_has_another_name(ours, tmp_path):
    (tmp_path / "once").mkdir()
    write_tokenizer(ours, tmp_path / "once", 16)
    (tmp_path / "twice").mkdir()
    write_tokenizer(load_tokenizer("tokenizer.json", tmp_path / "once"), tmp_path / "twice", 16)
    contents = [token["content"] for token in json.loads((tmp_path / "twice/tokenizer.json").read_text())["added_tokens"]]
    assert contents == [END, f"<|end_of_document_{ours.end_of_document + 1}|>"]


def test_bytes_have_no_files_and_damaged_ones_are_refused(tmp_path):
    write_tokenizer(ByteTokenizer(), tmp_path, 16)
    assert not any(tmp_path.iterdir())
    assert take_tokenizer(tmp_path, tmp_path, None) is None
    assert run_tokenizer("bytes", None).vocab_size == 257
    assert run_tokenizer(None, tmp_path) is None and run_tokenizer("tokenizer.json", tmp_path) is None
    for text in ("{", "[]", '{"model": {}}', '{"model": 3}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(DataError, match="is no Hugging Face tokenizers JSON file"):
            take_tokenizer(tmp_path, tmp_path, 1)

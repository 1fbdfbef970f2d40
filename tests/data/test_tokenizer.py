"""Byte and Hugging Face tokenizers behind one interface."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.data.tokenizer import load_tokenizer, train_bpe
from megascale_jax.errors import DataError
from tests.data.texts import make_texts

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
BPE = train_bpe(make_texts(50), 300)


@given(TEXT)
def test_bytes_decode_to_the_same_text(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_have_257_ids_and_decode_broken_utf8_with_a_replacement():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.decode([104, 0xFF, 105, 256]) == "h\ufffdi"


@settings(max_examples=50, deadline=None)
@given(TEXT)
def test_trained_bpe_decodes_any_text_to_itself(text):
    ids = BPE.encode(text)
    assert BPE.decode([*ids, BPE.end_of_document]) == text
    assert len(ids) == 0 or ids.max() < BPE.end_of_document


def test_trained_bpe_shortens_its_corpus_and_is_the_same_when_trained_again():
    text = make_texts(50)[3]
    assert len(BPE.encode(text)) < 0.8 * len(text.encode())
    assert BPE.vocab_size == 300
    assert BPE.end_of_document == 299
    assert train_bpe(make_texts(50), 300).digest == BPE.digest != train_bpe(make_texts(50), 290).digest


def test_bpe_is_refused_when_too_small_for_all_bytes():
    assert train_bpe(["ab"], 257).vocab_size == 257
    with pytest.raises(DataError, match="too small"):
        train_bpe(["ab"], 256)


def test_saved_tokenizer_encodes_the_same_when_loaded_from_its_folder(tmp_path):
    for tokenizer in (BPE, load_tokenizer("bytes")):
        name = tokenizer.save(tmp_path)
        loaded = load_tokenizer(name, tmp_path)
        text = "def λ(x): return 0.5"
        assert np.array_equal(loaded.encode(text), tokenizer.encode(text))
        assert (loaded.digest, loaded.vocab_size) == (tokenizer.digest, tokenizer.vocab_size)


def test_truncation_in_the_file_is_ignored(tmp_path):
    file = tmp_path / BPE.save(tmp_path)
    content = json.loads(file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(content))
    loaded = load_tokenizer(str(file))
    assert np.array_equal(loaded.encode("loss step rank loss step rank"), BPE.encode("loss step rank loss step rank"))
    assert loaded.digest == BPE.digest


def test_end_of_document_is_above_added_tokens_and_gaps(tmp_path):
    file = tmp_path / BPE.save(tmp_path)
    content = json.loads(file.read_text())
    added = {"id": 500, "content": "<|x|>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["model"]["vocab"]["<|x|>"] = 500
    content["added_tokens"].append(added)
    file.write_text(json.dumps(content))
    assert load_tokenizer(str(file)).end_of_document == 501


@pytest.mark.parametrize("content", ["", "{}", '{"model": 3}', "\0"])
def test_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    file = tmp_path / "t.json"
    file.write_text(content)
    with pytest.raises(DataError, match="no Hugging Face tokenizers JSON"):
        load_tokenizer(str(file))


def test_missing_file_is_refused_with_what_is_expected():
    with pytest.raises(DataError, match="'bytes' or a Hugging Face"):
        load_tokenizer("byte")


@pytest.mark.parametrize("wrong", [-1, 257])
def test_decoding_is_refused_when_an_id_is_outside_the_vocabulary(wrong):
    with pytest.raises(DataError, match=rf"{wrong} is outside .*\[0, 257\)"):
        load_tokenizer("bytes").decode([65, wrong])

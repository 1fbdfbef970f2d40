"""What a look at a prepared split finds."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_jax.data.inspection import FrequencyBand, frequency_bands, inspect, split_documents
from megascale_jax.data.prepare import prepare
from megascale_jax.data.prepared import open_prepared, stored_rows

END = 256


def prepared_of(texts, tmp_path, **options):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(str(corpus), tmp_path / "out", **{"sequence_length": 16, "held_out_fraction": 0.1} | options)
    return open_prepared(tmp_path / "out")


def test_counts_are_those_of_the_corpus(tmp_path):
    texts = [f"text {number}" for number in range(40)] + ["the same"] * 5
    prepared = prepared_of(texts, tmp_path)
    total = [inspect(prepared, split, 0) for split in ("train", "held_out")]
    train = total[0]
    manifest = prepared.manifest
    assert (train.rows, train.rows_read, train.tokens, train.documents) == (
        manifest.train.rows,
        manifest.train.rows,
        manifest.train.tokens,
        manifest.train.documents,
    )
    assert sum(part.documents for part in total) == 45
    assert sum(part.duplicate_documents for part in total) == 4  # equal texts are in one split
    counts = np.zeros(257, int)
    for text in texts:
        np.add.at(counts, [*text.encode(), END], 1)
    seen = {token.id: token.count for part in total for token in part.top_tokens}
    assert seen.keys() <= set(np.flatnonzero(counts))
    for token in (ord("t"), ord("e"), END):
        assert sum(entry.count for part in total for entry in part.top_tokens if entry.id == token) == counts[token]
    assert sum(band.ids for band in train.bands) == train.vocab_size == 257
    assert train.bands[0].ids == 257 - train.ids_seen


def test_fill_and_loss_rates_leave_padding_and_ends_out(tmp_path):
    prepared = prepared_of(["abcdefg"] * 20 + ["other text"] * 3, tmp_path)
    found = inspect(prepared, "train", 0)
    stored = stored_rows(prepared.folder, prepared.manifest, "train")
    stored = [stored[index] for index in range(len(stored))]
    assert len(stored[-1]) < 17
    assert found.fill_rate == pytest.approx(sum(len(row) - 1 for row in stored) / (16 * len(stored)))
    assert found.loss_rate == pytest.approx(sum((row[:-1] != END).sum() for row in stored) / (16 * len(stored)))
    assert found.loss_rate < found.fill_rate < 1


def test_rows_that_repeat_are_counted(tmp_path):
    prepared = prepared_of(["0123456789abcde"] * 30 + ["zzzzzzzz" * 6], tmp_path)  # a row is one document and its end
    stored = stored_rows(prepared.folder, prepared.manifest, "train")
    distinct = {stored[index].tobytes() for index in range(len(stored))}
    assert inspect(prepared, "train", 0).duplicate_rows == len(stored) - len(distinct) > 10


def test_shown_rows_are_the_text_cut_at_document_ends(tmp_path):
    prepared = prepared_of(["ab", *(f"é{number}" * 9 for number in range(9)), "f" * 60], tmp_path)
    found = inspect(prepared, "train", 12)
    stored = stored_rows(prepared.folder, prepared.manifest, "train")
    for shown in found.shown:
        tokens = stored[shown.index]
        rebuilt = "".join(segment.text + ("|" if segment.ends else "") for segment in shown.segments)
        assert rebuilt == b"".join(b"|" if token == END else bytes([token]) for token in tokens).decode(errors="replace")
    assert {segment.ends for shown in found.shown for segment in shown.segments} == {True, False}


def test_long_split_is_read_in_part_and_says_so(tmp_path):
    found = inspect(prepared_of([f"text {number}" for number in range(90)], tmp_path), "train", 1, max_tokens=64)
    assert found.rows_read == 4 < found.rows
    assert found.tokens == 65


@given(st.lists(st.integers(0, 3), max_size=12))
def test_documents_are_what_lies_between_ends(tokens):
    parts = list(split_documents(np.array(tokens, np.uint16), 3))
    assert [token for part, ends in parts for token in [*part, *([3] if ends else [])]] == tokens
    assert all(3 not in part for part, _ in parts)


def test_bands_are_decades_from_never_to_the_most_frequent():
    counts = np.array([0, 0, 1, 9, 10, 99, 100, 250])
    assert frequency_bands(counts) == (FrequencyBand(0, 0, 2), FrequencyBand(1, 9, 2), FrequencyBand(10, 99, 2), FrequencyBand(100, 999, 2))

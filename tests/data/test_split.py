"""Choice of the held-out documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_jax.data.source import Document
from megascale_jax.data.split import cut_single_document, document_hash, fill_both_splits, is_below
from megascale_jax.errors import DataError


def test_hash_holds_out_about_the_fraction_and_depends_on_the_seed():
    first, second = [[is_below(document_hash(f"text {n}", seed), 0.1) for n in range(5000)] for seed in (0, 1)]
    assert 430 < sum(first) < 570
    assert 20 < np.logical_and(first, second).sum() < 90  # independent: a tenth of a tenth


def test_nothing_moves_when_both_splits_have_a_row():
    held_out = np.array([True, False, False, True])
    assert np.array_equal(fill_both_splits(held_out, np.arange(4, dtype=np.uint64), np.full(4, 10), 9), held_out)


def test_lowest_hashes_move_when_held_out_lacks_a_row():
    hashes = np.array([5, 1, 9, 3, 7], np.uint64)
    moved = fill_both_splits(np.zeros(5, bool), hashes, np.full(5, 6), 9)
    assert moved.tolist() == [False, True, False, True, False]


def test_highest_hashes_move_back_when_train_lacks_a_row():
    hashes = np.array([5, 1, 9, 3, 7], np.uint64)
    moved = fill_both_splits(np.ones(5, bool), hashes, np.full(5, 6), 9)
    assert moved.tolist() == [True, True, False, True, False]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2**64 - 1), st.integers(2, 60)), min_size=1, max_size=12), st.integers(1, 20))
def test_both_splits_have_a_row_or_it_is_refused(documents, sequence_length):
    held_out, hashes, sizes = (np.array(column) for column in zip(*documents, strict=True))
    hashes = np.array([hashed for _, hashed, _ in documents], np.uint64)
    needed = sequence_length + 1
    try:
        chosen = fill_both_splits(held_out, hashes, sizes, sequence_length)
    except DataError:
        # Only a corpus for which a choice is impossible or a matter of luck: below three rows, or one document has almost all.
        assert sizes.sum() < 3 * needed or sizes.sum() - sizes.max() < needed
    else:
        assert sizes[chosen].sum() >= needed
        assert sizes[~chosen].sum() >= needed


def test_too_short_corpus_is_refused_with_the_counts():
    with pytest.raises(DataError, match=r"2 documents of 30 tokens leave 20 .* and 10 .*a row needs 17"):
        fill_both_splits(np.zeros(2, bool), np.arange(2, dtype=np.uint64), np.array([20, 10]), 16)


def test_single_document_is_cut_at_a_line_near_its_end():
    text = "".join(f"line {n}\n" for n in range(2000))
    (head, head_is_end), (tail, tail_is_end) = cut_single_document([Document("a", text)], 0.1, 16)
    assert (head_is_end, tail_is_end) == (False, True)
    assert head.text + tail.text == text
    assert head.text.endswith("\n")
    assert 0.09 < len(tail.text) / len(text) < 0.1
    assert head.name != tail.name


@pytest.mark.parametrize("text", ["a", "ab", "a\n", "word " * 400])
def test_single_document_is_cut_without_loss_when_it_has_no_good_line(text):
    parts = list(cut_single_document([Document("a", text)], 0.01, 16))
    assert "".join(part.text for part, _ in parts) == text
    assert all(part.text for part, _ in parts)
    if len(text) > 100:
        assert len(parts[1][0].text) == 8 * 17  # enough characters for a row at several per token


def test_documents_stay_whole_when_there_are_several():
    documents = [Document("a", "x"), Document("b", "y"), Document("c", "z")]
    assert list(cut_single_document(documents, 0.5, 1)) == [(document, False) for document in documents]
    assert list(cut_single_document([], 0.5, 1)) == []

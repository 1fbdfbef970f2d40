"""Unigram and bigram baselines against a slow dictionary implementation."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.data import baseline
from megascale_jax.data.baseline import ALPHAS, PairCounts, cross_entropies, is_counted


def slow(train: list[int], held_out: list[int], vocab_size: int, end: int) -> tuple[float, float, float]:
    def with_loss(stream):
        return [(a, b) for a, b in pairwise(stream) if a != end]

    pairs, singles, inputs = Counter(with_loss(train)), Counter(), Counter()
    for (a, b), count in pairs.items():
        singles[b] += count
        inputs[a] += count
    total = sum(singles.values())

    def unigram(b):
        return (singles[b] + 1) / (total + vocab_size)

    scored = with_loss(held_out)
    bigrams = []
    for alpha in ALPHAS:
        nats = [-math.log((pairs[a, b] + alpha * unigram(b)) / (inputs[a] + alpha)) for a, b in scored]
        bigrams.append((sum(nats) / len(nats), alpha))
    return sum(-math.log(unigram(b)) for _, b in scored) / len(scored), *min(bigrams)


def count(stream: list[int], cuts: list[int], vocab_size: int, end: int) -> PairCounts:
    counts = PairCounts(vocab_size, end)
    for piece in np.split(np.array(stream, np.uint32), sorted(cuts)):
        counts.add(piece)
    return counts


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_baselines_equal_the_slow_ones(data):
    vocab_size = data.draw(st.sampled_from([3, 257, 100_000]))
    end = vocab_size - 1
    tokens = st.sampled_from([0, 1, 2 % vocab_size, vocab_size // 2, end])
    train = data.draw(st.lists(tokens, max_size=60))
    held_out = [0, *data.draw(st.lists(tokens, min_size=1, max_size=40))]
    cuts = data.draw(st.lists(st.integers(0, len(train)), max_size=3))
    found = cross_entropies(count(train, cuts, vocab_size, end), count(held_out, [], vocab_size, end))
    unigram, bigram, _ = slow(train, held_out, vocab_size, end)
    assert found.unigram_nats == pytest.approx(unigram, rel=1e-12)
    assert found.bigram_nats == pytest.approx(bigram, rel=1e-12)


def test_merging_often_changes_nothing(monkeypatch):
    stream = np.random.default_rng(0).integers(0, 300, 5000).tolist()
    once = count(stream, [], 300, 299).sorted_pairs()
    monkeypatch.setattr(baseline, "_PENDING_PAIRS", 100)
    often = count(stream, list(range(0, 5000, 70)), 300, 299).sorted_pairs()
    assert np.array_equal(once[0], often[0])
    assert np.array_equal(once[1], often[1])


def test_bigram_learns_a_cycle_that_the_unigram_cannot():
    cycle = [0, 1, 2, 3] * 500
    found = cross_entropies(count(cycle, [], 5, 4), count(cycle[:100], [], 5, 4))
    assert found.unigram_nats == pytest.approx(math.log(4), rel=1e-2)
    assert found.bigram_nats < 0.01


def test_skipped_piece_breaks_the_context():
    counts = PairCounts(10, 9)
    counts.add(np.array([1, 2]))
    counts.skip()
    counts.add(np.array([3, 4]))
    assert counts.sorted_pairs()[0].tolist() == [12, 34]
    assert counts.num_tokens == 4


@given(st.integers(1, 500), st.integers(1, 500))
def test_counted_pieces_are_as_many_as_allowed_and_evenly_spread(num_pieces, max_pieces):
    counted = [index for index in range(num_pieces) if is_counted(index, num_pieces, max_pieces)]
    assert len(counted) == min(num_pieces, max_pieces)
    gaps = np.diff(counted)
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1

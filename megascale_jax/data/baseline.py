"""What a model must beat: unigram and bigram cross-entropy of the held-out split, counted on the train split.

Both are scored on the positions where the model is: each token that follows another of its own document (the first token
of a document has no context and no loss). The unigram model adds one to every count; the bigram model is drawn to the
unigram model by a Dirichlet prior, p(b | a) = (c(ab) + alpha p(b)) / (c(a) + alpha), with the alpha of a small grid that
suits the held-out split best: the toughest opponent, chosen with knowledge that the trained model does not have.

Pairs are kept sparse, sorted, and merged as they come, so a vocabulary of 100,000 costs memory only for the pairs that
occur; of a long train split at most ``MAX_TRAIN_TOKENS``, in evenly spread pieces, are counted.
"""

from dataclasses import dataclass

import numpy as np

MAX_TRAIN_TOKENS = 1 << 26
"""Train tokens that are counted at most (67 million)."""

ALPHAS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""Weights of the bigram model's prior that are tried, in tokens."""

_PENDING_PAIRS = 1 << 23


@dataclass(frozen=True)
class Baselines:
    """Held-out cross-entropy in nats per token."""

    unigram_nats: float
    bigram_nats: float
    bigram_alpha: float


class PairCounts:
    """Counts of (input, target) pairs with a loss, over a stream given piece by piece."""

    def __init__(self, vocab_size: int, end_of_document: int):
        self.vocab_size = vocab_size
        self.num_tokens = 0
        self._end_of_document = end_of_document
        self._previous = np.empty(0, np.int64)
        self._pairs = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, tokens: np.ndarray) -> None:
        """Count the pairs of ``tokens`` (1-D), the first of which follows the last of the piece before."""
        self.num_tokens += len(tokens)
        stream = np.concatenate([self._previous, tokens.astype(np.int64)])
        self._previous = stream[-1:]
        inputs, targets = stream[:-1], stream[1:]
        has_loss = inputs != self._end_of_document
        self._pending.append(np.unique(inputs[has_loss] * self.vocab_size + targets[has_loss], return_counts=True))
        if sum(len(pairs) for pairs, _ in self._pending) > _PENDING_PAIRS:
            self._merge()

    def skip(self) -> None:
        """Leave out a piece of the stream: what comes next follows nothing."""
        self._previous = np.empty(0, np.int64)

    def sorted_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """``input * vocab_size + target`` of all pairs seen, ascending, and how often: two int64 arrays."""
        self._merge()
        return self._pairs, self._counts

    def _merge(self) -> None:
        pairs = np.concatenate([self._pairs, *(pairs for pairs, _ in self._pending)])
        counts = np.concatenate([self._counts, *(counts for _, counts in self._pending)])
        self._pending = []
        self._pairs, place = np.unique(pairs, return_inverse=True)
        self._counts = np.zeros(len(self._pairs), np.int64)
        np.add.at(self._counts, place, counts)


def is_counted(index: int, num_pieces: int, max_pieces: int) -> bool:
    """Whether piece ``index`` is in the even choice of ``max_pieces`` (or all) of ``num_pieces`` pieces of a stream."""
    chosen = min(num_pieces, max_pieces)
    return index * chosen // num_pieces != (index + 1) * chosen // num_pieces


def cross_entropies(train: PairCounts, held_out: PairCounts) -> Baselines:
    """Both baselines of ``held_out`` (at least one pair) under the models of ``train``."""
    size = train.vocab_size
    train_pairs, train_counts = train.sorted_pairs()
    pairs, counts = held_out.sorted_pairs()
    assert len(pairs), "a held-out split without a single target"
    inputs, targets = np.divmod(pairs, size)

    target_counts = np.bincount(train_pairs % size, weights=train_counts, minlength=size)
    unigram = (target_counts + 1) / (train_counts.sum() + size)
    input_counts = np.bincount(train_pairs // size, weights=train_counts, minlength=size)[inputs]
    if len(train_pairs):
        place = np.minimum(np.searchsorted(train_pairs, pairs), len(train_pairs) - 1)
        pair_counts = np.where(train_pairs[place] == pairs, train_counts[place], 0)
    else:
        pair_counts = np.zeros(len(pairs))

    def nats(probability: np.ndarray) -> float:
        return float(-(counts * np.log(probability)).sum() / counts.sum())

    prior = unigram[targets]
    scores = [(nats((pair_counts + alpha * prior) / (input_counts + alpha)), alpha) for alpha in ALPHAS]
    return Baselines(nats(prior), *min(scores))

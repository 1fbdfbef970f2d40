"""What is in a prepared split: rows as text with the borders of documents, and counts over the rows.

Counts are over the first ``MAX_TOKENS`` tokens at most; ``rows_read`` says of how many rows. Two rows or documents are
duplicates when their tokens are equal (by a 128-bit hash); of k equal ones, k - 1 count.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megascale_jax.data.manifest import Split
from megascale_jax.data.prepared import Prepared, stored_rows
from megascale_jax.data.rows import in_order

MAX_TOKENS = 1 << 26
"""Tokens that are counted at most (67 million): some seconds to a minute."""

MAX_TOP_TOKENS = 20


@dataclass(frozen=True)
class Segment:
    """A part of a document inside a row."""

    text: str
    ends: bool
    """Whether the document ends here, rather than with the row."""


@dataclass(frozen=True)
class ShownRow:
    """A row as text."""

    index: int
    tokens: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class TokenCount:
    """How often a token id occurs."""

    id: int
    text: str
    count: int


@dataclass(frozen=True)
class FrequencyBand:
    """Token ids that occur from ``least`` to ``most`` times."""

    least: int
    most: int
    ids: int


@dataclass(frozen=True)
class Inspection:
    """The content of a split; rates are shares in [0, 1]."""

    split: str
    rows: int
    rows_read: int
    tokens: int
    """Tokens of the stream that was read; a token shared by two rows counts once."""
    documents: int
    """Documents that end in the rows read."""
    fill_rate: float
    """Share of the positions of the rows read that hold a token, rather than padding."""
    loss_rate: float
    """Share of those positions that have a target: all but ends of documents and padding."""
    duplicate_rows: int
    duplicate_documents: int
    ids_seen: int
    vocab_size: int
    top_tokens: tuple[TokenCount, ...]
    bands: tuple[FrequencyBand, ...]
    shown: tuple[ShownRow, ...]


def inspect(prepared: Prepared, split: Split, shown_rows: int, max_tokens: int = MAX_TOKENS) -> Inspection:
    """Look at a split; the first ``shown_rows`` rows become text. Raises ``DataError`` for a damaged row."""
    manifest = prepared.manifest
    source, end, length = stored_rows(prepared.folder, manifest, split), manifest.end_of_document, manifest.sequence_length
    rows_read = min(len(source), max(1, max_tokens // length, shown_rows))
    counts = np.zeros(manifest.vocab_size, np.int64)
    inputs, targets, num_documents = 0, 0, 0
    row_hashes: set[bytes] = set()
    document_hashes: set[bytes] = set()
    shown: list[ShownRow] = []
    unfinished = hashlib.blake2b(digest_size=16)
    for index, row in enumerate(in_order(source, rows_read)):
        row_hashes.add(hashlib.blake2b(row.tobytes(), digest_size=16).digest())
        inputs += len(row) - 1
        targets += int((row[:-1] != end).sum())
        new = row if index == 0 else row[1:]  # the first token of a row is the last of the one before
        counts += np.bincount(new, minlength=len(counts))
        for document, ends in split_documents(new, end):
            unfinished.update(document.tobytes())
            if ends:
                num_documents += 1
                document_hashes.add(unfinished.digest())
                unfinished = hashlib.blake2b(digest_size=16)
        if index < shown_rows:
            segments = tuple(Segment(prepared.tokenizer.decode(part), ends) for part, ends in split_documents(row, end))
            shown.append(ShownRow(index, len(row), segments))
    top = np.argsort(-counts, kind="stable")[:MAX_TOP_TOKENS]
    return Inspection(
        split=split,
        rows=len(source),
        rows_read=rows_read,
        tokens=int(counts.sum()),
        documents=num_documents,
        fill_rate=inputs / (rows_read * length),
        loss_rate=targets / (rows_read * length),
        duplicate_rows=rows_read - len(row_hashes),
        duplicate_documents=num_documents - len(document_hashes),
        ids_seen=int((counts > 0).sum()),
        vocab_size=manifest.vocab_size,
        top_tokens=tuple(TokenCount(int(i), _token_text(prepared, int(i)), int(counts[i])) for i in top if counts[i]),
        bands=frequency_bands(counts),
        shown=tuple(shown),
    )


def split_documents(tokens: np.ndarray, end_of_document: int) -> Iterator[tuple[np.ndarray, bool]]:
    """The parts of ``tokens`` between ends of document, which are left out; with each, whether one followed it."""
    begin = 0
    for place in np.flatnonzero(tokens == end_of_document):
        yield tokens[begin:place], True
        begin = int(place) + 1
    if begin < len(tokens):
        yield tokens[begin:], False


def frequency_bands(counts: np.ndarray) -> tuple[FrequencyBand, ...]:
    """Ids by how often they occur: never, 1 to 9 times, 10 to 99, and so on."""
    bands = [FrequencyBand(0, 0, int((counts == 0).sum()))]
    least = 1
    while least <= counts.max(initial=0):
        bands.append(FrequencyBand(least, 10 * least - 1, int(((counts >= least) & (counts < 10 * least)).sum())))
        least *= 10
    return tuple(bands)


def _token_text(prepared: Prepared, token: int) -> str:
    return "end of document" if token == prepared.manifest.end_of_document else prepared.tokenizer.decode([token])

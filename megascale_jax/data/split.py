"""Which documents are held out.

A document is held out when the hash of the seed and its text falls below the wanted fraction. The name is left out on
purpose: two copies of one text land on the same side, so the held-out split never repeats a training document, and
renaming or reordering files changes nothing. When the hash leaves one side without a full row, documents move over in
the order of their hash until it has one. A corpus of a single document is cut near its end instead.

A corpus that cannot fill a row on both sides is a ``DataError``.
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from megascale_jax.data.source import Document
from megascale_jax.errors import DataError

_HASH_BITS = 64
_MIN_CUT_ROWS = 8


def document_hash(text: str, seed: int) -> int:
    """64-bit hash of ``text`` under ``seed``, uniform over documents."""
    salt = hashlib.blake2b(str(seed).encode(), digest_size=16).digest()
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=_HASH_BITS // 8, salt=salt).digest(), "little")


def is_below(hashed: int, fraction: float) -> bool:
    """Whether a document with this hash is held out."""
    return hashed < int(fraction * 2.0**_HASH_BITS)


def cut_single_document(documents: Iterable[Document], held_out_fraction: float, sequence_length: int) -> Iterator[tuple[Document, bool]]:
    """The documents, each with whether it is the end that was cut off a single document.

    A corpus of one document becomes two: its end, about ``held_out_fraction`` of it from the next line on, is the second.
    Of a short document more is cut off, up to a half, so that the end fills a row even at several characters per token.
    """
    remaining = iter(documents)
    first = next(remaining, None)
    if first is None:
        return
    second = next(remaining, None)
    if second is not None:
        yield from ((document, False) for document in chain((first, second), remaining))
        return
    size = len(first.text)
    middle = size - max(round(size * held_out_fraction), min(_MIN_CUT_ROWS * (sequence_length + 1), size // 2))
    cut = first.text.find("\n", middle) + 1 or middle
    if size - cut < (size - middle) // 2:
        cut = middle
    yield Document(f"{first.name}[:{cut}]", first.text[:cut]), False
    if cut < size:
        yield Document(f"{first.name}[{cut}:]", first.text[cut:]), True


def fill_both_splits(held_out: np.ndarray, hashes: np.ndarray, num_tokens: np.ndarray, sequence_length: int) -> np.ndarray:
    """The final choice: ``held_out`` with as few documents moved as give each side a full row.

    Args:
        held_out: bool [documents], by hash.
        hashes: uint64 [documents], the order of moving: lowest first into held-out, highest first out of it.
        num_tokens: int64 [documents], end of document included.
        sequence_length: a full row has one token more.

    Raises ``DataError``, with the counts, when no row can be filled on one side.
    """
    needed = sequence_length + 1
    chosen = held_out.copy()
    order = np.argsort(hashes, kind="stable")
    for lacking, moving_order in ((True, order), (False, order[::-1])):
        have, others = int(num_tokens[chosen == lacking].sum()), int(num_tokens[chosen != lacking].sum())
        for index in moving_order:
            if have >= needed:
                break
            size = int(num_tokens[index])
            if chosen[index] != lacking and others - size >= needed:
                chosen[index] = lacking
                have, others = have + size, others - size
    train_tokens, held_out_tokens = int(num_tokens[~chosen].sum()), int(num_tokens[chosen].sum())
    if min(train_tokens, held_out_tokens) < needed:
        raise DataError(
            f"The corpus is too short: {len(chosen)} documents of {train_tokens + held_out_tokens} tokens leave {train_tokens} for "
            f"the train split and {held_out_tokens} for the held-out one; a row needs {needed} in each. "
            f"Add text, or lower the sequence length ({sequence_length})."
        )
    return chosen

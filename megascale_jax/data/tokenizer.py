"""Text to token ids and back: plain bytes, or a Hugging Face ``tokenizers`` file, or a BPE trained here.

Every tokenizer has one id more than its vocabulary: the last one, ``end_of_document``, which no text encodes to. It ends
each document in the packed rows. A tokenizer saves itself into a prepared folder, so that the folder needs nothing else,
and carries a digest, so that two folders or a folder and a checkpoint can be told apart.

A file that is missing or no tokenizer is a ``DataError``. Decoding never fails on bytes that are not UTF-8 (a model may
emit any), but an id outside the vocabulary is a ``DataError``.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megascale_jax.errors import DataError

BYTES = "bytes"
"""Tokenizer name that stands for one token per UTF-8 byte."""

TOKENIZER_FILE = "tokenizer.json"

_BYTE_VALUES = 256


class Tokenizer(Protocol):
    """What the data package needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, ``end_of_document`` included."""
        ...

    @property
    def end_of_document(self) -> int:
        """The last id; ends a document, encodes no text."""
        ...

    @property
    def digest(self) -> str:
        """Hex digest of everything that decides how text is encoded."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``: 1-D unsigned integers, without ``end_of_document``."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """``encode`` of each text, on all cores where the tokenizer can."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; ``end_of_document`` is left out. Raises ``DataError`` for an id outside the vocabulary."""
        ...

    def save(self, folder: Path) -> str:
        """Write what ``load_tokenizer(name, folder)`` needs, and return that name."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte: 256 ids and ``end_of_document`` (256)."""

    vocab_size = _BYTE_VALUES + 1
    end_of_document = _BYTE_VALUES
    digest = hashlib.sha256(b"utf-8 bytes").hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """UTF-8 bytes as uint8."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """``encode`` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the bytes; what is not UTF-8 becomes U+FFFD."""
        return bytes(_text_ids(ids, self.vocab_size)).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> str:
        """Nothing to write: the name says all."""
        return BYTES


class FileTokenizer:
    """A Hugging Face ``tokenizers`` pipeline, with ``end_of_document`` appended after its highest id."""

    def __init__(self, pipeline: Any):
        """``pipeline``: a ``tokenizers.Tokenizer``. Its truncation and padding are turned off: documents are encoded whole."""
        pipeline.no_truncation()
        pipeline.no_padding()
        self._pipeline = pipeline
        self._json = pipeline.to_str()
        self.end_of_document = max(pipeline.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.vocab_size = self.end_of_document + 1
        canonical = json.dumps(json.loads(self._json), sort_keys=True)
        self.digest = hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def json(self) -> str:
        """The ``tokenizers`` JSON; it knows no ``end_of_document``."""
        return self._json

    def encode(self, text: str) -> np.ndarray:
        """Ids as uint32, without the pipeline's special tokens."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text as uint32, encoded on all cores."""
        encodings = self._pipeline.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text by the pipeline's decoder."""
        return self._pipeline.decode(_text_ids(ids, self.vocab_size), skip_special_tokens=False)

    def save(self, folder: Path) -> str:
        """Write ``tokenizer.json``."""
        (folder / TOKENIZER_FILE).write_text(self._json, encoding="utf-8")
        return TOKENIZER_FILE


def load_tokenizer(spec: str, folder: Path | None = None) -> Tokenizer:
    """The tokenizer that ``spec`` names: ``bytes``, or a ``tokenizers`` JSON file (relative to ``folder`` if given).

    Raises ``DataError`` when the file is missing, is no tokenizer, or has no token.
    """
    if spec == BYTES:
        return ByteTokenizer()
    path = Path(spec).expanduser() if folder is None else folder / spec
    if not path.is_file():
        raise DataError(f"No tokenizer at {str(path)!r}. Expected {BYTES!r} or a Hugging Face tokenizers JSON file.")
    return tokenizer_from_json(path.read_bytes(), str(path))


def tokenizer_from_json(content: bytes, name: str) -> Tokenizer:
    """The tokenizer of a ``tokenizers`` JSON file. Raises ``DataError`` with its ``name`` when it is none, or has no token."""
    from tokenizers import Tokenizer as Pipeline

    try:
        tokenizer = FileTokenizer(Pipeline.from_str(content.decode()))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise DataError(f"{name} is no Hugging Face tokenizers JSON file ({error}). Expected what `Tokenizer.save` writes.") from error
    if tokenizer.vocab_size < 2:
        raise DataError(f"{name} has an empty vocabulary. Expected a trained tokenizer.")
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` ids (``end_of_document`` included), trained on ``texts``.

    A small corpus may give fewer ids. Every text can be encoded and decodes to itself. Raises ``DataError`` when
    ``vocab_size`` is below 257 (256 byte values and ``end_of_document``).
    """
    check_bpe_size(vocab_size)
    from tokenizers import Tokenizer as Pipeline
    from tokenizers import decoders, models, pre_tokenizers, trainers

    pipeline = Pipeline(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    pipeline.train_from_iterator(texts, trainer)
    return FileTokenizer(pipeline)


def check_bpe_size(vocab_size: int) -> None:
    """Raise ``DataError`` when a byte-level BPE cannot have ``vocab_size`` ids."""
    if vocab_size <= _BYTE_VALUES:
        raise DataError(f"A byte-level BPE of {vocab_size} ids is too small: it needs {_BYTE_VALUES} bytes and the end of document.")


def _text_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    """``ids`` without ``end_of_document`` (the last id), checked."""
    listed = [int(i) for i in ids]
    wrong = next((i for i in listed if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise DataError(f"Token id {wrong} is outside the tokenizer's vocabulary [0, {vocab_size}). Is this its model?")
    return [i for i in listed if i != vocab_size - 1]

"""From a corpus to a prepared folder: tokenise, split, pack into rows, score the baselines, publish.

1. Every document is read and tokenised once, into one temporary file of tokens; its length and hash stay in memory.
2. The splits are chosen (``split.py``), with the exact token counts at hand.
3. Each split's documents, one after the other and each ended by ``end_of_document``, are one stream, which is cut into
   rows (``rows.py``) and counted (``baseline.py``) piece by piece.
4. ``manifest.json`` is written last, and the folder is published in one step.

All of that happens in a hidden folder beside the output, for an object store in one for temporary files (`publish.py`). Whatever
fails, fails before the last step: the output is complete or absent, and the folder is removed (only a killed process leaves it
behind). An existing output is returned when it was made from an equal request, replaced when ``force`` is set and it is
prepared data, and otherwise a ``DataError``.
"""

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path

import numpy as np

from megascale_jax.comm.address import is_remote
from megascale_jax.data import baseline, rows, split
from megascale_jax.data.files import Folder
from megascale_jax.data.manifest import (
    MANIFEST_VERSION,
    SPLITS,
    Manifest,
    Request,
    Split,
    SplitCounts,
    rows_folder,
    write_manifest,
)
from megascale_jax.data.progress import ByteProgress
from megascale_jax.data.publish import open_output
from megascale_jax.data.source import STDLIB, Corpus, Document, open_corpus
from megascale_jax.data.tokenizer import BYTES, Tokenizer, check_bpe_size, load_tokenizer, train_bpe
from megascale_jax.errors import DataError

_PIECE_TOKENS = 1 << 20
_DOCUMENTS_AT_ONCE = 256
_TOKENS_FILE = "tokens.bin"
_DIGEST_VERSION = 1
"""Of what goes into the digest, not of the layout: equal data prepared again goes on with the checkpoints that it had before."""


@dataclass
class _TokenFile:
    """All documents' tokens, one after the other, in a temporary file."""

    path: Path
    dtype: np.dtype
    lengths: array = field(default_factory=lambda: array("q"))
    hashes: array = field(default_factory=lambda: array("Q"))
    has_cut_end: bool = False

    def stream(self, chosen: np.ndarray) -> Iterator[np.ndarray]:
        """The tokens of the documents in ``chosen`` (bool [documents]), in pieces of exactly ``_PIECE_TOKENS`` but the last."""
        tokens = np.memmap(self.path, self.dtype, mode="r")
        ends = np.cumsum(np.asarray(self.lengths, np.int64))
        edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
        waiting, size = [], 0
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            start, stop = int(ends[first]) - self.lengths[first], int(ends[last - 1])
            while start < stop:
                taken = min(stop - start, _PIECE_TOKENS - size)
                waiting.append(tokens[start : start + taken])
                start, size = start + taken, size + taken
                if size == _PIECE_TOKENS:
                    yield np.concatenate(waiting)
                    waiting, size = [], 0
        if waiting:
            yield np.concatenate(waiting)


def prepare(
    source: str,
    output: Folder,
    *,
    sequence_length: int,
    tokenizer: str = BYTES,
    train_bpe_vocab: int | None = None,
    held_out_fraction: float = 0.05,
    text_field: str = "text",
    seed: int = 0,
    force: bool = False,
    progress: bool = False,
) -> Manifest:
    """Make the prepared folder ``output`` and return its manifest; a document must fit in memory, the corpus need not.

    Args:
        output: a folder, or ``s3://BUCKET/PATH``, ``gs://BUCKET/PATH``.
        source: a text, JSONL or Parquet file, a folder of these, or ``stdlib``.
        sequence_length: tokens of a training row (S); records have S + 1.
        tokenizer: ``bytes`` or a Hugging Face ``tokenizers`` JSON file.
        train_bpe_vocab: train a byte-level BPE of so many ids on the train documents instead.
        held_out_fraction: share of documents held out, in (0, 1).
        text_field: JSONL field or Parquet column.
        seed: choice of the held-out documents.
        force: replace an existing prepared folder that was made from another request.
        progress: show progress bars on the terminal.

    Raises ``DataError``, with nothing written to ``output``, when the request, the corpus or the output is unusable.
    """
    _check_request(sequence_length, tokenizer, train_bpe_vocab, held_out_fraction, seed)
    loaded = None if train_bpe_vocab else load_tokenizer(tokenizer)
    corpus = open_corpus(source, text_field)
    request = Request(
        source=source,
        fingerprint=corpus.fingerprint,
        text_field=text_field,
        tokenizer_digest=None if loaded is None else loaded.digest,
        train_bpe_vocab=train_bpe_vocab,
        sequence_length=sequence_length,
        held_out_fraction=held_out_fraction,
        seed=seed,
    )
    place = open_output(output)
    if source != STDLIB and not is_remote(output) and _full(output).is_relative_to(_full(source)):
        raise DataError(f"The output {output} lies in the corpus {source}, and would be read as text next time. Give a folder outside.")
    finished = place.existing(request, force)
    if finished is not None:
        return finished
    try:
        with place.staging() as staging:
            return place.publish(staging, _fill(staging, corpus, request, loaded, progress), force)
    except OSError as error:
        raise DataError(f"{output} cannot be written: {error}. Free space there, or give another folder.") from error


def _full(folder: Folder) -> Path:
    return Path(folder).expanduser().resolve()


def _check_request(sequence_length: int, tokenizer: str, train_bpe_vocab: int | None, held_out_fraction: float, seed: int) -> None:
    if sequence_length < 1:
        raise DataError(f"A sequence length of {sequence_length} is impossible: give at least 1 token.")
    if not 0 < held_out_fraction < 1:
        raise DataError(f"A held-out fraction of {held_out_fraction} leaves a split empty: give a number between 0 and 1, like 0.05.")
    if seed < 0:
        raise DataError(f"The seed {seed} is negative: give 0 or more.")
    if train_bpe_vocab is not None:
        check_bpe_size(train_bpe_vocab)
        if tokenizer != BYTES:
            raise DataError(f"Either use the tokenizer {tokenizer!r} or train a BPE of {train_bpe_vocab} ids, not both.")


def _fill(staging: Path, corpus: Corpus, request: Request, tokenizer: Tokenizer | None, progress: bool) -> Manifest:
    """Write the rows, the tokenizer and the manifest into ``staging``."""
    if tokenizer is None:
        assert request.train_bpe_vocab is not None
        tokenizer = train_bpe(_train_texts(corpus, request, progress), request.train_bpe_vocab)
    stored = _tokenize(staging / _TOKENS_FILE, corpus, request, tokenizer, progress)
    hashes, lengths = np.asarray(stored.hashes, np.uint64), np.asarray(stored.lengths, np.int64)
    held_out = np.array([split.is_below(hashed, request.held_out_fraction) for hashed in stored.hashes])
    if stored.has_cut_end:
        held_out = np.array([False, True])
    held_out = split.fill_both_splits(held_out, hashes, lengths, request.sequence_length)

    digest = hashlib.sha256(f"{_DIGEST_VERSION} {request.sequence_length} {stored.dtype.str} {tokenizer.digest}".encode())
    rows_per_file = rows.RowLayout.default_rows_per_file(request.sequence_length, stored.dtype)
    written = staging / "rows"
    written.mkdir()
    counts: dict[Split, SplitCounts] = {}
    pairs: dict[Split, baseline.PairCounts] = {}
    with ByteProgress("writing rows", stored.path.stat().st_size, progress) as bar:
        for name in SPLITS:
            chosen = held_out if name == "held_out" else ~held_out
            digest.update(name.encode())
            num_tokens = int(lengths[chosen].sum())
            layout = rows.RowLayout(num_tokens, request.sequence_length, stored.dtype, rows_per_file)
            writer = rows.RowWriter(written, name, layout, digest)
            max_tokens = baseline.MAX_TRAIN_TOKENS if name == "train" else num_tokens
            pairs[name] = _write_stream(writer, stored.stream(chosen), num_tokens, max_tokens, tokenizer, bar)
            counts[name] = SplitCounts(rows=writer.num_rows, tokens=num_tokens, documents=int(chosen.sum()))
    stored.path.unlink()
    place = rows_folder(digest.hexdigest())
    saved = tokenizer.save(written)
    written.rename(staging / place)
    scores = baseline.cross_entropies(pairs["train"], pairs["held_out"])
    manifest = Manifest(
        version=MANIFEST_VERSION,
        request=request,
        tokenizer=saved if saved == BYTES else f"{place}/{saved}",
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        sequence_length=request.sequence_length,
        dtype="uint16" if stored.dtype.itemsize == 2 else "uint32",
        rows_per_file=rows_per_file,
        train=counts["train"],
        held_out=counts["held_out"],
        skipped=dict(corpus.skipped),
        unigram_nats=scores.unigram_nats,
        bigram_nats=scores.bigram_nats,
        bigram_alpha=scores.bigram_alpha,
        baseline_train_tokens=pairs["train"].num_tokens,
        digest=digest.hexdigest(),
    )
    write_manifest(staging, manifest)
    return manifest


def _write_stream(
    writer: rows.RowWriter, pieces: Iterator[np.ndarray], num_tokens: int, max_counted: int, tokenizer: Tokenizer, bar: ByteProgress
) -> baseline.PairCounts:
    """Write all pieces of a stream as rows, and count the pairs of about ``max_counted`` tokens of it, evenly spread."""
    counts = baseline.PairCounts(tokenizer.vocab_size, tokenizer.end_of_document)
    num_pieces, max_pieces = -(-num_tokens // _PIECE_TOKENS), -(-max_counted // _PIECE_TOKENS)
    for index, piece in enumerate(pieces):
        writer.add(piece)
        if baseline.is_counted(index, num_pieces, max_pieces):
            counts.add(piece)
        else:
            counts.skip()
        bar.advance(piece.nbytes)
    writer.close()
    return counts


def _documents(corpus: Corpus, request: Request) -> Iterator[tuple[Document, bool]]:
    return split.cut_single_document(corpus.documents(), request.held_out_fraction, request.sequence_length)


def _train_texts(corpus: Corpus, request: Request, progress: bool) -> Iterator[str]:
    """Texts of the documents that the hash puts into the train split, for a tokenizer that has not seen the rest."""
    with ByteProgress("training BPE", corpus.total_bytes, progress) as bar:
        for document, is_cut_end in _documents(corpus, request):
            bar.set(corpus.read_bytes)
            if not is_cut_end and not split.is_below(split.document_hash(document.text, request.seed), request.held_out_fraction):
                yield document.text


def _tokenize(path: Path, corpus: Corpus, request: Request, tokenizer: Tokenizer, progress: bool) -> _TokenFile:
    """Write the tokens of all documents, each ended by ``end_of_document``; those without a token are counted as skipped."""
    stored = _TokenFile(path, rows.token_dtype(tokenizer.vocab_size))
    end = np.array([tokenizer.end_of_document], stored.dtype)
    without_tokens = 0
    with path.open("wb") as file, ByteProgress("tokenizing", corpus.total_bytes, progress) as bar:
        for group in batched(_documents(corpus, request), _DOCUMENTS_AT_ONCE):
            encoded = tokenizer.encode_many([document.text for document, _ in group])
            for (document, is_cut_end), ids in zip(group, encoded, strict=True):
                if not len(ids):
                    without_tokens += 1
                    continue
                file.write(ids.astype(stored.dtype).tobytes())
                file.write(end.tobytes())
                stored.lengths.append(len(ids) + 1)
                stored.hashes.append(split.document_hash(document.text, request.seed))
                stored.has_cut_end |= is_cut_end
            bar.set(corpus.read_bytes)
    if without_tokens:
        corpus.skipped["without a token"] += without_tokens
    if not stored.lengths:
        raise DataError(f"{corpus.source}: the tokenizer turned every document into no token. Use another tokenizer.")
    return stored

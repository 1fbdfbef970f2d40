"""A prepared folder as it is used: its manifest, its tokenizer, its rows.

Opening one checks that it is complete and fits the model; the rows themselves are checked as they are read.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascale_jax.data.manifest import Manifest, Split, read_manifest, record_file
from megascale_jax.data.rows import RowSource
from megascale_jax.data.tokenizer import Tokenizer, load_tokenizer
from megascale_jax.errors import DataError


@dataclass(frozen=True)
class Prepared:
    """A complete prepared folder."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer


def open_prepared(folder: Path, *, sequence_length: int | None = None, vocab_size: int | None = None) -> Prepared:
    """Open a prepared folder, for a model of this sequence length and vocabulary if they are given.

    Raises ``DataError`` when the folder is missing, incomplete, of another version, damaged, or does not fit the model.
    """
    manifest = read_manifest(folder)
    if sequence_length is not None and manifest.sequence_length != sequence_length:
        raise DataError(
            f"{folder} has rows of {manifest.sequence_length} tokens, the model expects {sequence_length}. "
            f"Set model.sequence_length={manifest.sequence_length}, or prepare the data with --sequence-length {sequence_length}."
        )
    if vocab_size is not None and manifest.vocab_size > vocab_size:
        raise DataError(
            f"{folder} has {manifest.vocab_size} token ids, the model knows {vocab_size}. Set model.vocab_size={manifest.vocab_size}."
        )
    tokenizer = load_tokenizer(manifest.tokenizer, folder)
    if tokenizer.digest != manifest.tokenizer_digest:
        raise DataError(f"The tokenizer in {folder} is not the one its rows were made with. Prepare the data again with --force.")
    return Prepared(folder, manifest, tokenizer)


def stored_rows(folder: Path, manifest: Manifest, split: Split) -> RowSource:
    """Random access to the stored rows of a split. Raises ``DataError`` when its file is missing or damaged."""
    return RowSource(record_file(folder, split), manifest.split(split).rows, np.dtype(manifest.dtype))

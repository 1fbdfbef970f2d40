"""A prepared folder as it is used, on a disk or in an object store: its manifest, its tokenizer, its rows.

Opening one checks that it is complete and fits the model; the rows themselves are checked as they are read.
"""

from dataclasses import dataclass

import numpy as np

from megascale_jax.data.files import Folder, missing, open_files
from megascale_jax.data.manifest import Manifest, Split, read_manifest
from megascale_jax.data.rows import RowLayout, RowSource
from megascale_jax.data.tokenizer import BYTES, Tokenizer, load_tokenizer, tokenizer_from_json
from megascale_jax.errors import DataError


@dataclass(frozen=True)
class Prepared:
    """A complete prepared folder."""

    folder: Folder
    manifest: Manifest
    tokenizer: Tokenizer


def open_prepared(folder: Folder, *, sequence_length: int | None = None, vocab_size: int | None = None) -> Prepared:
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
    tokenizer = _tokenizer(folder, manifest)
    if tokenizer.digest != manifest.tokenizer_digest:
        raise DataError(f"The tokenizer in {folder} is not the one its rows were made with. Prepare the data again with --force.")
    return Prepared(folder, manifest, tokenizer)


def stored_rows(folder: Folder, manifest: Manifest, split: Split) -> RowSource:
    """Random access to the stored rows of a split. Raises ``DataError`` when one of its files is missing or damaged."""
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    layout = RowLayout(manifest.split(split).tokens, manifest.sequence_length, dtype, manifest.rows_per_file)
    if layout.num_rows != manifest.split(split).rows:
        rows = manifest.split(split).rows
        raise DataError(f"The manifest of {folder} says {rows} rows, its tokens give {layout.num_rows}: it is damaged.")
    return RowSource(open_files(folder), manifest.rows_folder, split, layout)


def _tokenizer(folder: Folder, manifest: Manifest) -> Tokenizer:
    if manifest.tokenizer == BYTES:
        return load_tokenizer(BYTES)
    files = open_files(folder)
    content = files.read(manifest.tokenizer)
    if content is None:
        raise missing(files.address(manifest.tokenizer))
    return tokenizer_from_json(content, files.address(manifest.tokenizer))

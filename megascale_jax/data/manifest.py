"""What a prepared folder holds, as ``manifest.json``: the last file written, so a folder that has one is complete.

The manifest answers three questions: was this folder made from the request at hand (``request``), does it fit the model
(``sequence_length``, ``vocab_size``), and is it the very data a checkpoint was trained on (``digest``). A folder without
it, or with one of another version, is a ``DataError``; nothing is ever guessed from the other files.
"""

import json
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megascale_jax.comm.address import is_remote
from megascale_jax.data.files import Folder, open_files
from megascale_jax.errors import DataError

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 2

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Request(_Record):
    """Everything that was asked for, and the state of the corpus at that time: equal requests give equal folders."""

    source: str = Field(description="corpus as given")
    fingerprint: str = Field(description="names, sizes and modification times of its files, hashed")
    text_field: str = Field(description="JSONL field or Parquet column with the text")
    tokenizer_digest: str | None = Field(description="tokenizer asked for; null: a BPE trained on the corpus")
    train_bpe_vocab: int | None = Field(description="ids of that BPE; null: none was trained")
    sequence_length: int = Field(description="tokens of a training row")
    held_out_fraction: float = Field(description="share of documents held out")
    seed: int = Field(description="choice of the held-out documents")


class SplitCounts(_Record):
    """Size of one split."""

    rows: int = Field(description="rows, the last of which may be short")
    tokens: int = Field(description="tokens of the stream, one end-of-document per document included")
    documents: int = Field(description="documents")


class Manifest(_Record):
    """A complete prepared folder."""

    version: int = Field(description="layout of the folder")
    request: Request = Field(description="what was asked for")
    tokenizer: str = Field(description="`bytes`, or the tokenizer's file in the folder")
    tokenizer_digest: str = Field(description="tokenizer that made the rows")
    vocab_size: int = Field(description="token ids, end of document included")
    end_of_document: int = Field(description="id that ends each document")
    sequence_length: int = Field(description="tokens of a training row (S); a stored row has S + 1")
    dtype: Literal["uint16", "uint32"] = Field(description="little-endian type of a stored token")
    rows_per_file: int = Field(ge=1, description="rows of each file of a split but the last")
    train: SplitCounts = Field(description="size of the train split")
    held_out: SplitCounts = Field(description="size of the held-out split")
    skipped: dict[str, int] = Field(description="reason -> files or records left out")
    unigram_nats: float = Field(description="held-out cross-entropy of a unigram model of the train split, nats per token")
    bigram_nats: float = Field(description="held-out cross-entropy of a bigram model of the train split, nats per token")
    bigram_alpha: float = Field(description="weight of the bigram model's prior, the best of a grid on the held-out split itself")
    baseline_train_tokens: int = Field(description="train tokens that the two models were counted on")
    digest: str = Field(description="hash of the rows of both splits and of what gives them meaning")

    def split(self, split: Split) -> SplitCounts:
        """Counts of one split."""
        return self.train if split == "train" else self.held_out

    @property
    def rows_folder(self) -> str:
        """Name of the folder of the rows; other rows have another name, so they are never taken for those of a former manifest."""
        return rows_folder(self.digest)


def rows_folder(digest: str) -> str:
    """Name of the folder of the rows in a prepared folder, by the manifest's ``digest``."""
    return f"rows-{digest[:12]}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` and flush it to the disk."""
    with (folder / MANIFEST_FILE).open("w", encoding="utf-8") as file:
        json.dump(manifest.model_dump(), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a complete prepared folder.

    Raises ``DataError`` when the folder or the manifest is missing, or was written by another version.
    """
    remedy = "Make one with `megascale data prepare SOURCE -o DIR --sequence-length N`."
    files = open_files(folder)
    file = files.address(MANIFEST_FILE)
    content = files.read(MANIFEST_FILE)
    if content is None:
        if not files.exists():
            raise DataError(f"No prepared data at {folder}. {remedy}")
        other = ", or there is no such bucket" if is_remote(folder) else ""
        raise DataError(f"{folder} has no {MANIFEST_FILE}: it is no prepared data, or an unfinished one{other}. {remedy}")
    try:
        values = json.loads(content)
    except ValueError as error:
        raise DataError(f"{file} cannot be read ({error}). Prepare the data again with --force.") from error
    version = values.get("version") if isinstance(values, dict) else None
    if version != MANIFEST_VERSION:
        raise DataError(
            f"{folder} has layout version {version}, this program reads {MANIFEST_VERSION}. Prepare the data again with --force; "
            "checkpoints of equal data go on with it."
        )
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{file} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}. Prepare the data again.") from error

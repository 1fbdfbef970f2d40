"""``megascale data``: make training rows from a corpus, and look at them.

Errors in the request are ``DataError``s, for the caller to show.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megascale_jax.observe.report import check_json_path, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from megascale_jax.data.inspection import Inspection
    from megascale_jax.data.manifest import Manifest

app = typer.Typer(help="Prepare training data, and look at it.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Prepare training data, and look at it."""


@app.command()
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Corpus: a text file, a JSONL or Parquet file, a folder of these, or `stdlib` (Python's own library, no download).",
        ),
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="Folder to make, or s3://BUCKET/PATH, gs://BUCKET/PATH.")],
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", metavar="N", help="Tokens of a training row; equal to model.sequence_length.")
    ] = 2048,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="bytes|FILE", help="`bytes`, or a Hugging Face tokenizers JSON file.")
    ] = "bytes",
    train_bpe: Annotated[
        int | None,
        typer.Option("--train-bpe", metavar="VOCAB", help="Train a byte-level BPE of so many ids on the training documents, and use it."),
    ] = None,
    held_out: Annotated[float, typer.Option("--held-out", metavar="FRACTION", help="Share of the documents that are held out.")] = 0.05,
    text_field: Annotated[str, typer.Option("--text-field", metavar="NAME", help="JSONL field or Parquet column with the text.")] = "text",
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Choice of the held-out documents.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace prepared data in DIR that was made from another request.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the result as JSON.")] = None,
) -> None:
    """Turn SOURCE into fixed-length rows of tokens, split by document into train and held-out.

    Prints the size of both splits, and the unigram and bigram cross-entropy of the held-out one: what a model trained on
    this data has to beat. Running it again with the same request changes nothing. Point a run at the result with
    `train.data.prepared=DIR`.
    """
    check_json_path(json_path)
    from megascale_jax.data import prepare as preparing  # NumPy, rich and more: not for `--help`

    manifest = preparing.prepare(
        source,
        output,
        sequence_length=sequence_length,
        tokenizer=tokenizer,
        train_bpe_vocab=train_bpe,
        held_out_fraction=held_out,
        text_field=text_field,
        seed=seed,
        force=force,
        progress=True,
    )
    if json_path is not None:
        write_json(json_path, manifest)
    _print(output, manifest)


def _print(output: str, manifest: "Manifest") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"Prepared data in {output}", title_justify="left")
    table.add_column("split")
    for name in ("documents", "tokens", "rows"):
        table.add_column(name, justify="right")
    for label, counts in (("train", manifest.train), ("held-out", manifest.held_out)):
        table.add_row(label, f"{counts.documents:,}", f"{counts.tokens:,}", f"{counts.rows:,}")
    console.print(table)
    kind = "bytes" if manifest.tokenizer == "bytes" else "in the folder"
    console.print(f"Tokenizer {kind}: {manifest.vocab_size:,} ids; rows of {manifest.sequence_length:,} tokens.")
    console.print(f"To beat on the held-out split: unigram {manifest.unigram_nats:.4f}, bigram {manifest.bigram_nats:.4f} nats per token.")
    if manifest.skipped:
        console.print("Skipped: " + ", ".join(f"{count:,} {reason}" for reason, count in sorted(manifest.skipped.items())) + ".")
    console.print(f"Use it: train.data.prepared={output} model.vocab_size={manifest.vocab_size}", soft_wrap=True)


@app.command()
def inspect(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Prepared data: a folder, or s3://BUCKET/PATH, gs://BUCKET/PATH.")],
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=0, help="Rows to show as text.")] = 3,
    split: Annotated[Literal["train", "held-out"], typer.Option("--split", help="Which split.")] = "train",
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the result as JSON.")] = None,
) -> None:
    """Show what a model is trained on: rows as text with the borders of documents, fill rate, duplicates, token frequencies."""
    check_json_path(json_path)
    from rich.console import Console

    from megascale_jax.data.inspection import inspect as look_at
    from megascale_jax.data.prepared import open_prepared

    found = look_at(open_prepared(folder), "train" if split == "train" else "held_out", rows)
    if json_path is not None:
        write_json(json_path, found)
    console = Console()
    _print_rows(console, found)
    _print_counts(console, folder, split, found)


def _print_rows(console: "Console", found: "Inspection") -> None:
    from rich.rule import Rule
    from rich.text import Text

    for row in found.shown:
        console.print(Text(f"row {row.index}: {row.tokens:,} tokens, documents or parts of them: {len(row.segments)}", style="bold"))
        for number, segment in enumerate(row.segments):
            if number:
                console.print(Rule("end of document", characters="-", style="cyan"))
            console.print(Text(_printable(segment.text)))
        if row.segments and row.segments[-1].ends:
            console.print(Rule("end of document, and of the row", characters="-", style="cyan"))
        console.print()


def _print_counts(console: "Console", folder: str, split: str, found: "Inspection") -> None:
    from rich.table import Table
    from rich.text import Text

    part = "" if found.rows_read == found.rows else f", of which {found.rows_read:,} are counted"
    console.print(
        f"{folder}, {split}: {found.rows:,} rows{part}; {found.tokens:,} tokens, {found.documents:,} documents end", soft_wrap=True
    )
    console.print(f"fill rate {found.fill_rate:.2%}, positions with a loss {found.loss_rate:.2%}")
    console.print(f"duplicates: {found.duplicate_rows:,} rows, {found.duplicate_documents:,} documents")
    table = Table(title=f"Most frequent of {found.ids_seen:,} ids seen ({found.vocab_size:,} in all)", title_justify="left")
    for name in ("id", "token", "count", "share", ""):
        table.add_column(name, justify="left" if name in ("token", "") else "right")
    most = found.top_tokens[0].count if found.top_tokens else 1
    for token in found.top_tokens:
        share = token.count / found.tokens
        table.add_row(str(token.id), Text(repr(token.text)), f"{token.count:,}", f"{share:.2%}", _bar(token.count / most))
    console.print(table)
    bands = Table(title="Ids by how often they occur", title_justify="left")
    for name in ("times", "ids", ""):
        bands.add_column(name, justify="left" if not name else "right")
    largest = max(band.ids for band in found.bands)
    for band in found.bands:
        times = "never" if band.most == 0 else f"{band.least:,} to {band.most:,}"
        bands.add_row(times, f"{band.ids:,}", _bar(band.ids / max(largest, 1)))
    console.print(bands)


def _bar(share: float, width: int = 24) -> str:
    return "█" * round(share * width)


def _printable(text: str) -> str:
    """Text without control characters, which a terminal would obey."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)

"""``megascale data``: make training rows from a corpus. Errors in the request are ``DataError``s, for the caller to show."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megascale_jax.observe.report import check_json_path, write_json

if TYPE_CHECKING:
    from megascale_jax.data.manifest import Manifest

app = typer.Typer(help="Prepare training data.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Prepare training data."""


@app.command()
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Corpus: a text file, a JSONL or Parquet file, a folder of these, or `stdlib` (Python's own library, no download).",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to make.")],
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


def _print(output: Path, manifest: "Manifest") -> None:
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

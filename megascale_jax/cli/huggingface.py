"""`megascale checkpoint export` and `import`: a run as a Hugging Face model, and such a model as a run. Neither needs a device."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megascale_jax.cli.checkpoint import StepOption, Where, show_progress, size_text, step_of, storage_of
from megascale_jax.config.checks import check
from megascale_jax.config.load import load_experiment, with_overrides
from megascale_jax.config.schema import Experiment, ModelConfig
from megascale_jax.errors import CheckpointError, UsageError

_GIB = 1 << 30
_FREE = ("sequence_length", "dropout", "initializer_std")
"""Fields of an imported model that decide how it is trained, not which function it is."""


def export_model(
    place: Where,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="folder for the model, new or empty", show_default=False)],
    architecture: Annotated[
        str | None, typer.Option(help="cohere2, gptj, phi, llama or gpt2; default the one that fits", show_default=False)
    ] = None,
    step: StepOption = None,
    dtype: Annotated[str, typer.Option(help="float32 as trained, or bfloat16, rounded")] = "float32",
    shard_gib: Annotated[float, typer.Option(help="largest weight file, GiB; with more, several and an index")] = 5.0,
) -> None:
    """Write a checkpoint as safetensors that `transformers` loads, with its config and tokenizer."""
    from megascale_jax.checkpoint.huggingface.files import DTYPES
    from megascale_jax.checkpoint.huggingface.settings import choose
    from megascale_jax.checkpoint.huggingface.transfer import export_model as export
    from megascale_jax.checkpoint.manifest import read_manifest
    from megascale_jax.data.foreign_tokenizer import run_tokenizer, write_tokenizer

    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    if not shard_gib > 0:
        raise UsageError(f"--shard-gib {shard_gib}; expected a size above 0")
    storage = storage_of(place)
    chosen = step_of(storage, step)
    description = read_manifest(storage, chosen).description
    if not isinstance(description.get("experiment"), str):
        raise CheckpointError(
            f"step {chosen} of {storage.url} does not say which experiment it is of; it was not written by `megascale train`"
        )
    model = Experiment.model_validate_json(description["experiment"]).model
    kind = choose(model, architecture)
    tokenizer = run_tokenizer(description.get("tokenizer"), storage.folder.parent if storage.folder else None)
    end = tokenizer.end_of_document if tokenizer is not None and tokenizer.end_of_document < model.vocab_size else None
    with _complete_or_absent(output) as folder, show_progress("exporting") as progress:
        files = export(
            storage, chosen, model, kind, folder, dtype=dtype, limit_bytes=int(shard_gib * _GIB), end_token=end, progress=progress
        )
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder, model.sequence_length)
    console = Console(soft_wrap=True)
    total = sum((output / file).stat().st_size for file in files)
    console.print(f"step {chosen} of {storage.url} as {kind.class_name} in {output}: {len(files)} file(s), {size_text(total)}, {dtype}")
    if tokenizer is None:
        console.print("no tokenizer was written: the run's own is not beside its checkpoints")
    elif not (output / "tokenizer.json").is_file():
        console.print("no tokenizer was written: token ids are bytes, and 256 ends a document")


def import_model(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="folder of a model that transformers saved", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="RUN", help="run folder, new or empty", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="changes, such as train.data.source=corpus.txt or parallel.tensor=2", show_default=False)
    ] = None,
    experiment: Annotated[str, typer.Option(help="experiment that names data, optimizer, layout and machine")] = "quickstart",
) -> None:
    """Make a run at step 0 of a Hugging Face model; `megascale sample` and `megascale train` go on from it."""
    from megascale_jax.checkpoint.huggingface.files import TensorFolder, read_config
    from megascale_jax.checkpoint.huggingface.settings import from_settings
    from megascale_jax.checkpoint.huggingface.transfer import check_tensors
    from megascale_jax.checkpoint.huggingface.transfer import import_model as take
    from megascale_jax.data.foreign_tokenizer import take_tokenizer
    from megascale_jax.data.pipeline import UNTOUCHED
    from megascale_jax.data.tokenizer import BYTES, load_tokenizer
    from megascale_jax.observe.provenance import library_versions, source_commit
    from megascale_jax.train.folder import RunFolder

    foreign = from_settings(read_config(source))
    resolved = _experiment(experiment, foreign.model, overrides or [], output)
    with _complete_or_absent(output) as folder, TensorFolder(source) as files, show_progress("importing") as progress:
        check_tensors(foreign, files)
        name = take_tokenizer(source, folder, foreign.end_token)
        tokenizer = load_tokenizer(name or BYTES, folder)
        if name is None and tokenizer.vocab_size > resolved.model.vocab_size:
            raise UsageError(
                f"{source} has no tokenizer.json, and its model's {resolved.model.vocab_size} token ids are too few for bytes; "
                "put the model's tokenizer.json there"
            )
        if name is not None:
            data = resolved.train.data.model_copy(update={"tokenizer": str(output.absolute() / name)})
            resolved = resolved.model_copy(update={"train": resolved.train.model_copy(update={"data": data})})
        description = {
            "experiment": resolved.model_dump_json(),
            "data": UNTOUCHED,
            "tokenizer": name or BYTES,
            "commit": source_commit(),
            "versions": library_versions(),
        }
        run = RunFolder(folder)
        manifest = take(foreign, files, run.storage(resolved), resolved, description, progress)
        run.begin(resolved)
    console = Console(soft_wrap=True)
    console.print(f"{foreign.architecture.class_name} of {source} is step 0 of {output}: {size_text(manifest.num_bytes)} with moments")
    if tokenizer.vocab_size > resolved.model.vocab_size:
        console.print(
            f"its tokenizer and an end of document have {tokenizer.vocab_size} ids, the model knows {resolved.model.vocab_size}: "
            "it can be sampled, not trained"
        )
    console.print(f"Next:\n  megascale sample {output} --prompt 'Hello'\n  megascale train {output}/config.yaml --run-folder {output}")


def _experiment(name: str, model: ModelConfig, overrides: list[str], output: Path) -> Experiment:
    """The named experiment with the imported model. Raises UsageError for an override that would make it another model."""
    own = [item for item in overrides if item.startswith(("model.", "model="))]
    free = [f"model.{field}=" for field in _FREE if field != "sequence_length" or model.position != "learned"]
    if wrong := [item for item in own if not item.startswith(tuple(free))]:
        raise UsageError(f"{wrong[0]}: the model is what is imported; of it only {', '.join(free)[:-1]} may change here")
    named = load_experiment(name, [item for item in overrides if item not in own], checked=False)
    resolved = named.model_copy(update={"name": output.absolute().name, "model": model})
    if own:
        return with_overrides(resolved, own)
    check(resolved)
    return resolved


@contextmanager
def _complete_or_absent(output: Path) -> Iterator[Path]:
    """A hidden folder beside ``output`` that takes its place at the end, and is removed after an error."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} exists and is not an empty folder; name another one")
    hidden = None
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(prefix=f".{output.absolute().name}.", dir=output.absolute().parent))
        yield hidden
        mask = _umask()
        hidden.chmod(0o777 & ~mask)
        for file in hidden.glob("*.safetensors"):
            file.chmod(0o666 & ~mask)  # the library writes them for their owner alone
        hidden.replace(output)
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error}; make room, or name another folder") from error
    finally:
        if hidden is not None:
            shutil.rmtree(hidden, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

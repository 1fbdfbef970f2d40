"""`megascale checkpoint`: what is saved of a run, whether it is whole, how two differ. Exit code 1: something is damaged, or differs."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megascale_jax.config.difference import differences
from megascale_jax.config.load import with_overrides
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import CheckpointError, UsageError
from megascale_jax.observe.progress import format_duration
from megascale_jax.observe.report import check_json_path, write_json

if TYPE_CHECKING:
    from megascale_jax.comm.storage import Storage

app = typer.Typer(help="List, verify, compare and reshard the checkpoints of a run.", no_args_is_help=True)

Where = Annotated[
    str, typer.Argument(metavar="PLACE", help="run folder, folder of checkpoints, or gs:// or s3:// address", show_default=False)
]
StepOption = Annotated[int | None, typer.Option("--step", help="step; default the newest", show_default=False)]
JsonOption = Annotated[Path | None, typer.Option("--json", help="also write the result to this file", show_default=False)]


def storage_of(place: str) -> "Storage":
    """The storage that a place means. Raises UsageError when there is nothing."""
    from megascale_jax.comm.address import is_remote
    from megascale_jax.comm.storage import Storage
    from megascale_jax.train.folder import CONFIG_FILE, RunFolder

    if is_remote(place):
        return Storage(place)
    folder = Path(place)
    if (folder / CONFIG_FILE).is_file():
        return RunFolder(folder).storage()
    if not folder.is_dir():
        raise UsageError(f"{place} is no folder; expected a run folder such as runs/quickstart, or the folder of its checkpoints")
    inside = folder / "checkpoints"
    return Storage(inside if inside.is_dir() else folder)


def step_of(storage: "Storage", step: int | None) -> int:
    """The step, or the newest published one. Raises CheckpointError when there is none."""
    from megascale_jax.checkpoint.manifest import published_steps

    steps = published_steps(storage)
    if step is None and not steps:
        raise CheckpointError(f"{storage.url} has no complete checkpoint")
    return steps[-1] if step is None else step


@app.command("ls")
def list_them(place: Where, json: JsonOption = None) -> None:
    """List the checkpoints of a run, the damaged and the incomplete ones too."""
    check_json_path(json)
    from megascale_jax.checkpoint.inspect import list_checkpoints, summary_of

    storage = storage_of(place)
    listed = list_checkpoints(storage)
    table = Table(title=f"checkpoints in {storage.url}", title_justify="left")
    for name in ("step", "state", "age", "size", "ranks", "samples", "commit"):
        table.add_column(name, justify="right" if name in ("step", "age", "size", "ranks", "samples") else "left")
    for one in listed:
        style = {"good": "", "damaged": "red", "incomplete": "yellow"}[one.state]
        if one.manifest is None:
            table.add_row(str(one.step), one.state, "", "", "", "", one.problem, style=style)
            continue
        facts = summary_of(one.manifest)
        age = format_duration(max(0.0, time.time() - facts["created_unix_s"]))
        samples = "" if facts["samples"] is None else f"{facts['samples']:,}"
        commit = (facts["commit"] or "")[:10]
        table.add_row(str(one.step), one.state, age, size_text(facts["num_bytes"]), str(facts["ranks"]), samples, commit, style=style)
    console = _console()
    console.print(table if listed else f"{storage.url} has no checkpoints")
    if json is not None:
        rows = [{"step": o.step, "state": o.state, "problem": o.problem} | (summary_of(o.manifest) if o.manifest else {}) for o in listed]
        write_json(json, rows)


@app.command()
def verify(
    place: Where,
    step: StepOption = None,
    mark: Annotated[bool, typer.Option("--mark", help="mark a damaged one, so that no run takes it any more")] = False,
    json: JsonOption = None,
) -> None:
    """Read every block of a checkpoint and check it. Exit code 1 when one is damaged or missing."""
    check_json_path(json)
    from megascale_jax.checkpoint import inspect
    from megascale_jax.checkpoint.manifest import mark_damaged

    storage = storage_of(place)
    chosen = step_of(storage, step)
    with show_progress(f"verifying step {chosen}") as progress:
        verdict = inspect.verify(storage, chosen, progress)
    if json is not None:
        write_json(json, asdict(verdict))
    console = Console(soft_wrap=True)
    if not verdict.problems:
        console.print(f"step {chosen} of {storage.url} is whole: {verdict.num_blocks:,} blocks, {size_text(verdict.num_bytes)}")
        return
    for problem in verdict.problems[:10]:
        console.print(f"[red]damaged[/red] {problem}", highlight=False)
    if len(verdict.problems) > 10:
        console.print(f"and {len(verdict.problems) - 10} more")
    if mark:
        mark_damaged(storage, chosen, verdict.problems[0])
        console.print(f"marked: runs pass step {chosen} over from now on")
    raise typer.Exit(1)


@app.command()
def diff(
    first: Where,
    second: Where,
    step: StepOption = None,
    other_step: Annotated[int | None, typer.Option(help="step of the second; default the same as the first's", show_default=False)] = None,
    json: JsonOption = None,
) -> None:
    """Compare two checkpoints bit by bit, whatever meshes they were saved on. Exit code 1 when they differ."""
    check_json_path(json)
    from megascale_jax.checkpoint import inspect
    from megascale_jax.checkpoint.manifest import read_manifest

    storages = storage_of(first), storage_of(second)
    chosen = step_of(storages[0], step)
    other = chosen if other_step is None and first != second else step_of(storages[1], other_step)
    with show_progress("comparing") as progress:
        found = inspect.difference((storages[0], chosen), (storages[1], other), progress)
    texts = [read_manifest(s, n).description.get("experiment") for s, n in zip(storages, (chosen, other), strict=True)]
    experiments = [Experiment.model_validate_json(text) for text in texts if isinstance(text, str)]
    configured = [str(item) for item in differences(*experiments)] if len(experiments) == 2 else []
    console = _console()
    for line in configured:
        console.print(f"configuration  {line}", highlight=False)
    table = Table()
    for name in ("array", "elements that differ", "of", "largest difference", ""):
        table.add_column(name, justify="left" if name in ("array", "") else "right")
    for item in found:
        table.add_row(item.name, f"{item.elements:,}", f"{item.of:,}", f"{item.largest:.3g}", item.note)
    console.print(table if found else f"step {chosen} and step {other} hold the same bits")
    if json is not None:
        write_json(json, {"arrays": [asdict(item) for item in found], "configuration": configured})
    if found:
        raise typer.Exit(1)


@app.command()
def reshard(
    place: Where,
    overrides: Annotated[list[str], typer.Argument(help="the other layout, such as parallel.data=4 parallel.pipe=2", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="folder for the new checkpoint", show_default=False)],
    step: StepOption = None,
) -> None:
    """Cut a checkpoint for another mesh. Any mesh loads any checkpoint; one that fits is read without exchange between ranks."""
    from megascale_jax.checkpoint.cipher import KEY_FILE
    from megascale_jax.checkpoint.grid import StateGrid
    from megascale_jax.checkpoint.manifest import read_manifest
    from megascale_jax.checkpoint.reshard import reshard as cut
    from megascale_jax.comm.storage import Storage
    from megascale_jax.config.layout import Layout
    from megascale_jax.model.parameters import parameter_specs

    if wrong := [item for item in overrides if not item.startswith("parallel.")]:
        raise UsageError(f"{wrong[0]}: only the layout may change here, such as parallel.data=4")
    storage = storage_of(place)
    chosen = step_of(storage, step)
    description = dict(read_manifest(storage, chosen).description)
    if not isinstance(description.get("experiment"), str):
        raise CheckpointError(
            f"step {chosen} of {storage.url} does not say which experiment it is of; it was not written by `megascale train`"
        )
    experiment = with_overrides(Experiment.model_validate_json(description["experiment"]), overrides)
    grid = StateGrid(parameter_specs(experiment.model), Layout.of(experiment.model, experiment.parallel), experiment.model.num_layers)
    os.umask(0o077)
    target = Storage(output, storage.key_file or os.environ.get(KEY_FILE))
    with show_progress("resharding") as progress:
        manifest = cut(storage, chosen, target, grid, description | {"experiment": experiment.model_dump_json()}, progress)
    Console(soft_wrap=True).print(
        f"step {chosen} for {manifest.ranks} device(s) in {output / str(chosen)}: {size_text(manifest.num_bytes)}"
    )


@app.command()
def delete(
    place: Where,
    step: Annotated[int, typer.Option("--step", help="the step that goes", show_default=False)],
    reason: Annotated[str, typer.Option(help="why; goes to deletions.jsonl", show_default=False)],
) -> None:
    """Delete one checkpoint, never the newest complete one; what, when and why is written to `deletions.jsonl`."""
    from megascale_jax.checkpoint.manifest import newest_good, published_steps
    from megascale_jax.checkpoint.retention import Deletion
    from megascale_jax.checkpoint.retention import delete as remove

    storage = storage_of(place)
    newest = newest_good(storage)
    if str(step) not in storage.folders():
        raise CheckpointError(f"{storage.url} has no folder of step {step}; complete ones: {published_steps(storage)}")
    if newest is None or step >= newest.step:
        what = "is not behind a complete one" if newest is None or step > newest.step else "is the newest complete checkpoint"
        raise UsageError(f"step {step} {what} of {storage.url}; it stays")
    remove(storage, Deletion(str(step), reason), by="megascale checkpoint delete")
    Console(soft_wrap=True).print(f"step {step} of {storage.url} is deleted")


def _console() -> Console:
    """For tables: a file has no width, so columns are not cut there."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)
    return console


def size_text(num_bytes: int) -> str:
    """``1.50 MiB``."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


@contextmanager
def show_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing in a file."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

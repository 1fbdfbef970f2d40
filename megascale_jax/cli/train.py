"""`megascale train`: checks first, then data, then devices, then the loop; ends on what a person wants to see."""

import os
import shlex
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megascale_jax.config.load import load_experiment
from megascale_jax.observe.compactor import Compactor
from megascale_jax.observe.events import EVENTS_FOLDER, Events
from megascale_jax.observe.marks import MARKS, Marks
from megascale_jax.observe.output import outlive_full_disks
from megascale_jax.observe.progress import format_duration, format_rate
from megascale_jax.observe.report import check_json_path, write_json
from megascale_jax.observe.summary import RunSummary

if TYPE_CHECKING:
    from megascale_jax.config.schema import Experiment
    from megascale_jax.train.folder import RunFolder
    from megascale_jax.train.loop import Outcome

SAMPLE_TOKENS = 160


_PREDECESSOR_S = 120.0
"""Longest that a process whose peers are gone takes to end."""


def train(
    experiment: Annotated[str, typer.Argument(help="name of an experiment (`megascale config list`) or a YAML file", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="changes, such as train.steps=300 or system=h200", show_default=False)
    ] = None,
    run_folder: Annotated[Path | None, typer.Option(help="where the run lives; default runs/EXPERIMENT", show_default=False)] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="remove an earlier run in that folder and start from step 0")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="also write the summary to this file", show_default=False)] = None,
) -> None:
    """Train an experiment, or go on where its run folder stands.

    A run folder with checkpoints is resumed. Ctrl-C or SIGTERM finishes the step, saves, and prints how to go on.
    """
    outlive_full_disks()
    check_json_path(json)
    resolved = load_experiment(experiment, overrides or [])
    # JAX is imported from here on, after everything that can be refused without it.
    from megascale_jax.comm.cache import cache_folder
    from megascale_jax.comm.init import Processes, check_platform, start
    from megascale_jax.config.layout import MeshShape
    from megascale_jax.data.select import open_training_data
    from megascale_jax.train.folder import RunFolder

    # a driven process may come while one of the attempt before is still there, on a node that nobody could tell to end it
    folder = RunFolder(run_folder or Path("runs") / resolved.name, wait_s=_PREDECESSOR_S if os.environ.get(MARKS) else 0.0)
    processes, console = Processes.from_environment(), Console()
    marks = Marks.from_environment(processes.index, events=_events(resolved, folder, processes.index))
    launcher = os.environ.get("MEGASCALE_LAUNCHER", "megascale train")
    place = ["--run-folder", str(run_folder)] if run_folder else []
    command = f"{launcher} {shlex.join([experiment, *(overrides or []), *place])}"
    if fresh:
        folder.check_clear()
    else:
        folder.check(resolved)
        if processes.index == 0:
            folder.check_place(resolved)
        if summary := folder.finished(resolved):
            marks.resumed(summary.steps, is_durable=True)  # for a driver that was not there to see the end
            if processes.index == 0:
                _show_finished(console, folder, summary, command, json)
            return
    check_platform(resolved.system.platform)
    marks.enter("data")
    data = open_training_data(resolved, cache_folder() / "data", progress=processes.index == 0)
    marks.enter("join")
    start(resolved.system, MeshShape.of(resolved.parallel).size, processes)
    from megascale_jax.train.loop import Trainer
    from megascale_jax.train.stop import StopRequest

    with StopRequest() as stop, closing(marks):
        trainer = Trainer(resolved, folder, data, fresh=fresh, marks=marks)
        if processes.index == 0:
            _show_start(console, resolved, folder, trainer.peak)
        outcome = trainer.run(stop)
    if processes.index == 0:
        _show_outcome(console, resolved, folder, outcome, command, processes.count)
        if json is not None and outcome.summary is not None:
            write_json(json, outcome.summary)


def _events(experiment: "Experiment", folder: "RunFolder", rank: int) -> Events:
    """Those of this process; none is written before the folder is surely the run's. The first rank has all of them compacted."""
    settings = experiment.train.events
    place = folder.path / EVENTS_FOLDER if settings.enabled else None
    if rank:
        return Events(place, rank=rank, begins=False)
    compactor = Compactor(folder.path, settings.keep_mb, settings.keep_days)
    events = Events(place, rank=rank, begins=False, on_segment=compactor.start, on_close=compactor.finish)
    events.each_pulse(compactor.start_in_time)
    return events


def _show_outcome(
    console: Console, experiment: "Experiment", folder: "RunFolder", outcome: "Outcome", command: str, processes: int
) -> None:
    if outcome.summary is not None:
        _show_end(console, experiment, folder, outcome, command, processes)
        return
    saved = "nothing is saved" if outcome.saved is None else f"saved: {folder.storage(experiment).url}/{outcome.saved}"
    lost = "" if outcome.saved == outcome.step else " (later steps are lost: see the errors above)"
    console.print(
        Text(f"Stopped after step {outcome.step} of {experiment.train.steps}; {saved}{lost}\nGo on with: {command}"), soft_wrap=True
    )


def _show_start(console: Console, experiment: "Experiment", folder: "RunFolder", peak: float) -> None:
    from megascale_jax.config.layout import advice_on_depth
    from megascale_jax.model.flops import count_parameters

    parallel, batch = experiment.parallel, experiment.train.global_batch_size
    console.print(
        Text(
            f"{experiment.name}: {format_rate(count_parameters(experiment.model))} parameters, {experiment.model.block} block, "
            f"{experiment.train.optimizer.name}; mesh pipe {parallel.pipe} x data {parallel.data} x tensor {parallel.tensor}; "
            f"{batch} rows x {experiment.model.sequence_length} tokens a step in {experiment.num_micro_batches} micro-batch(es)\n"
            f"run folder {folder.path}; MFU against {format_rate(peak)}FLOP/s"
        ),
        soft_wrap=True,
    )
    if advice := advice_on_depth(experiment.model, parallel):
        console.print(Text(advice, style="yellow"), soft_wrap=True)


def _show_end(console: Console, experiment: "Experiment", folder: "RunFolder", outcome: "Outcome", command: str, processes: int) -> None:
    from megascale_jax.views.loss import plot_loss

    summary = outcome.summary
    assert summary is not None
    try:
        picture = str(plot_loss(folder.path))
    except OSError as error:
        picture = f"could not be written: {error}"
    console.print(_results(summary))
    checkpoint = "none is complete: see the errors above" if outcome.saved is None else f"{folder.storage(experiment).url}/{outcome.saved}"
    console.print(
        Text(f"loss plot   {picture}\ncheckpoint  {checkpoint}\nsummary     {folder.path / 'summary.json'}"),
        soft_wrap=True,
    )
    prompt = experiment.train.sample_prompt
    if prompt and processes == 1 and outcome.saved is not None:
        from megascale_jax.train.sample import sample

        console.print(Text(f"\nThe model continues {prompt!r}:", style="bold"))
        console.print(Text(sample(folder, prompt, num_tokens=SAMPLE_TOKENS)))
    console.print(
        Text(
            f"\nNext:\n  megascale sample {shlex.quote(str(folder.path))} --prompt 'class '\n"
            f"  {command} train.steps={2 * summary.steps}        (goes on from here)\n"
            f"  megascale config list\n"
            f"  megascale --help"
        ),
        soft_wrap=True,
    )


def _results(summary: RunSummary) -> Table:
    table = Table(title=f"after {summary.steps} steps, {format_duration(summary.wall_s)}", title_justify="left")
    table.add_column("held-out text, nats per token")
    table.add_column("", justify="right")
    rows = {"unigram cross-entropy": summary.unigram_nats, "bigram cross-entropy": summary.bigram_nats}
    for name, value in rows.items():
        table.add_row(name, "-" if value is None else f"{value:.4f}")
    loss = summary.validation_loss
    beats = loss is not None and summary.bigram_nats is not None and loss < summary.bigram_nats
    table.add_row(Text("this model", style="bold green" if beats else "bold"), "-" if loss is None else f"{loss:.4f}")
    if summary.tokens_per_s is not None:
        table.caption = f"{format_rate(summary.tokens_per_s)} tokens/s" + ("" if summary.mfu is None else f", MFU {summary.mfu:.1%}")
    return table


def _show_finished(console: Console, folder: "RunFolder", summary: RunSummary, command: str, json: Path | None) -> None:
    console.print(_results(summary))
    console.print(
        Text(
            f"{folder.path} has all its {summary.steps} steps.\n"
            f"Extend it:      {command} train.steps={2 * summary.steps}\nStart it anew:  {command} --fresh"
        ),
        soft_wrap=True,
    )
    if json is not None:
        write_json(json, summary)

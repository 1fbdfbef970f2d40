"""`megascale trace`: one step of a run on all devices, for Perfetto."""

from pathlib import Path
from typing import Annotated

import typer

from megascale_jax.errors import UsageError
from megascale_jax.observe.output import printable
from megascale_jax.observe.report import check_output_path, replace_file


def trace(
    run: Annotated[Path, typer.Argument(help="run folder", show_default=False)],
    step: Annotated[int | None, typer.Option(min=0, help="step; default: the newest one with details", show_default=False)] = None,
    ranks: Annotated[str | None, typer.Option(help="only these ranks, such as 0,8-15", show_default=False)] = None,
    stage: Annotated[str | None, typer.Option(help="only these pipeline stages, such as 0,1", show_default=False)] = None,
    output: Annotated[Path, typer.Option(help="file to write; gzipped if it ends in .gz")] = Path("trace.json.gz"),
) -> None:
    """Write a step as a trace to open in https://ui.perfetto.dev: what each device computed and waited for, messages, the ideal schedule.

    A step without details (train.events.detail_every) is drawn with the sums of its units.
    """
    check_output_path(output, "--output")
    from megascale_jax.views.ranks import parse_numbers
    from megascale_jax.views.step_processes import find_step
    from megascale_jax.views.timeline import read_timeline
    from megascale_jax.views.trace import chosen, trace_bytes

    wanted, stages = parse_numbers(ranks, "--ranks"), parse_numbers(stage, "--stage")
    found = find_step(run, step, wanted)
    if unknown := sorted(set(stages or ()) - set(range(found.mesh[0]))):
        raise UsageError(f"--stage {unknown[0]}: in step {found.step} the run has the stages 0 to {found.mesh[0] - 1}")
    devices, note = (None, "") if wanted and stages is None else chosen(found.mesh, stages)
    read = {rank for rank, fact in found.facts.items() if (wanted is None or rank in wanted) and _has(fact.devices, devices)}
    if not read:
        raise UsageError("none of these ranks has a device of these stages; choose others by --ranks or --stage")
    timeline = read_timeline(run, found.step, read, devices)
    notes = [note] if note else []
    if not timeline.has_details:
        nearest = min(found.detailed, key=lambda other: abs(other - found.step), default=None)
        hint = "no step has them" if nearest is None else f"the nearest step with them is {nearest}"
        notes.append(f"step {found.step} has no details, only the sums of its units, so no phases, arrows or ideal schedule; {hint}")
    replace_file(output, trace_bytes(timeline, notes, compressed=output.suffix == ".gz"))
    for line in (*timeline.notes, *notes):
        typer.echo(f"note: {printable(line)}")
    typer.echo(
        f"step {timeline.step} of attempt {timeline.attempt}, {len(timeline.devices)} devices: {output}; open it in https://ui.perfetto.dev"
    )


def _has(own: tuple[int, ...], devices: list[int] | None) -> bool:
    return devices is None or not set(own).isdisjoint(devices)

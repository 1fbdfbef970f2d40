"""`megascale schedule`: when each stage runs which micro-batch, and what hides under what inside a tick. Needs no device."""

from pathlib import Path
from typing import Annotated

import typer

from megascale_jax.config.layout import Layout, virtual_stages_of
from megascale_jax.config.load import load_experiment
from megascale_jax.config.schema import Experiment
from megascale_jax.observe.report import check_json_path, check_output_path, replace_file, write_json
from megascale_jax.parallel.pipeline.loops import training_loops
from megascale_jax.parallel.pipeline.phases import TickPlan, plan_tick
from megascale_jax.parallel.pipeline.schedule import Schedule, TickKind
from megascale_jax.parallel.pipeline.shape import light_operations, tick_shape
from megascale_jax.views.schedule import schedule_summary, schedule_svg, schedule_text

SHOWN_TICKS = 48
"""Ticks that the terminal shows; a step of a large run has hundreds, much alike."""


def schedule(
    experiment: Annotated[str, typer.Argument(help="name of an experiment, or a YAML file", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="changes, such as parallel.virtual_stages=2", show_default=False)] = None,
    phases: Annotated[bool, typer.Option("--phases", help="also print the phases of each kind of tick: compute | collectives")] = False,
    ticks: Annotated[int, typer.Option(help="ticks to show in the terminal", min=1)] = SHOWN_TICKS,
    svg: Annotated[Path | None, typer.Option(help="also draw the whole schedule into this file", show_default=False)] = None,
    json: Annotated[Path | None, typer.Option("--json", help="also write numbers and phases to this file", show_default=False)] = None,
) -> None:
    """Show the pipeline schedule of an experiment: which micro-batch each stage runs in each tick.

    With `--phases`, the overlap plan: which collective runs beside which kernel.
    """
    check_json_path(json)
    check_output_path(svg, "--svg")
    loaded = load_experiment(experiment, overrides or [])
    plan = schedule_of(loaded)
    typer.echo(f"{loaded.name}: {schedule_summary(plan)}\n\n{schedule_text(plan, max_ticks=ticks)}")
    if ticks < plan.ticks:
        typer.echo(f"\n{ticks} of {plan.ticks} ticks shown; --ticks N for more, --svg PATH for all")
    plans = tick_plans(loaded, plan)
    if phases:
        for name, tick_plan in plans.items():
            typer.echo(f"\n{name}:\n{tick_plan.table()}")
    if svg is not None:
        replace_file(svg, schedule_svg(plan, f"{loaded.name}: interleaved 1F1B").encode())
        typer.echo(f"\nwrote {svg}")
    if json is not None:
        write_json(json, _as_data(plan, plans))


def schedule_of(experiment: Experiment) -> Schedule:
    """The schedule of a checked experiment."""
    parallel = experiment.parallel
    return Schedule(parallel.pipe, virtual_stages_of(experiment.model, parallel), experiment.num_micro_batches, parallel.backward_delay)


def tick_plans(experiment: Experiment, schedule: Schedule) -> dict[str, TickPlan]:
    """The phases of every kind of tick of the step, by a name for readers."""
    layout = Layout.of(experiment.model, experiment.parallel)
    shape = tick_shape(experiment.model, experiment.parallel, layout)
    kinds = dict.fromkeys(run.kind for loop in training_loops(schedule) for run in loop.runs)
    light = light_operations(experiment.model, layout)
    return {_name(kind): plan_tick(kind, shape, layout.mesh.by_axis, light) for kind in kinds}


_WORDS = {
    "embed": "embed",
    "head": "head",
    "embed_backward": "embed backward",
    "weight_gradients": "weight gradients",
    "gather": "weights arriving",
    "scatter": "gradients leaving",
}


def _name(kind: TickKind) -> str:
    slots = "end" if kind.finishes else {"warmup": "warm-up", "cooldown": "cool-down"}.get(kind.part, kind.part)
    more = [words for flag, words in _WORDS.items() if getattr(kind, flag)]
    return f"{slots} with {', '.join(more)}" if more else slots


def _as_data(schedule: Schedule, plans: dict[str, TickPlan]) -> dict[str, object]:
    return {
        "pipe": schedule.pipe,
        "virtual_stages": schedule.virtual_stages,
        "micro_batches": schedule.micro_batches,
        "backward_delay": schedule.backward_delay,
        "ticks": {"warmup": schedule.warmup, "steady": schedule.steady, "cooldown": schedule.warmup},
        "bubble": schedule.bubble,
        "residual_slots": schedule.slots,
        "gpipe_residual_slots": schedule.gpipe_slots,
        "phases": {
            name: [{"compute": phase.compute, "collectives": list(phase.collectives)} for phase in plan.phases]
            for name, plan in plans.items()
        },
    }

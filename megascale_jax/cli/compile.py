"""`megascale compile`: the run's own step, compiled for GPUs that are not there, and what its schedule says."""

import re
import shlex
import tempfile
from pathlib import Path
from shutil import copyfile
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megascale_jax.aot.compile import check_compile, compile_experiment
from megascale_jax.aot.report import CompileReport, scaled
from megascale_jax.aot.targets import TARGETS
from megascale_jax.config.advice import advice_on_memory, nearest_nodes
from megascale_jax.config.layout import MeshShape, advice_on_depth
from megascale_jax.config.load import load_experiment
from megascale_jax.config.memory import FITS, GIB
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import ConfigError, UsageError
from megascale_jax.observe.report import check_json_path, check_output_path, replace_file, write_json
from megascale_jax.views.lanes import lanes_svg


def compile_step(
    experiment: Annotated[str, typer.Argument(help="name of an experiment, or a YAML file", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="changes, such as parallel.remat=full", show_default=False)] = None,
    target: Annotated[
        str | None, typer.Option(help="h100, h200, b200 or a100; default: the experiment's system", show_default=False)
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="nodes; sets the data axis", min=1, show_default=False)] = None,
    compare: Annotated[
        str | None, typer.Option(help="overrides of a second plan to put beside: 'parallel.remat=full'", show_default=False)
    ] = None,
    links: Annotated[float, typer.Option(help="factor on the rates of both links, to see how much slack there is", min=0.01)] = 1.0,
    keep_hlo: Annotated[Path | None, typer.Option(help="write the scheduled program to this file", show_default=False)] = None,
    lanes: Annotated[Path | None, typer.Option(help="draw one steady tick, compute over transfers, as SVG", show_default=False)] = None,
    json: Annotated[Path | None, typer.Option("--json", help="also write the report to this file", show_default=False)] = None,
) -> None:
    """Compile the step for GPUs that are not there: does it fit, how long would it take, what is hidden.

    Needs no GPU, but the compiler parts of `make aot`. All times are estimates from the scheduled program. Exit code 1 when
    the plan (the first one, with `--compare`) does not fit into the device's memory.
    """
    check_json_path(json)
    check_output_path(keep_hlo, "--keep-hlo")
    check_output_path(lanes, "--lanes")
    plans = [resolve(experiment, overrides or [], target, nodes)]
    if compare is not None:
        plans.append(resolve(experiment, [*(overrides or []), *split_overrides(compare)], target, nodes))
        if plans[0] == plans[1]:
            raise UsageError(f"--compare {compare!r} changes nothing; give overrides that make another plan, such as parallel.remat=full")
    for plan in plans:
        check_compile(plan)
    console, reports = Console(), []
    for plan in plans:
        if advice := advice_on_depth(plan.model, plan.parallel):
            console.print(Text(advice, style="yellow"), soft_wrap=True)
        assert plan.system.rates is not None, "check_compile has seen them"
        plan = plan.model_copy(update={"system": plan.system.model_copy(update={"rates": scaled(plan.system.rates, links)})})
        with (
            tempfile.TemporaryDirectory() as place,
            console.status(f"compiling {plan.name} for {MeshShape.of(plan.parallel).size:,} {plan.system.device}"),
        ):
            reports.append(compile_experiment(plan, target_of(plan), Path(place)))
            if keep_hlo is not None and len(reports) == 1:
                copyfile(Path(place) / "module.hlo", keep_hlo)
    _show(console, reports)
    if json is not None:
        data = [report.as_data() for report in reports]
        write_json(json, data[0] if compare is None else {"plan": data[0], "other": data[1]})
    if lanes is not None:
        heading = (
            f"{reports[0].experiment}, {reports[0].devices:,} {reports[0].target}: one steady tick (estimates from the compiled schedule)"
        )
        replace_file(lanes, lanes_svg(reports[0].as_data()["steady_tick"], heading).encode())
    for name, report, plan in zip(("plan", "other plan"), reports, plans, strict=False):
        if not report.fits:
            console.print(Text(f"{name}: {_advice(report, plan)}", style="red"), soft_wrap=True)
    if not reports[0].fits:
        raise typer.Exit(1)


def resolve(experiment: str, overrides: list[str], target: str | None, nodes: int | None) -> Experiment:
    """The experiment on its target, with the data axis that fills the nodes.

    Raises UsageError where it does not, and for an override that an option would undo.
    """
    changes = list(overrides)
    if target is not None:
        if target not in TARGETS:
            raise UsageError(f"--target {target} is not known; known: {', '.join(TARGETS)}")
        _refuse_overrides(overrides, ("system", "system.device"), f"--target {target}")
        changes.append(f"system={target}")
    if nodes is not None:
        _refuse_overrides(overrides, ("parallel.data",), f"--nodes {nodes}")
    if nodes is None:
        return load_experiment(experiment, changes)
    bare = load_experiment(experiment, changes, checked=False)
    pipe, tensor = bare.parallel.pipe, bare.parallel.tensor
    replica, per_node = pipe * tensor, TARGETS[target_of(bare)].gpus_per_domain
    devices = nodes * per_node
    if devices % replica:
        good = ", ".join(map(str, nearest_nodes(bare, nodes, per_node))) or "none for this batch: change train.global_batch_size"
        raise UsageError(
            f"--nodes {nodes} are {devices} devices, not divisible by pipe {pipe} x tensor {tensor} = {replica}; nearest: {good}"
        )
    return load_experiment(experiment, [*changes, f"parallel.data={devices // replica}"])


def split_overrides(text: str) -> list[str]:
    """Overrides in one text, split and unquoted as a shell does it; a part without ``key=`` belongs to the one before it.

    So a list needs no quotes of its own: ``model.window=[768, full]``. Raises UsageError for a quote that does not end.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--compare {text!r}: {error}; expected overrides such as 'parallel.remat=full model.window=768'") from error
    found: list[str] = []
    for word in words:
        if found and not re.match(r"[A-Za-z_][\w.]*=", word):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def _refuse_overrides(overrides: list[str], keys: tuple[str, ...], option: str) -> None:
    """Raise UsageError for an override of a key that an option decides."""
    for override in overrides:
        if override.partition("=")[0] in keys:
            raise UsageError(f"{override} and {option} decide the same thing; leave one of them out")


def target_of(experiment: Experiment) -> str:
    """Name of the target whose device the experiment's system has. Raises ConfigError when none has."""
    for name, target in TARGETS.items():
        if target.device == experiment.system.device:
            return name
    raise ConfigError(f"system.device is {experiment.system.device}, which no target is; use --target {', '.join(TARGETS)}")


def _show(console: Console, reports: list[CompileReport]) -> None:
    table = Table(title=f"{reports[0].experiment}: estimates from the compiled schedule", title_justify="left")
    table.add_column("")
    for index in range(len(reports)):
        table.add_column("plan" if index == 0 else "other plan", justify="right")
    for name, values in _rows(reports):
        table.add_row(name, *values)
    console.print(table)
    first = reports[0]
    links = Table(title="collectives of the plan", title_justify="left")
    for column in ("part", "axis", "kind", "count", "GB", "ms", "hidden ms"):
        links.add_column(column, justify="left" if column in ("part", "axis", "kind") else "right")
    for group in first.collectives:
        numbers = (
            f"{group['count']:,}",
            f"{group['bytes'] / 1e9:.3g}",
            f"{group['seconds'] * 1e3:.3g}",
            f"{group['hidden_seconds'] * 1e3:.3g}",
        )
        links.add_row(group["part"], group["axis"], group["kind"], *numbers)
    console.print(links)
    for title, names in (("synchronous", first.sync_collectives), ("no GEMM between start and done", first.uncovered_collectives)):
        if names:
            console.print(Text(f"{title}: {', '.join(names)}"), soft_wrap=True)


def _rows(reports: list[CompileReport]) -> list[tuple[str, list[str]]]:
    def row(name: str, value) -> tuple[str, list[str]]:
        return name, [value(report) for report in reports]

    return [
        row("devices", lambda r: f"{r.devices:,} {r.target}"),
        row("lowering, compile", lambda r: f"{r.lower_s:.0f} + {r.compile_s:.0f} s"),
        row("arguments, temporaries", lambda r: f"{r.argument_bytes / GIB:.1f}, {r.temp_bytes / GIB:.1f} GiB"),
        row("peak memory", lambda r: f"{r.peak_bytes / GIB:.1f} of {r.device_bytes / GIB:.1f} GiB{'' if r.fits else ', does not fit'}"),
        row("modelled step", lambda r: f"{r.modelled_step_s:.3f} s"),
        row("modelled MFU", lambda r: f"{r.modelled_mfu:.1%}"),
        row("executed / model FLOPs", lambda r: f"{r.executed_over_model_flops:.3f}"),
        row("steady tick / its GEMMs and attention", lambda r: "-" if r.tick_over_gemm is None else f"{r.tick_over_gemm:.2f}"),
        *[row(f"hidden, {part}", lambda r, part=part: _fraction(r, part)) for part in ("warmup", "steady", "cooldown", "whole")],
        row(
            "GEMM, attention, memory-bound s", lambda r: " ".join(f"{r.seconds_of.get(k, 0):.2f}" for k in ("gemm", "attention", "memory"))
        ),
        row("waits for communication", lambda r: f"{r.waits_s:.3f} s"),
    ]


def _fraction(report: CompileReport, part: str) -> str:
    value = report.hidden_fraction[part]
    return "-" if value is None else f"{value:.3f}"


def _advice(report: CompileReport, plan: Experiment) -> str:
    lines = "\n  ".join(report.largest_buffers)
    smaller = "; ".join(advice_on_memory(plan)) or "a smaller model or a GPU with more memory: this plan has nothing left to give"
    return (
        f"{report.peak_bytes / GIB:.1f} GiB do not fit into {FITS:.0%} of {report.device_bytes / GIB:.1f} GiB. "
        f"Largest buffers:\n  {lines}\nWhat would help: {smaller}"
    )

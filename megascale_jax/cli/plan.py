"""`megascale plan`: which layouts of a model on so many GPUs divide, fit, and are quickest; by formulas, the best by the compiler too."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from megascale_jax.cli.job import wide_console
from megascale_jax.cli.plan_report import Plans, search_data, show_compiled, show_counts, show_rejected, show_search, written_plan
from megascale_jax.cli.simulate import counts_of, program_and_changes
from megascale_jax.config import search as files
from megascale_jax.config.layout import MeshShape
from megascale_jax.config.load import list_experiments, load_document, load_experiment
from megascale_jax.config.memory import FITS
from megascale_jax.config.schema import Experiment
from megascale_jax.config.software import SoftwareConfig
from megascale_jax.errors import ConfigError, UsageError
from megascale_jax.observe.report import check_json_path, check_output_path, replace_file, write_json
from megascale_jax.sim.device import Device
from megascale_jax.sim.search import FIELDS, REMATS, Pins, Search, check_base, search
from megascale_jax.sim.search_advice import why_none

_RECIPE = "gpt-1b"
"""Experiment whose recipe a model without an experiment of its own gets; its batch must be given."""


def plan(
    experiment: Annotated[str | None, typer.Argument(help="name of an experiment, or a YAML file", show_default=False)] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="changes, such as model.window=full software.host_s=0", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="name of a model file; batch and recipe of the experiment of that name", show_default=False)
    ] = None,
    gpus: Annotated[
        list[str] | None, typer.Option(help="GPUs, default the experiment's; several (256,512,1024) give a line each", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="name of a system file, such as a100", show_default=False)] = None,
    global_batch: Annotated[int | None, typer.Option(help="rows of a step, default the experiment's", min=1, show_default=False)] = None,
    software: Annotated[
        str | None, typer.Option(help="program whose techniques are assumed, default megascale", show_default=False)
    ] = None,
    top: Annotated[int, typer.Option(help="layouts that are shown", min=1)] = 10,
    memory_margin: Annotated[float, typer.Option(help="share of a GPU's memory that a step may use", min=0.01, max=1)] = FITS,
    pin: Annotated[
        list[str] | None, typer.Option(help=f"FIELD=VALUE that is given: {', '.join(FIELDS)}; repeat", show_default=False)
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="also write all of it to this file", show_default=False)] = None,
    write: Annotated[Path | None, typer.Option(help="write the best layout as the YAML file of an experiment", show_default=False)] = None,
    compile_best: Annotated[
        int, typer.Option("--compile", help="have the compiler verify so many of the best: peak memory, estimated step", min=0)
    ] = 0,
) -> None:
    """Search for the quickest parallel layout that fits: tensor, pipe, virtual stages, data, micro-batch, recomputation.

    Tries every layout that divides GPUs, layers, heads and batch, by the formulas of `megascale simulate`: seconds and bytes are
    simulated, nothing runs. Takes a second or two. Only with `--compile` the run's own step is compiled, half a minute each.

    - `megascale plan --model gpt-175b --gpus 12288 --system a100`
    - `megascale plan gpt-175b --gpus 256,512,1024 --global-batch 768`
    - `megascale plan gpt-13b --gpus 64 --pin tensor=4 --write mine.yaml`, then `megascale train mine.yaml`

    Exit code 1 when no layout fits, or the compiler finds none of the best to fit.
    """
    check_json_path(json)
    check_output_path(write, "--write")
    if write is not None and write.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--write {write}: expected a name that ends in .yaml, as experiments do")
    if experiment is not None and "=" in experiment:
        experiment, overrides = None, [experiment, *(overrides or [])]
    program, changes = program_and_changes([*([f"software={software}"] if software else []), *(overrides or [])])
    techniques = load_document("software", program[0], SoftwareConfig, program[1:])
    base, pins = _base(experiment, model, system, global_batch, changes), _pins(pin or [])
    Device.of(base.system)  # says what its file lacks
    check_base(base)
    counts = counts_of("--gpus", gpus or [], "GPUs, such as 256 or 256,512,1024") or [MeshShape.of(base.parallel).size]
    if len(counts) > 1 and (write is not None or compile_best):
        raise UsageError("--write and --compile take one plan; give one number of --gpus")
    if compile_best:
        _check_compile(base)
    found, invalid = _searches(base, counts, techniques, pins, memory_margin)
    plans = Plans(base, program[0], memory_margin, pins)
    console = wide_console()
    data = plans.as_data() | {
        "searches": [search_data(plans, one) for one in found],
        "invalid": [{"devices": count, "reason": reason} for count, reason in invalid],
    }
    if len(counts) > 1:
        show_counts(console, plans, found)
    elif found:
        show_search(console, plans, found[0], top)
        show_rejected(console, found[0])
    for count, reason in invalid:
        console.print(Text(f"{count:,} GPUs: {reason}", style="yellow"), soft_wrap=True)
    failed = not found
    if compile_best and found:
        data["compiled"] = compiled = _compile(console, plans, found[0], compile_best)
        failed = not any(item.get("fits") for item in compiled)
    if write is not None and found:
        best = found[0].ranked[0]
        replace_file(write, written_plan(plans, best).encode())
        console.print(
            f"{write}: an experiment; next: megascale simulate {write}, megascale compile {write}", soft_wrap=True, highlight=False
        )
    if json is not None:
        write_json(json, data)
    if failed:
        raise typer.Exit(1)


def _base(experiment: str | None, model: str | None, system: str | None, batch: int | None, changes: Sequence[str]) -> Experiment:
    """The experiment whose layout is searched. Raises UsageError for what an option and an override both decide."""
    options = {"model": model, "system": system, "train.global_batch_size": None if batch is None else str(batch)}
    for change in changes:
        key = change.partition("=")[0]
        if options.get(key) is not None:
            raise UsageError(f"{change} and an option decide the same thing; leave one of them out")
        if key == "parallel" or key.removeprefix("parallel.") in (*FIELDS, "layers"):
            raise UsageError(f"{change}: the layout is what is searched; hold a field with --pin, such as --pin tensor=8")
    given = [*changes, *(f"{key}={value}" for key, value in options.items() if value is not None)]
    if experiment is not None:
        return load_experiment(experiment, given, checked=False)
    if model is None:
        raise UsageError("name an experiment (`megascale config list` shows them), or give --model")
    if model in list_experiments():
        return load_experiment(model, given, checked=False)
    base = load_experiment(_RECIPE, given, checked=False)
    if batch is None and not any(change.startswith("train.global_batch_size=") for change in changes):
        raise UsageError(f"no experiment is named {model}, so nothing says how many rows a step has; give --global-batch")
    return base.model_copy(update={"name": model})


def _pins(given: Sequence[str]) -> Pins:
    pins: dict[str, int | str] = {}
    for text in given:
        key, _, value = text.partition("=")
        key = key.removeprefix("parallel.")
        if key not in FIELDS:
            raise UsageError(f"--pin {text}: expected FIELD=VALUE of a field that is searched{files.nearest(key, FIELDS)}")
        if key == "remat":
            if value not in REMATS:
                raise UsageError(f"--pin {text}: got {value!r}, expected {', '.join(REMATS)}")
            pins[key] = value
        elif not value.isdecimal() or int(value) < 1:
            raise UsageError(f"--pin {text}: got {value!r}, expected a whole number from 1 on")
        else:
            pins[key] = int(value)
    return pins


def _searches(
    base: Experiment, counts: Sequence[int], software: SoftwareConfig, pins: Pins, margin: float
) -> tuple[list[Search], list[tuple[int, str]]]:
    """What was found for each count that some layout fits, and the reasons of the others."""
    found: list[Search] = []
    invalid: list[tuple[int, str]] = []
    for count in counts:
        try:
            one = search(base, count, software, pins, margin)
        except ConfigError as error:
            invalid.append((count, str(error)))
            continue
        if one.ranked:
            found.append(one)
        else:
            invalid.append((count, why_none(base, one, software, pins, margin)))
    return found, invalid


def _check_compile(base: Experiment) -> None:
    """Raise ConfigError before the search when nothing could be compiled after it."""
    from megascale_jax.aot.compile import check_compile
    from megascale_jax.aot.targets import TARGETS

    known = [target.device for target in TARGETS.values()]
    if base.system.device not in known:
        raise ConfigError(f"--compile: there is no compiler target for {base.system.device}; there are {', '.join(known)}")
    check_compile(base)


def _compile(console: Console, plans: Plans, found: Search, best: int) -> list[dict[str, Any]]:
    """Compile the best layouts, show the compiler's answers beside what was simulated; one that it refuses has its reason."""
    from megascale_jax.cli.plan_compile import compile_candidates

    answers = compile_candidates(console, plans.base, found.ranked[:best])
    show_compiled(console, plans, found.ranked, answers)
    return answers

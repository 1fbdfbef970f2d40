"""`megascale simulate`: a step on GPUs that are not there, in milliseconds: how long, why, and does it fit."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megascale_jax.cli.job import wide_console
from megascale_jax.config.advice import advice_on_memory, on_nodes
from megascale_jax.config.load import load_document, load_experiment
from megascale_jax.config.memory import GIB
from megascale_jax.config.schema import Experiment
from megascale_jax.config.software import SoftwareConfig
from megascale_jax.errors import ConfigError, UsageError
from megascale_jax.observe.report import check_json_path, check_output_path, replace_file, write_json
from megascale_jax.sim.analytic import SOFTWARE, Prediction, predict
from megascale_jax.sim.device import Device
from megascale_jax.sim.iteration import Iteration
from megascale_jax.sim.iteration import simulate as simulate_events
from megascale_jax.sim.validation.tables import TABLES
from megascale_jax.sim.work import Work

PARTS: Mapping[str, str] = {
    "gemm_s": "matrix products",
    "attention_s": "attention",
    "memory_s": "memory-bound kernels",
    "tensor_s": "exposed tensor communication",
    "pipe_s": "exposed pipeline messages",
    "bubble_s": "pipeline bubble",
    "head_s": "head on the last stage",
    "data_s": "exposed data communication",
    "embedding_s": "shared table's gradient",
    "optimizer_s": "optimizer",
    "contention_s": "computation slowed by communication",
    "stragglers_s": "slow nodes",
    "input_s": "input",
    "host_s": "host",
}
_SOFTWARE_KEY = "software"


def simulate(
    experiment: Annotated[str | None, typer.Argument(help="name of an experiment, or a YAML file", show_default=False)] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="changes, such as parallel.pipe=16 system=h100 software=megatron-lm", show_default=False)
    ] = None,
    nodes: Annotated[
        list[str] | None, typer.Option(help="nodes, which set the data axis; several (32,64,128) print a scaling table", show_default=False)
    ] = None,
    tokens: Annotated[float, typer.Option(help="tokens of the whole training, for its days", min=1)] = 300e9,
    events: Annotated[bool, typer.Option("--events", help="also simulate event by event, slow nodes drawn at random")] = False,
    jitter: Annotated[float, typer.Option(help="with --events: spread of every single unit, a fraction", min=0, max=1)] = 0.0,
    seed: Annotated[int, typer.Option(help="of the draws", min=0)] = 0,
    trace: Annotated[
        Path | None, typer.Option(help="write a step of one pipeline for Perfetto; gzipped if it ends in .gz", show_default=False)
    ] = None,
    validate: Annotated[
        str | None, typer.Option(help=f"score against published rows instead: {', '.join(TABLES)}, or all", show_default=False)
    ] = None,
    ladder: Annotated[bool, typer.Option("--ladder", help="with --validate table2: what each layer of detail buys")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="also write the numbers to this file", show_default=False)] = None,
) -> None:
    """Simulate a training step on GPUs that are not there: how long it takes, where the time goes, does it fit.

    Takes the experiment of a training run, the constants of its `system` file and the techniques of a program (`software=megascale`,
    `megatron-lm`, ...; one field by `software.host_s=0`). Nothing runs or compiles, and all numbers are simulated.

    - `megascale simulate gpt-175b` is the paper's largest run, 12,288 GPUs
    - `megascale simulate gpt-175b --nodes 384,768,1536` scales it
    - `megascale simulate gpt-175b software=megatron-lm model.block=serial model.window=full` is the paper's baseline
    - `megascale simulate --validate table2` puts the paper's table beside the simulated one

    Exit code 1 when the one plan does not fit into memory, or a validation misses its target.
    """
    check_json_path(json)
    check_output_path(trace, "--trace")
    console = wide_console()
    if validate is not None:
        if experiment is not None or nodes or events or trace is not None:
            raise UsageError("--validate scores fixed runs; leave out the experiment, --nodes, --events and --trace")
        _validate(console, validate, ladder, json)
        return
    if experiment is None:
        raise UsageError("name an experiment (`megascale config list` shows them), or give --validate")
    if ladder:
        raise UsageError("--ladder belongs to --validate table2")
    program, changes = program_and_changes(overrides or [])
    software = load_document(_SOFTWARE_KEY, program[0], SoftwareConfig, program[1:])
    counts = counts_of("--nodes", nodes or [], "nodes, such as 32 or 32,64,128")
    if len(counts) > 1 and (trace is not None or events):
        raise UsageError("--trace and --events take one plan; give one number of --nodes")
    points, invalid = _points(experiment, changes, counts, software)
    data: dict[str, Any] = {
        "software": program[0],
        "points": [_as_data(plan, found, tokens) for plan, found in points],
        "invalid": [{"nodes": count, "reason": reason} for count, reason in invalid],
    }
    for plan, found in points[:1] if len(points) == 1 else ():
        _show(console, plan, found, program[0], tokens)
        if events:
            drawn = simulate_events(Work.of(plan), Device.of(plan.system), software, jitter=jitter, seed=seed)
            _show_events(console, drawn, found)
            data["events"] = asdict(drawn) | {"mean_s": drawn.mean_s}
        if trace is not None:
            _write_trace(console, plan, software, trace)
    if len(points) > 1:
        _show_scaling(console, points, program[0], tokens)
    for count, reason in invalid:
        console.print(Text(f"{count} nodes: {reason}", style="yellow"), soft_wrap=True)
    if json is not None:
        write_json(json, data)
    if not points:
        raise UsageError("none of the plans can be simulated; the reasons are above")
    if len(points) == 1 and not points[0][1].fits:
        raise typer.Exit(1)


def program_and_changes(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The program's name and its overrides, and those of the experiment."""
    name, fields, rest = SOFTWARE, [], []
    for override in overrides:
        key, equals, value = override.partition("=")
        if key == _SOFTWARE_KEY and equals:
            name = value
        elif key.startswith(f"{_SOFTWARE_KEY}."):
            fields.append(override.removeprefix(f"{_SOFTWARE_KEY}."))
        else:
            rest.append(override)
    return [name, *fields], rest


def counts_of(option: str, given: Sequence[str], expected: str) -> list[int]:
    """Numbers of an option that may be given several times, and several at a time. Raises UsageError."""
    counts: list[int] = []
    for text in ",".join(given).split(",") if given else ():
        if not text.strip().isdecimal() or int(text) < 1:
            raise UsageError(f"{option} {text!r}: expected numbers of {expected}")
        counts.append(int(text))
    return list(dict.fromkeys(counts))


def _points(
    experiment: str, changes: list[str], counts: Sequence[int], software: SoftwareConfig
) -> tuple[list[tuple[Experiment, Prediction]], list[tuple[int, str]]]:
    """Plans that can be simulated, with what came out, and the others with the reason."""
    if not counts:
        plan = load_experiment(experiment, changes)
        return [(plan, predict(plan, software))], []
    if any(change.partition("=")[0] == "parallel.data" for change in changes):
        raise UsageError("parallel.data and --nodes decide the same thing; leave one of them out")
    bare = load_experiment(experiment, changes, checked=False)
    device = Device.of(bare.system)
    points: list[tuple[Experiment, Prediction]] = []
    invalid: list[tuple[int, str]] = []
    for count in counts:
        try:
            plan = on_nodes(bare, count, device.per_node)
        except ConfigError as error:
            invalid.append((count, str(error)))
        else:
            points.append((plan, predict(plan, software)))
    return points, invalid


def _as_data(plan: Experiment, found: Prediction, tokens: float) -> dict[str, Any]:
    return {
        "experiment": plan.name,
        "nodes": found.nodes,
        "devices": found.devices,
        "iteration_s": found.iteration_s,
        "parts_s": asdict(found.times),
        "mfu": found.mfu("causal"),
        "mfu_full": found.mfu("full"),
        "tokens_per_s": found.tokens_per_s,
        "tokens": tokens,
        "days": found.days(tokens),
        "state_bytes": found.state_bytes,
        "activation_bytes": found.activation_bytes,
        "device_bytes": found.device_bytes,
        "fits": found.fits,
    }


def _show(console: Console, plan: Experiment, found: Prediction, program: str, tokens: float) -> None:
    parallel = plan.parallel
    console.print(
        Text.assemble(
            (plan.name, "bold"),
            f" on {found.devices:,} x {plan.system.device}, {found.nodes:,} nodes, techniques of {program} (simulated)\n"
            f"pipe {parallel.pipe}, data {parallel.data}, tensor {parallel.tensor}; {plan.train.global_batch_size:,} rows, "
            f"{plan.num_micro_batches} micro-batches of {parallel.micro_batch_size}",
        ),
        soft_wrap=True,
    )
    table = Table(title="where the time goes", title_justify="left")
    for column in ("", "s", "%"):
        table.add_column(column, justify="left" if not column else "right")
    for part, seconds in asdict(found.times).items():
        if seconds:
            table.add_row(PARTS[part], f"{seconds:.3f}", f"{100 * seconds / found.iteration_s:.1f}")
    table.add_section()
    table.add_row("iteration", f"{found.iteration_s:.3f}", "100")
    console.print(table)
    limit = "" if found.device_bytes is None else f" of {found.device_bytes / GIB:.1f}"
    console.print(
        f"MFU {found.mfu('full'):.1%} over full attention (the paper's convention), {found.mfu('causal'):.1%} over the keys that are seen\n"
        f"{found.tokens_per_s:,.0f} tokens/s; {tokens / 1e9:,.0f} B tokens take {found.days(tokens):.2f} days without interruption\n"
        f"memory of a device: states {found.state_bytes / GIB:.1f} + activations {found.activation_bytes / GIB:.1f} = "
        f"{found.memory_bytes / GIB:.1f}{limit} GiB, libraries not counted",
        soft_wrap=True,
        highlight=False,
    )
    if not found.fits:
        smaller = "; ".join(advice_on_memory(plan)) or "a smaller model or a GPU with more memory"
        console.print(Text(f"does not fit; what would help: {smaller}", style="red"), soft_wrap=True)


def _show_scaling(console: Console, points: Sequence[tuple[Experiment, Prediction]], program: str, tokens: float) -> None:
    first = points[0][0]
    title = f"{first.name} on {first.system.device}, techniques of {program} (simulated); {tokens / 1e9:,.0f} B tokens"
    table = Table(title=title, title_justify="left")
    for column in ("nodes", "GPUs", "iteration s", "MFU full", "causal", "tokens/s", "days", "bubble", "data", "slow nodes", "GiB"):
        table.add_column(column, justify="right")
    for _, found in points:
        times, whole = found.times, found.iteration_s
        shares = (times.bubble_s, times.data_s, times.stragglers_s)
        table.add_row(
            f"{found.nodes:,}",
            f"{found.devices:,}",
            f"{whole:.3f}",
            f"{found.mfu('full'):.1%}",
            f"{found.mfu('causal'):.1%}",
            f"{found.tokens_per_s:,.0f}",
            f"{found.days(tokens):.2f}",
            *(f"{seconds / whole:.1%}" for seconds in shares),
            f"{found.memory_bytes / GIB:.1f}{'' if found.fits else ', does not fit'}",
        )
    console.print(table)


def _show_events(console: Console, drawn: Iteration, found: Prediction) -> None:
    console.print(
        f"by events: {drawn.healthy_s:.3f} s without a slow node (closed form {found.iteration_s - found.times.stragglers_s:.3f}); "
        f"{len(drawn.seconds)} draws of slow nodes: mean {drawn.mean_s:.3f}, {min(drawn.seconds):.3f} to {max(drawn.seconds):.3f} s "
        f"(closed form {found.iteration_s:.3f}); {drawn.patterns} different pipelines simulated",
        soft_wrap=True,
        highlight=False,
    )


def _write_trace(console: Console, plan: Experiment, software: SoftwareConfig, path: Path) -> None:
    from megascale_jax.views.simulated import simulated_timeline
    from megascale_jax.views.trace import trace_bytes

    timeline = simulated_timeline(Work.of(plan), Device.of(plan.system), software)
    replace_file(path, trace_bytes(timeline, compressed=path.suffix == ".gz"))
    console.print(f"{path}: one pipeline of the step; open it in https://ui.perfetto.dev", soft_wrap=True, highlight=False)


def _validate(console: Console, name: str, with_ladder: bool, json: Path | None) -> None:
    from megascale_jax.cli.validation import show_ladder, show_score
    from megascale_jax.sim.validation.ladder import ladder

    if name not in (*TABLES, "all"):
        raise UsageError(f"--validate {name} is not known; known: {', '.join(TABLES)}, all")
    if with_ladder and name not in ("table2", "all"):
        raise UsageError(f"--ladder belongs to --validate table2, got {name}")
    scores = [table() for table in (TABLES.values() if name == "all" else [TABLES[name]])]
    data: dict[str, Any] = scores[0].as_data() if name != "all" else {"tables": [score.as_data() for score in scores]}
    for score in scores:
        show_score(console, score)
    if with_ladder:
        rungs = {size: ladder(size) for size in (1, 2)}
        show_ladder(console, rungs)
        data["ladder"] = {f"micro-batch {size}": [asdict(rung) for rung in found] for size, found in rungs.items()}
    if json is not None:
        write_json(json, data)
    if not all(score.is_met for score in scores):
        raise typer.Exit(1)

"""`megascale forecast`: goodput, checkpoint interval, cost and capacity of a run on a fleet. Nothing of it is measured.

Exit code 0: computed, at least one of several; 2: none, with the reason.
"""

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from megascale_jax.cli.job import wide_console
from megascale_jax.config.load import load_document, load_experiment
from megascale_jax.errors import ConfigError, UsageError
from megascale_jax.observe.output import printable
from megascale_jax.observe.report import check_json_path, check_output_path, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from megascale_jax.config.fleet import Fleet
    from megascale_jax.config.price import Price
    from megascale_jax.config.schema import Experiment
    from megascale_jax.sim.forecast import Forecast, Wanted

SIMULATED = "simulated"
_PICTURE_ENDINGS = (".png", ".svg", ".pdf")
_MOST_ALARMS = 3


def forecast(
    experiment: Annotated[str, typer.Argument(help="name of an experiment, or a YAML file", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="changes, such as train.checkpoint.every=50", show_default=False)] = None,
    fleet: Annotated[
        str, typer.Option(help="whose failures: megascale, llama3-405b, meta-rsc-1, ..., or a YAML file; several: a,b")
    ] = "megascale",
    days: Annotated[float | None, typer.Option(help="wall time of the run, days", show_default=False)] = None,
    tokens: Annotated[float | None, typer.Option(help="or the tokens to train, such as 300e9", show_default=False)] = None,
    step_s: Annotated[
        float | None, typer.Option("--step-s", help="seconds of a step; default: predicted as by `megascale simulate`", show_default=False)
    ] = None,
    mfu: Annotated[float | None, typer.Option(help="or model FLOPs utilisation, a fraction: 0.55", show_default=False)] = None,
    nodes: Annotated[str | None, typer.Option(help="other sizes, by data replicas: 512,1024,1536", show_default=False)] = None,
    spares: Annotated[int, typer.Option(help="nodes that wait to replace others", min=0)] = 16,
    checkpoint_interval: Annotated[
        float | None, typer.Option(help="training between saves, seconds; default: the experiment's", show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(help="simulated jobs", min=1, max=100_000)] = 200,
    decisions: Annotated[int, typer.Option(help="of them with every decision by the driver's own code", min=0, max=1000)] = 1,
    drill: Annotated[
        Path | None, typer.Option(help="JSON of a fault drill: its times of recovery, in place of the fleet's", show_default=False)
    ] = None,
    own_detection: Annotated[bool, typer.Option("--own-detection", help="failures are noticed as this driver's rules do")] = False,
    memory_copies: Annotated[bool, typer.Option("--memory-copies", help="one lost node goes on from a neighbour's memory")] = False,
    price: Annotated[str | None, typer.Option(help="a price document, by name or YAML file", show_default=False)] = None,
    price_per_gpu_hour: Annotated[float | None, typer.Option(help="or a price, with --price-date", show_default=False)] = None,
    price_date: Annotated[str | None, typer.Option(help="day of that price, YYYY-MM-DD", show_default=False)] = None,
    node_kw: Annotated[float | None, typer.Option(help="power of a node, kW, for the energy", show_default=False)] = None,
    power_overhead: Annotated[float, typer.Option(help="of the site over its machines (PUE)", min=1.0)] = 1.0,
    host_memory_gib: Annotated[float | None, typer.Option(help="memory of a node, GiB, to check against", show_default=False)] = None,
    what_if: Annotated[bool, typer.Option("--what-if", help="also the goodput if one thing were otherwise")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="also write every number to this file", show_default=False)] = None,
    picture: Annotated[Path | None, typer.Option(help="also draw where the time goes (.png, .svg or .pdf)", show_default=False)] = None,
) -> None:
    """Forecast a run on a fleet that fails: goodput with its spread, where the time goes, the best checkpoint interval, cost, capacity.

    All of it is simulated. Points of several fleets or sizes that cannot be are listed with their reason.
    """
    check_json_path(json)
    if picture is not None and picture.suffix.lower() not in _PICTURE_ENDINGS:
        raise UsageError(f"--picture {picture}: expected a name that ends in one of {', '.join(_PICTURE_ENDINGS)}")
    check_output_path(picture, "--picture")
    from megascale_jax.sim.cost import Power
    from megascale_jax.sim.forecast import Wanted

    wanted = Wanted(
        days=days,
        tokens=tokens,
        step_s=step_s,
        mfu=mfu,
        spares=spares,
        interval_s=checkpoint_interval,
        seeds=seeds,
        decided=decisions,
        memory_copies=memory_copies,
        own_detection=own_detection,
        host_memory_gib=host_memory_gib,
        power=None if node_kw is None else Power(node_kw, power_overhead),
        price=_price(price, price_per_gpu_hour, price_date),
    )
    sizes = _sizes(nodes)
    if step_s is not None and len(sizes) > 1:
        raise UsageError("--step-s is the step of one size; for several --nodes give --mfu, or none of both")
    found, refused = _points(load_experiment(experiment, overrides or []), fleet.split(","), sizes, wanted, drill)
    if not found:
        raise ConfigError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
    console = wide_console()
    changes: Mapping[str, float | None] = _what_if(found[0][0], found[0][1], wanted) if what_if else {}
    if len(found) + len(refused) == 1:
        _print_one(found[0][0], console)
    else:
        _print_many([one for one, _ in found], refused, console)
    _print_what_if(changes, found[0][0], console)
    if json is not None:
        points = [as_data(one) for one, _ in found]
        write_json(json, {"kind": SIMULATED, "points": points, "refused": refused, "what_if": changes})
    if picture is not None:
        from megascale_jax.views.forecast_picture import plot_forecast

        plot_forecast([one for one, _ in found], picture)
        typer.echo(f"Picture: {picture}")


def _price(name: str | None, per_gpu_hour: float | None, day: str | None) -> "Price | None":
    from pydantic import ValidationError

    from megascale_jax.config.price import Price

    if name is not None and (per_gpu_hour is not None or day is not None):
        raise UsageError("got --price and a price of its own; give one of them")
    if name is not None:
        return load_document("price", name, Price)
    if (per_gpu_hour is None) != (day is None):
        raise UsageError("--price-per-gpu-hour and --price-date belong together: a price without its day says little")
    if per_gpu_hour is None or day is None:
        return None
    try:
        return Price(price_per_gpu_hour=per_gpu_hour, date=day, device="as given", source="command line")
    except ValidationError as error:
        raise UsageError(f"--price-per-gpu-hour {per_gpu_hour:g} --price-date {day}: {error.errors()[0]['msg']}") from error


def _sizes(nodes: str | None) -> list[int | None]:
    if nodes is None:
        return [None]
    try:
        sizes: list[int | None] = [int(part) for part in nodes.split(",")]
    except ValueError as error:
        raise UsageError(f"--nodes {nodes}: expected numbers of nodes such as 512,1024") from error
    if any(size is None or size < 1 for size in sizes):
        raise UsageError(f"--nodes {nodes}: expected numbers of at least 1")
    return sizes


def _points(
    experiment: "Experiment", fleets: list[str], sizes: list[int | None], wanted: "Wanted", drill: Path | None
) -> "tuple[list[tuple[Forecast, Fleet]], dict[str, str]]":
    """Each fleet with each size; what cannot be by its name, with the reason."""
    from megascale_jax.config.fleet import Fleet
    from megascale_jax.sim.faults.measured import with_drill
    from megascale_jax.sim.forecast import forecast as simulate
    from megascale_jax.sim.forecast import sized

    found: list[tuple[Forecast, Fleet]] = []
    refused: dict[str, str] = {}
    for name in fleets:
        document = load_document("fleet", name, Fleet)
        document = document if drill is None else with_drill(document, drill)
        for size in sizes:
            try:
                of_size = experiment if size is None else sized(experiment, size)
                found.append((simulate(of_size, Path(name).stem, document, wanted), document))
            except ConfigError as error:
                refused[name if size is None else f"{name}, {size} nodes"] = str(error)
    return found, refused


def _what_if(one: "Forecast", fleet: "Fleet", wanted: "Wanted") -> "Mapping[str, float | None]":
    from megascale_jax.sim.forecast import what_if

    return what_if(one.experiment, fleet, wanted)


def as_data(one: "Forecast") -> dict[str, Any]:
    """Everything that ``--json`` writes of a point. Times in nanoseconds where the key says so; ``booked_ns`` of all seeds together."""
    outcome, case = one.outcome, one.case
    return {
        "kind": SIMULATED,
        "experiment": one.experiment.name,
        "fleet": one.fleet_name,
        "nodes": case.nodes,
        "gpus": one.cost.gpus,
        "spares": case.spares,
        "seeds": outcome.goodput.size,
        "step_s": one.step_s,
        "mtbf_s": case.mtbf_s,
        "effective_training_time_ratio": outcome.mean_goodput,
        "spread": dict(zip(("p5", "median", "p95"), outcome.spread(outcome.goodput), strict=True)),
        "booked_ns": outcome.total_ns(),
        "wall_ns": int(outcome.wall_ns.sum()),
        "tokens": one.tokens,
        "incidents": float(outcome.incidents.mean()),
        "spares_used": float(outcome.replaced.mean()),
        "gave_up": float(outcome.gave_up.mean()),
        "intervals": one.intervals,
        "decisions": {
            "days": one.decided_days,
            "effective_training_time_ratio": [decided.outcome.mean_goodput for decided in one.decided],
            "arrays_on_the_same_draws": one.array_goodput,
            "steps": [float(decided.outcome.steps[0]) for decided in one.decided],
            "evicted": [len(decided.evicted) for decided in one.decided],
            "isolated": [decided.isolated for decided in one.decided],
            "gave_up": [list(decided.outcomes) for decided in one.decided],
            "alarms": [list(decided.alarms) for decided in one.decided],
        },
        "cost": one.cost,
        "sensitivities": one.sensitivities,
        "capacity": one.capacity,
    }


def _print_one(one: "Forecast", console: "Console") -> None:
    from megascale_jax.cli.goodput import FORMULA, classes_table

    outcome, case, count = one.outcome, one.case, one.outcome.goodput.size
    fleet, device = printable(one.fleet_name), one.experiment.system.device
    head = f"{one.experiment.name} on {one.cost.gpus:,} {device} ({case.nodes:,} nodes + {case.spares} spares), failures of {fleet}"
    console.print(Text(f"{SIMULATED}: {head}"), style="bold")
    console.print(Text(f"step {one.step_s:.3f} s; a failure every {_duration(case.mtbf_s)}; {count} jobs, the mean of which:\n"))
    means = {kind: spent / count for kind, spent in outcome.total_ns().items()}
    console.print(classes_table(means, int(outcome.wall_ns.sum()) / count))
    low, middle, high = outcome.spread(outcome.goodput)
    console.print(
        Text.assemble(
            f"\n{SIMULATED} effective training time ratio ",
            (f"{outcome.mean_goodput:.1%}", "bold"),
            f" = {FORMULA}; {low:.1%} to {high:.1%} in nine of ten jobs, median {middle:.1%}",
        )
    )
    console.print(
        Text(
            f"{one.tokens:,.3g} tokens in {one.cost.wall_days:.1f} days; {outcome.incidents.mean():.0f} incidents, "
            f"{outcome.replaced.mean():.0f} seats taken by spares, {outcome.gave_up.mean():.2f} times a person had to help"
        )
    )
    _print_decisions(one, console)
    _print_intervals(one, console)
    _print_cost(one, console)
    _print_capacity(one, console)


def _print_decisions(one: "Forecast", console: "Console") -> None:
    for decided, same in zip(one.decided, one.array_goodput, strict=True):
        outcome = decided.outcome
        console.print(
            Text(
                f"\ndecided by the driver's own code, {one.decided_days:.1f} days: {outcome.mean_goodput:.2%} ({same:.2%} by the arrays on "
                f"the same failures), {outcome.steps[0]:,.0f} steps; {outcome.incidents[0]} incidents, {len(decided.evicted)} nodes "
                f"evicted, {decided.isolated} isolated since slow, gave up {outcome.gave_up[0]} times"
            )
        )
        for alarm in (*decided.outcomes, *decided.alarms)[:_MOST_ALARMS]:
            console.print(Text(f"  alarm: {printable(alarm)}", style="yellow"))


def _print_intervals(one: "Forecast", console: "Console") -> None:
    found = one.intervals
    console.print(Text("\ncheckpoint interval", style="bold"))
    if not isfinite(found.best_s):
        console.print(Text("this fleet has no failures, so none is best"))
        return
    console.print(
        Text(
            f"own {_duration(found.own_s)}: expected {found.own_ettr:.2%}; best {_duration(found.best_s)}: {found.best_ettr:.2%}, "
            f"so the own one costs {max(found.best_ettr - found.own_ettr, 0.0):.2%} of the time"
        )
    )
    console.print(
        Text(f"Young {_duration(found.young_s)}, Daly {_duration(found.daly_s)}; Meta's formula at the own one {found.meta_ettr:.2%}")
    )


def _print_cost(one: "Forecast", console: "Console") -> None:
    cost = one.cost
    console.print(Text(f"\ncost, {SIMULATED}", style="bold"))
    per = "" if cost.gpu_hours_per_trillion_tokens is None else f" ({cost.gpu_hours_per_trillion_tokens:,.0f} for 1e12 tokens)"
    console.print(Text(f"{cost.gpu_hours:,.0f} GPU-hours, spares included{per}, {cost.wall_days:.2f} days"))
    console.print(Text("energy: not known; give --node-kw" if cost.energy_mwh is None else f"energy {cost.energy_mwh:,.1f} MWh"))
    if cost.price is None or cost.amount is None:
        console.print(Text("money: not known; give --price, or --price-per-gpu-hour and --price-date"))
    else:
        price = cost.price
        source = f"{price.price_per_gpu_hour:g} {price.currency} a GPU-hour on {price.date}, {price.device}"
        console.print(Text(printable(f"{cost.amount:,.0f} {price.currency} at {source}")))
    grid = Table("GPU-hours for the same tokens if", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("10 % lower", "10 % higher"):
        grid.add_column(name, justify="right")
    for change in one.sensitivities:
        grid.add_row(change.name, f"{change.lower - 1:+.1%}", f"{change.higher - 1:+.1%}")
    console.print(grid)


def _print_capacity(one: "Forecast", console: "Console") -> None:
    console.print(Text("\ncapacity", style="bold"))
    grid = Table("", "question", box=None, header_style="bold", padding=(0, 2, 0, 0))
    grid.add_column("answer", justify="right")
    grid.add_column("formula")
    marks = {True: "ok", False: "NO", None: ""}
    for answer in one.capacity:
        style = "red" if answer.is_ok is False else ""
        grid.add_row(marks[answer.is_ok], answer.question, f"{answer.value:,.4g} {answer.unit}", answer.formula, style=style)
    console.print(grid)


def _print_many(found: "list[Forecast]", refused: "Mapping[str, str]", console: "Console") -> None:
    console.print(Text(f"{SIMULATED}, the mean of {found[0].outcome.goodput.size} jobs each", style="bold"))
    grid = Table("fleet", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("nodes", "GPUs", "step s", "MTBF", "goodput", "5 to 95 %", "best interval", "days", "tokens", "GPU-hours"):
        grid.add_column(name, justify="right")
    for one in found:
        low, _, high = one.outcome.spread(one.outcome.goodput)
        grid.add_row(
            printable(one.fleet_name),
            f"{one.case.nodes:,}",
            f"{one.cost.gpus:,}",
            f"{one.step_s:.3f}",
            _duration(one.case.mtbf_s),
            f"{one.outcome.mean_goodput:.1%}",
            f"{low:.1%} to {high:.1%}",
            _duration(one.intervals.best_s),
            f"{one.cost.wall_days:.1f}",
            f"{one.tokens:.3g}",
            f"{one.cost.gpu_hours:,.0f}",
        )
    console.print(grid)
    for name, reason in refused.items():
        console.print(Text(printable(f"not computed: {name}: {reason}"), style="yellow"))


def _print_what_if(changes: "Mapping[str, float | None]", one: "Forecast", console: "Console") -> None:
    if not changes:
        return
    console.print(Text(f"\nwhat if, {SIMULATED}: {one.fleet_name}, {one.case.nodes:,} nodes, the same seeds", style="bold"))
    grid = Table("", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("goodput", "points"):
        grid.add_column(name, justify="right")
    base = next(iter(changes.values())) or 0.0
    for name, ratio in changes.items():
        grid.add_row(name, *(("does not end", "") if ratio is None else (f"{ratio:.2%}", f"{100 * (ratio - base):+.2f}")))
    console.print(grid)


def _duration(seconds: float) -> str:
    """Two significant parts at most: 4.1 h, 15.7 min, 38 s."""
    if not isfinite(seconds):
        return "never"
    for limit, unit in ((86_400.0 * 2, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= limit:
            return f"{seconds / (86_400.0 if unit == 'd' else limit):.1f} {unit}"
    return f"{seconds:.3g} s"

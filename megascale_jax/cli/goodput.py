"""`megascale goodput`: where the time of a job went, and whether it trains slower than it did.

Exit code 0: booked, no alarm; 1: the MFU decays; 2: the request cannot be carried out.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from megascale_jax.cli.job import wide_console
from megascale_jax.errors import UsageError
from megascale_jax.observe.output import printable
from megascale_jax.observe.progress import format_duration
from megascale_jax.observe.report import check_json_path, check_output_path, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from megascale_jax.views.goodput import Goodput
    from megascale_jax.views.incidents import Incident
    from megascale_jax.views.mfu_trend import MfuTrend

FORMULA = "training time that counted / wall time (paper, section 6.3)"
_PICTURE_ENDINGS = (".png", ".svg", ".pdf")
_MOST_SHOWN, _LEAST_SHARE = 20, 0.05
_PIECES = 1000
"""Of the timeline in JSON, when it has more stretches: shares of each class in so many equal pieces."""


def goodput(
    run: Annotated[Path, typer.Argument(help="run folder", show_default=False)],
    ranks: Annotated[str | None, typer.Option(help="by these ranks, such as 0,8-15; default: 8, evenly spread", show_default=False)] = None,
    json: Annotated[Path | None, typer.Option("--json", help="also write every number to this file", show_default=False)] = None,
    picture: Annotated[
        Path | None, typer.Option(help="also draw the timeline and the MFU (.png, .svg or .pdf)", show_default=False)
    ] = None,
) -> None:
    """Book every second of a job: training, steps done again, waits, saves, restarts, idle; and tell whether its MFU decays, and why.

    Exit code 0: no alarm; 1: the MFU decays.
    """
    check_json_path(json)
    if picture is not None and picture.suffix.lower() not in _PICTURE_ENDINGS:
        raise UsageError(f"--picture {picture}: expected a name that ends in one of {', '.join(_PICTURE_ENDINGS)}")
    check_output_path(picture, "--picture")
    from megascale_jax.views.goodput import read_goodput
    from megascale_jax.views.ranks import parse_numbers

    wanted = parse_numbers(ranks, "--ranks")
    found = read_goodput(run, None if wanted is None else sorted(wanted))
    print_goodput(found, wide_console())
    if json is not None:
        write_json(json, as_data(found))
    if picture is not None:
        from megascale_jax.views.goodput_picture import plot_goodput

        plot_goodput(found, picture)
        typer.echo(f"Picture: {picture}")
    raise typer.Exit(1 if found.trend.is_alarm else 0)


def as_data(found: "Goodput") -> dict[str, Any]:
    """Everything that ``--json`` writes. Times in nanoseconds where the key says so, since 1970 where they are moments."""
    timeline, trend = found.timeline, found.trend
    data: dict[str, Any] = {
        "run": found.run,
        "begin_ns": int(timeline.edges_ns[0]),
        "wall_ns": found.wall_ns,
        "is_over": found.is_over,
        "booked_ns": found.booked_ns,
        "idle_ns": found.idle_ns,
        "effective_training_time_ratio": found.effective,
        "formula": FORMULA,
        "steps": found.steps,
        "recomputed_steps": found.recomputed_steps,
        "tokens_per_s": found.tokens_per_s,
        "incidents": found.incidents,
        "mfu": {**vars(trend), "grown": [{**vars(one), "growth_s": one.growth_s} for one in trend.grown], "level": trend.level},
        "ranks": found.ranks,
        "notes": found.notes,
    }
    if timeline.codes.size <= _PIECES:
        data["segments"] = list(timeline.segments())
    else:
        data["shares"] = dict(zip(found.booked_ns, timeline.shares(_PIECES).T, strict=True))
    return data


def print_goodput(found: "Goodput", console: "Console") -> None:
    """Print the classes, the ratio, the interruptions and the trend."""
    begin = datetime.fromtimestamp(int(found.timeline.edges_ns[0]) / 1e9, UTC)
    going = "" if found.is_over else ", still written"
    console.print(Text(printable(f"{found.run}: {_time(found.wall_ns)} from {begin:%Y-%m-%d %H:%M:%S} UTC on{going}")))
    console.print(classes_table(found.booked_ns, found.wall_ns))
    ratio = "-" if found.effective is None else f"{found.effective:.1%}"
    rate = "" if found.tokens_per_s is None else f"; {found.tokens_per_s:,.0f} tokens/s over the wall time"
    again = f", {found.recomputed_steps:,} executed in vain" if found.recomputed_steps else ""
    console.print(Text.assemble("\neffective training time ratio ", (ratio, "bold"), f" = {FORMULA}"))
    console.print(Text(f"{found.steps:,} steps count{again}{rate}"))
    for reason, lasted_ns in found.idle_ns.items():
        console.print(Text(f"idle: {_time(lasted_ns)}: {reason}"))
    if found.incidents:
        console.print(Text(f"\n{len(found.incidents)} interruption(s)", style="bold"))
    for one in found.incidents[-_MOST_SHOWN:]:
        console.print(Text(printable(_line(one))))
    console.print(Text("\nMFU" if found.trend.is_mfu else "\nspeed", style="bold"))
    for line in _trend_lines(found.trend):
        console.print(Text(line, style="red" if found.trend.is_alarm and line.startswith("ALARM") else ""))
    for note in (*found.trend.notes, *found.notes):
        console.print(Text(f"note: {printable(note)}", style="yellow"))


def classes_table(booked_ns: Mapping[Any, float], wall_ns: float) -> Table:
    """The classes of a job's time, real or simulated, which sum up to the wall time."""
    grid = Table("class", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("seconds", "share"):
        grid.add_column(name, justify="right")
    for kind, lasted_ns in booked_ns.items():
        grid.add_row(kind, f"{lasted_ns / 1e9:,.3f}", f"{lasted_ns / wall_ns:.2%}")
    grid.add_row("wall time", f"{wall_ns / 1e9:,.3f}", f"{1:.2%}", style="bold")
    return grid


def _line(one: "Incident") -> str:
    end = "it has not gone on" if one.resumed_step is None else f"went on after step {one.resumed_step}"
    again = f", {one.recomputed_steps} step(s) in vain" if one.recomputed_steps else ""
    costs = ", ".join(f"{kind} {cost / 1e9:.1f} s" for kind, cost in sorted(one.lost_ns.items(), key=lambda item: -item[1]))
    cause = f": {one.cause}" if one.cause else ""
    return f"{one.number}. after step {one.step}{cause}; {end}{again}; cost {sum(one.lost_ns.values()) / 1e9:.1f} s ({costs})"


def _trend_lines(trend: "MfuTrend") -> Iterable[str]:
    if trend.level is None:
        return
    level = f"{trend.level:.2%}" if trend.is_mfu else f"{trend.level:.4g} steps/s"
    if trend.best is None or trend.last is None:
        yield f"{level} over {trend.levels.size} windows of steps"
        return
    steps = f"steps {trend.last[0]} to {trend.last[1]}"
    yield f"{level} in the last quarter ({steps}); {trend.per_1000_steps:+.2%} in 1,000 steps (Theil's slope)"
    best = f"the best quarter before (steps {trend.best[0]} to {trend.best[1]})"
    side = "below" if trend.decay >= 0 else "above"
    verdict = f"{abs(trend.decay):.2%} {side} {best}, standard error {trend.error:.2%}"
    yield f"ALARM: it decays: {verdict}" if trend.is_alarm else f"no alarm: {verdict}"
    for one in trend.grown[:3]:
        if one.share >= _LEAST_SHARE:
            where = "" if one.device is None else f", most on device {one.device}"
            grew = f"{1e3 * one.before_s:.3f} ms to {1e3 * one.after_s:.3f} ms a step"
            yield f"  {one.share:>5.0%} of what a step takes longer: {one.segment}, {grew}{where}"


def _time(lasted_ns: int) -> str:
    return format_duration(lasted_ns / 1e9)

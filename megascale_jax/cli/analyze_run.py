"""`megascale analyze RUN`: what the devices of our own run computed and waited for, which are slow, and what that costs."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import typer
from rich.table import Table
from rich.text import Text

from megascale_jax.cli.job import wide_console
from megascale_jax.observe.output import printable
from megascale_jax.observe.report import write_json

if TYPE_CHECKING:
    from rich.console import Console

    from megascale_jax.views.run_what_if import RunCosts
    from megascale_jax.views.slow_devices import SlowDevices
    from megascale_jax.views.step_times import StepTimes


def analyze_run(run: Path, steps: tuple[int | None, int | None], top: int, heat_map: Path | None, json: Path | None) -> None:
    """Analyze a run's folder by its events; options as of `analyze`. Raises UsageError."""
    from megascale_jax.observe.event_store import read_events
    from megascale_jax.views.phases_replay import read_replays
    from megascale_jax.views.run_what_if import find_costs
    from megascale_jax.views.slow_devices import find_slow
    from megascale_jax.views.step_times import read_step_times

    first, end = steps
    times = read_step_times(run, steps)
    with read_events(run, steps=None if end is None else range(first or 0, end)) as store:
        replays, replay_notes = read_replays(store, times)
    slow = find_slow(times)
    costs = find_costs(replays, times.mesh, slow.devices)
    notes = (
        *dict.fromkeys((*store.notes, *times.notes)),
        *slow.notes,
        *replay_notes,
        *_doubts(costs),
        *(() if replays else ("no whole detailed step in the window, so nothing is replayed",)),
    )
    _show(wide_console(), times, slow, costs, top, notes)
    if json is not None:
        write_json(json, as_data(times, slow, costs, notes))
    if heat_map is not None:
        from megascale_jax.views.run_heat_map import plot_run

        plot_run(times, slow, run.resolve().name, heat_map)
        typer.echo(f"Picture: {heat_map}")


def _doubts(costs: "RunCosts") -> Iterable[str]:
    """Whether the replay is off by so much that its numbers say little."""
    if costs.gaps is not None and costs.slowdown is not None:
        off, more = 1 / costs.gaps - 1, costs.slowdown - 1
        if abs(off) >= max(_OFF, more / 2):
            word = "more" if off > 0 else "less"
            yield f"the replay takes {abs(off):.1%} {word} time than recorded, not little beside a slowdown of {more:.1%}: shares are rough"


_OFF = 0.01
"""What the replay may be off by in any case."""


def as_data(times: "StepTimes", slow: "SlowDevices", costs: "RunCosts", notes: Iterable[str]) -> dict[str, object]:
    """Everything that ``--json`` writes; times in seconds. Where keys differ from a trace's: docs/analysis_of_runs.md."""
    ranks = times.ranks or (-1,) * times.mesh.size
    return {
        "slowdown": costs.slowdown,
        "gaps": costs.gaps,
        "causes": costs.causes,
        "unexplained": costs.unexplained,
        "ranks": [{**asdict(worker), "device": worker.rank, "rank": ranks[worker.rank]} for worker in costs.workers],
        "stages": [{"pipe": pipe, "slowdown": part.slowdown, "explained": part.explained} for pipe, part in costs.stages.items()],
        "optypes": [{"optype": name, "slowdown": part.slowdown, "explained": part.explained} for name, part in costs.optypes.items()],
        "steps": costs.steps,
        "layout": {"mesh": times.mesh},
        "slow_devices": slow.devices,
        "window": {"first": times.steps[0], "last": times.steps[-1], "steps": times.steps.size, "step_s": _usual(times.whole)},
        "computed_s": {name: _usual(seconds) for name, seconds in times.computed.items()},
        "idle_s": _usual(times.idle),
        "waited_s": {f"{name}, {lane}": _usual(seconds) for (name, lane), seconds in times.waits.items()},
        "notes": list(notes),
    }


def _usual(seconds: np.ndarray) -> float:
    """Median over steps and devices of what is known."""
    return float(np.nanmedian(seconds))


def _show(console: "Console", times: "StepTimes", slow: "SlowDevices", costs: "RunCosts", top: int, notes: Iterable[str]) -> None:
    mesh = times.mesh
    console.print(
        f"steps {times.steps[0]} to {times.steps[-1]}, {mesh.pipe} stages x {mesh.data} data x {mesh.tensor} tensor; "
        f"a step takes {_usual(times.whole):.4g} s",
        highlight=False,
    )
    if costs.slowdown is not None and costs.gaps is not None:
        number = Text.assemble(
            ("slowdown ", "bold"), (f"{costs.slowdown:.3f}", "bold"), " against devices like the median of their stage; "
        )
        numbers = ", ".join(f"{one['step']:.0f}" for one in costs.steps)
        replayed = f"{'step' if len(costs.steps) == 1 else 'steps'} {numbers}"
        console.print(number + Text(f"the replay of {replayed} takes {1 / costs.gaps:.1%} of the time recorded"))
    console.print(Text("\ncauses", style="bold"))
    for cause in costs.causes:
        share = "   -" if np.isnan(cause.share) else f"{cause.share:>4.0%}"
        console.print(Text(f"  {share}  {cause.kind:<9} {printable(cause.name)}"))
    if not costs.causes:
        console.print(Text("  none stands out"))
    console.print()
    console.print(_times_table(times))
    if slow.devices and top:
        console.print()
        console.print(_slow_table(slow, top))
    for note in notes:
        console.print(Text(f"note: {printable(note)}", style="yellow"))


def _times_table(times: "StepTimes") -> Table:
    """Of each pass, the median device's seconds of a step: computed, and waited by lane."""
    from megascale_jax.observe.step_sums import WAIT_LANES

    grid = _grid("ms of a step, median", "computes", *(f"waits: {lane}" for lane in WAIT_LANES))
    rows: dict[str, dict[str, float]] = {name: {"compute": _usual(seconds)} for name, seconds in times.computed.items()}
    rows["idle"] = {"compute": _usual(times.idle)}
    for (name, lane), seconds in times.waits.items():
        rows.setdefault(name.removesuffix(" wait"), {})[lane] = _usual(seconds)
    for name, row in rows.items():
        grid.add_row(name, *(f"{1e3 * row[lane]:.3f}" if lane in row else "-" for lane in ("compute", *WAIT_LANES)))
    return grid


def _slow_table(slow: "SlowDevices", top: int) -> Table:
    grid = _grid("slow devices", "pipe", "data", "tensor", "pass", "excess", "ms a step", "evidence")
    for one in slow.devices[:top]:
        waits = "nobody waits" if np.isnan(one.waits_less) else f"waits less by {one.waits_less:.0%} of it"
        place = (str(one.pipe), str(one.data), str(one.tensor))
        grid.add_row(
            Text(printable(one.label)),
            *place,
            one.optype,
            f"{one.excess:.1%}",
            f"{1e3 * one.excess_s:.3f}",
            f"{one.parts} of 4 parts; {waits}",
        )
    return grid


def _grid(first: str, *others: str) -> Table:
    grid = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    grid.add_column(first)
    for name in others:
        grid.add_column(name, justify="left" if name in ("pass", "evidence") else "right")
    return grid

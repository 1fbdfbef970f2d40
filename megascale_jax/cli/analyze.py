"""`megascale analyze`: how much slower a job, ours or a traced one, was than it could have been, why, and on which ranks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from megascale_jax.cli.job import wide_console
from megascale_jax.errors import UsageError
from megascale_jax.observe.output import printable
from megascale_jax.observe.report import check_json_path, check_output_path, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from megascale_jax.views.causes import Findings
    from megascale_jax.views.operations import Operations
    from megascale_jax.views.what_if import Part, WhatIf

_PICTURE_ENDINGS = (".png", ".svg", ".pdf")


def analyze(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|PROFILE|TRACE",
            help="folder of a run; folder or *.xplane.pb of a profile; or a public trace-X.parquet with meta-X.yaml beside it",
            show_default=False,
        ),
    ],
    steps: Annotated[str | None, typer.Option(help="steps a <= step < b, as a:b; either may be left out", show_default="all")] = None,
    top: Annotated[int, typer.Option(help="ranks, of a run slow devices, of a profile operations, to show in the terminal", min=0)] = 5,
    heat_map: Annotated[
        Path | None,
        typer.Option(
            help="draw all ranks' slowdowns, of a run their excess by pass, into this file (.png, .svg or .pdf)", show_default=False
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="also write every number to this file", show_default=False)] = None,
) -> None:
    """Ask a run or a trace what would have been: how fast was the job without its stragglers, and what makes them slow?

    Of a run, devices are compared with their peers of the same stage by the stamps inside each step, pass by pass, and the
    phases of its detailed steps (train.events.detail_every) are replayed with slow devices made normal. Nothing needs to be set up.

    A trace is replayed as a graph of operations that wait for each other, once as recorded and once with every operation as
    fast as all others of its type. `slowdown` is the quotient. Ranks, stages and operation types are judged the same way: `alone` is the
    slowdown if only that part were as recorded, `explains` the share of the loss that making it normal would win back.

    `causes` name why, with shares that add up: `sequence` (micro-batches of unequal length), `stage` (unequal work by design),
    `worker` (slower than its peers: look at that machine), `optype` (pauses, a network that flaps). What has no cause is noise.

    Of a profile of jax.profiler (`megascale profile`): seconds of each device in computing, in communication that no computation hides, in
    copies and in nothing, and the operations that take longest.

    Traces are read in the public format of ByteDance's straggler traces. Formulas: docs/analysis.md, of runs
    docs/analysis_of_runs.md. Exit code 2: it cannot be used.
    """
    check_json_path(json)
    check_output_path(heat_map, "--heat-map")
    if heat_map is not None and heat_map.suffix.lower() not in _PICTURE_ENDINGS:
        raise UsageError(f"--heat-map {heat_map}: expected a name that ends in one of {', '.join(_PICTURE_ENDINGS)}")
    window = parse_steps(steps)
    if _is_profile(trace):
        from megascale_jax.cli.analyze_profile import analyze_profile

        if heat_map is not None:
            raise UsageError("--heat-map is drawn of a run or a trace; a profile has a table, and --json")
        analyze_profile(trace, window, top, json)
        return
    if trace.is_dir():
        from megascale_jax.cli.analyze_run import analyze_run

        analyze_run(trace, window, top, heat_map, json)
        return
    _analyze_trace(trace, window, top, heat_map, json)


def _analyze_trace(trace: Path, window: tuple[int | None, int | None], top: int, heat_map: Path | None, json: Path | None) -> None:
    from megascale_jax.views.causes import find_causes
    from megascale_jax.views.straggler_trace import read_straggler_trace
    from megascale_jax.views.what_if import WhatIf

    what_if = WhatIf(select_steps(read_straggler_trace(trace), window))
    findings = find_causes(what_if)
    _show(wide_console(), what_if, findings, top)
    if json is not None:
        write_json(json, as_data(what_if, findings))
    if heat_map is not None:
        _draw(what_if, findings, trace.stem, heat_map)
        typer.echo(f"Picture: {heat_map}")


def _is_profile(path: Path) -> bool:
    """A file by its name; a folder if it is no run's, and a profile is in it."""
    from megascale_jax.observe.events import EVENTS_FOLDER
    from megascale_jax.views.xplane import ENDING

    if not path.is_dir():
        return path.name.endswith(ENDING)
    return not (path / EVENTS_FOLDER).is_dir() and next(path.rglob(f"*{ENDING}"), None) is not None


def parse_steps(text: str | None) -> tuple[int | None, int | None]:
    """First step and the one after the last. Raises UsageError."""
    if text is None:
        return None, None
    first, colon, last = text.partition(":")
    try:
        window = (int(first) if first.strip() else None, int(last) if last.strip() else None)
    except ValueError:
        colon = ""
        window = (None, None)
    if not colon:
        raise UsageError(f"--steps {text!r}: expected a:b, such as 100:200, :200 or 100:")
    return window


def select_steps(operations: "Operations", window: tuple[int | None, int | None]) -> "Operations":
    """The operations of the steps ``first <= step < last``. Raises UsageError if there is none."""
    first, last = window
    chosen = (operations.step >= (operations.step.min() if first is None else first)) & (
        operations.step < (operations.step.max() + 1 if last is None else last)
    )
    if not chosen.any():
        low, high = int(operations.step.min()), int(operations.step.max())
        raise UsageError(f"--steps chooses no step of the trace, which has steps {low} to {high}")
    return operations.rows(chosen)


def as_data(what_if: "WhatIf", findings: "Findings") -> dict[str, object]:
    """Everything that ``--json`` writes; times in seconds."""
    layout = what_if.operations.layout
    per_step = zip(what_if.steps, what_if.recorded_s, what_if.real_s, what_if.ideal_s, strict=True)
    return {
        "slowdown": what_if.slowdown,
        "gaps": what_if.gaps,
        "causes": findings.causes,
        "unexplained": findings.unexplained,
        "ranks": what_if.workers,
        "stages": [{"pipe": pipe, **_numbers(part)} for pipe, part in what_if.stages.items()],
        "optypes": [{"optype": name, **_numbers(part)} for name, part in what_if.optypes.items()],
        "steps": [
            {"step": step, "recorded_s": recorded, "replayed_s": real, "ideal_s": ideal, "slowdown": real / ideal}
            for step, recorded, real, ideal in per_step
        ],
        "layout": layout,
        "measures": {
            "sequences": findings.sequences,
            "stage_work": findings.stage_work,
            "slow_workers": findings.slow_workers,
        },
    }


def _numbers(part: "Part") -> dict[str, float | None]:
    return {"slowdown": part.slowdown, "explained": part.explained}


def _show(console: "Console", what_if: "WhatIf", findings: "Findings", top: int) -> None:
    table, mesh = what_if.operations, what_if.operations.layout.mesh
    size = f"{what_if.steps.size} steps, {len(table):,} operations, {mesh.pipe} stages x {mesh.data} data x {mesh.tensor} tensor"
    console.print(Text(printable(f"{size}, {table.layout.schedule}")))
    real, ideal = float(what_if.real_s.mean()), float(what_if.ideal_s.mean())
    console.print(
        Text.assemble(
            ("slowdown ", "bold"),
            (f"{what_if.slowdown:.3f}", "bold"),
            f": a step takes {real:.3f} s, {ideal:.3f} s if all were alike; gaps between operations add {what_if.gaps - 1:.1%}\n",
        )
    )
    console.print(Text("causes", style="bold"))
    for cause in findings.causes:
        console.print(Text(f"  {cause.share:>4.0%}  {cause.kind:<9} {cause.name}"))
    if not findings.causes:
        console.print(Text("  none stands out"))
    elif abs(findings.unexplained) >= 0.005:
        console.print(Text(f"  {findings.unexplained:>4.0%}  in no cause", style="dim"))
    for slow in findings.hidden_workers:
        console.print(
            Text(f"  rank {slow.rank} is {slow.excess:.0%} slower than its peers in {slow.optype}, but next to nothing waits for it")
        )
    grid = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    grid.add_column("")
    for name in ("alone", "explains"):
        grid.add_column(name, justify="right")
    rows: list[tuple[str, Part]] = [(f"stage {pipe}", part) for pipe, part in what_if.stages.items()]
    rows += sorted(what_if.optypes.items(), key=lambda item: -item[1].slowdown)
    place = "pipe {0.pipe} data {0.data}" + (" tensor {0.tensor}" if mesh.tensor > 1 else "")
    rows += [(f"rank {worker.rank} ({place.format(worker)})", worker) for worker in what_if.workers[:top]]
    for name, part in rows:
        grid.add_row(name, f"{part.slowdown:.3f}", "-" if part.explained is None else f"{part.explained:.1%}")
    console.print()
    console.print(grid)


def _draw(what_if: "WhatIf", findings: "Findings", name: str, path: Path) -> None:
    from megascale_jax.views.heat_map import plot_heat_map
    from megascale_jax.views.style import shortened

    causes = "; ".join(f"{cause.kind} {cause.share:.0%}" for cause in findings.causes) or "no cause stands out"
    headline = f"{shortened(name, 40)}: {what_if.slowdown:.2f} times the ideal step time"
    plot_heat_map(what_if.workers, what_if.operations.layout.mesh, headline, shortened(causes, 120), path)

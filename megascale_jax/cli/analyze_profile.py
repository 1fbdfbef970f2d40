"""`megascale analyze PROFILE`: what devices did in a profile of jax.profiler, whether `megascale profile` took it or another program."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from megascale_jax.cli.job import wide_console
from megascale_jax.observe.output import printable
from megascale_jax.observe.report import write_json

if TYPE_CHECKING:
    from rich.console import Console

    from megascale_jax.views.profile_times import ProfileTimes

MOST_SHOWN = 16
"""Devices in the terminal; ``--json`` has all."""


def analyze_profile(path: Path, steps: tuple[int | None, int | None], top: int, json: Path | None) -> None:
    """Analyze a file or a folder; options as of `analyze`. Raises UsageError."""
    from megascale_jax.views.profile_times import measure
    from megascale_jax.views.xplane import ENDING, find_profiles, read_xplane

    found = measure([(file.name.removesuffix(ENDING), read_xplane(file)) for file in find_profiles(path)], steps)
    _show(wide_console(), found, top)
    if json is not None:
        write_json(json, found)


def _show(console: "Console", found: "ProfileTimes", top: int) -> None:
    count = len(found.steps)
    steps = f"steps {found.steps[0]} to {found.steps[-1]}" if count > 1 else f"step {found.steps[0]}" if count else "no step is named"
    per_step = "" if found.step_s is None else f", {1e3 * found.step_s:.3f} ms from begin to begin"
    console.print(Text(f"{len(found.devices)} devices; {steps}{per_step}"))
    if found.exposed_share is None:
        console.print(Text("no communication between devices\n"))
    else:
        console.print(Text.assemble(("not hidden ", "bold"), (f"{found.exposed_share:.1%}", "bold"), " of communication\n"))
    grid = _grid("ms", "window", "compute", "exposed", "copy", "idle", "(collective)")
    for one in found.devices[:MOST_SHOWN]:
        seconds = (one.window_s, one.compute_s, one.exposed_s, one.copy_s, one.idle_s, one.collective_s)
        grid.add_row(Text(printable(f"{one.source} {one.device}")), *(f"{1e3 * value:.3f}" for value in seconds))
    console.print(grid)
    if len(found.devices) > MOST_SHOWN:
        console.print(Text(f"and {len(found.devices) - MOST_SHOWN} more (--json lists all)"))
    if top:
        console.print()
        grid = _grid("operations, longest first", "kind", "runs", "devices", "ms", "share")
        for one in found.operations[:top]:
            name = printable(one.name if len(one.name) <= 80 else f"{one.name[:77]}...")
            grid.add_row(Text(name), one.kind, f"{one.count:,}", str(one.devices), f"{1e3 * one.total_s:.3f}", f"{one.share:.1%}")
        console.print(grid)
    for note in found.notes:
        console.print(Text(f"note: {printable(note)}", style="yellow"))


def _grid(head: str, *names: str) -> Table:
    grid = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    grid.add_column(head)
    for name in names:
        grid.add_column(name, justify="right")
    return grid

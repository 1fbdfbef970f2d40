"""`megascale why`: what a run that stands still waits for, from its event files alone.

Exit code 0: it goes on, or has ended; 1: it hangs or is slow; 2: that cannot be told, or the request cannot be carried out.
"""

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from megascale_jax.errors import UsageError
from megascale_jax.observe.output import printable
from megascale_jax.observe.report import json_ready

if TYPE_CHECKING:
    from megascale_jax.views.why import Judgement, Outcome, RankState

EXIT_CODES: "dict[Outcome, int]" = {"running": 0, "ended": 0, "hang": 1, "slow": 1, "unknown": 2}
_STYLES: "dict[Outcome, str]" = {"running": "green", "ended": "green", "hang": "red", "slow": "yellow", "unknown": "yellow"}


def why(
    run: Annotated[Path | None, typer.Argument(help="run folder", show_default=False)] = None,
    flight_recorder: Annotated[
        list[Path] | None,
        typer.Option(
            "--flight-recorder", metavar="FOLDER|FILE", help="JSON dumps of PyTorch's NCCL flight recorder, one a rank", show_default=False
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON: verdict, reason, named, suspects, every rank")] = False,
) -> None:
    """Say which rank a run that stands still waits for, and what speaks for it. Works while it hangs, and afterwards.

    With --flight-recorder, of a job of PyTorch: by its dumps (TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1), written as
    JSON; the rank is the last number in a file's name. Ranks whose collectives do not match are named as well.

    Exit code 0: it goes on or has ended; 1: it hangs or is slow; 2: that cannot be told.
    """
    if (run is None) == (not flight_recorder):
        raise UsageError("give a run folder, or --flight-recorder with a folder of dumps, and not both")
    if flight_recorder:
        _why_dumps(flight_recorder, json)
    assert run is not None, "there are no dumps"
    from megascale_jax.views.progress import read_progress
    from megascale_jax.views.why import judge

    found = judge(read_progress(run))
    if json:
        typer.echo(json_module.dumps(json_ready(found), indent=1))
    else:
        print_judgement(found, Console())
    raise typer.Exit(EXIT_CODES[found.verdict])


def _why_dumps(paths: list[Path], json: bool) -> NoReturn:
    from megascale_jax.views.desync import judge_dumps
    from megascale_jax.views.flight_recorder import read_dumps

    found = judge_dumps(read_dumps(paths))
    if json:
        rest = {"mismatches": found.mismatches, "waits": found.waits, "notes": found.notes}
        typer.echo(json_module.dumps(json_ready(found.judgement) | json_ready(rest), indent=1))
    else:
        print_judgement(found.judgement, Console())
        for note in found.notes:
            Console().print(Text(f"note: {printable(note)}", style="yellow"), soft_wrap=True)
    raise typer.Exit(EXIT_CODES[found.judgement.verdict])


def print_judgement(found: "Judgement", console: Console) -> None:
    """Print the verdict, the cube, and the ranks that matter."""
    from megascale_jax.views.cube import cube
    from megascale_jax.views.why import MOST_NAMED

    age = f"attempt {found.attempt}, as of {found.age_s:.0f} s ago" if found.until else f"attempt {found.attempt}"
    console.print(Text.assemble("Verdict: ", (found.verdict, f"bold {_STYLES[found.verdict]}"), f" ({age})"))
    console.print(Text(printable(found.reason)))
    console.print()
    console.print(cube(found), soft_wrap=True)
    chosen = {*found.named, *found.suspects}
    shown = [one for one in found.ranks if one.rank in chosen][:MOST_NAMED]
    if shown:
        console.print()
    for one in shown:
        console.print(Text(printable(_line(one))))
    if len(chosen) > len(shown):
        console.print(Text(f"and {len(chosen) - len(shown)} more (--json lists all)"))


def _line(one: "RankState") -> str:
    since = f" for {one.since_s:.1f} s" if one.since_s is not None else ""
    note = f"; {one.note}" if one.note else ""
    host = f" {one.host}" if one.host else ""
    return f"rank {one.rank}{host}: {one.state}, {one.operation}{since}{note}"

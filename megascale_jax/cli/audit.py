"""`megascale audit`: read a driver's audit log, and check that nobody changed it. Exit code 1: the chain is broken."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from megascale_jax.observe.report import check_json_path, write_json

app = typer.Typer(help="Read and verify the audit log of a driver.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(metavar="FILE", help="the audit log", show_default=False)]


@app.command()
def verify(
    file: File,
    head: Annotated[str | None, typer.Option("--head", help="a hash noted before, which must be in the chain", show_default=False)] = None,
    json: Annotated[Path | None, typer.Option("--json", help="also write the result to this file", show_default=False)] = None,
) -> None:
    """Check that no line was changed, removed or put in; names the first that was. Exit code 1 when there is one.

    A chain cannot show that its last lines are missing: note the hash that this prints somewhere else, and pass it to --head later.
    """
    from megascale_jax.cluster.link import audit

    check_json_path(json)
    verdict = audit.verify(file, head)
    if json is not None:
        write_json(json, verdict)
    console = Console(soft_wrap=True)
    if verdict.problem:
        console.print(Text.assemble(("broken ", "red"), f"{file}: {verdict.problem}"))
        raise typer.Exit(1)
    console.print(f"{file} is whole: {verdict.lines:,} lines, the newest has the hash {verdict.head}", highlight=False)


@app.command()
def show(
    file: File,
    last: Annotated[int, typer.Option("--last", min=1, help="how many lines, from the end")] = 50,
    action: Annotated[str | None, typer.Option(help="only actions that begin so, such as link.", show_default=False)] = None,
) -> None:
    """Print the newest lines of an audit log. What is shown is not verified."""
    from collections import deque

    from megascale_jax.cluster.link import audit

    console = Console(soft_wrap=True)
    for record in deque((record for record in audit.records(file) if record.action.startswith(action or "")), maxlen=last):
        when = datetime.fromtimestamp(record.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
        actor = f"{record.actor} ({record.role})" if record.role else record.actor
        # JSON escapes control characters, which the details of a refused peer could send to the terminal.
        console.print(Text(f"{record.index:>6}  {when} UTC  {actor}  {record.action}  {json.dumps(record.details)}"))

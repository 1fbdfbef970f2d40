"""`megascale job`: look at a driven run and give its driver orders."""

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megascale_jax.errors import UsageError

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Look at a driven run, and give its driver orders.")

Run = Annotated[Path, typer.Argument(help="run folder that `megascale drive` was given", show_default=False)]
Node = Annotated[str, typer.Argument(help="name of the node, such as node-2", show_default=False)]
TokenFile = Annotated[
    Path | None, typer.Option("--token", help="your token's file; default: the one of the user who started the job", show_default=False)
]
Driver = Annotated[
    str | None,
    typer.Option("--driver", metavar="HOST:PORT", help="where the driver listens; RUN is then not looked at", show_default=False),
]
SecurityFolder = Annotated[
    Path | None,
    typer.Option("--security", metavar="FOLDER", help="ca.pem, client.pem, client.key, job; default: the run's own", show_default=False),
]


@app.command()
def status(
    run: Run,
    driver: Driver = None,
    security: SecurityFolder = None,
    token: TokenFile = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Phase, nodes, progress, incidents. Needs the role view."""
    from megascale_jax.cluster.asking import ask_driver

    answer = ask_driver(run, token, "status", driver=driver, security=security)
    if json:
        typer.echo(json_module.dumps(answer.status, indent=1))
    else:
        _show(answer.status)


@app.command()
def stop(run: Run, driver: Driver = None, security: SecurityFolder = None, token: TokenFile = None) -> None:
    """Save and end the job. Needs the role admin."""
    _order(run, token, "stop", driver=driver, security=security)


@app.command()
def restart(run: Run, driver: Driver = None, security: SecurityFolder = None, token: TokenFile = None) -> None:
    """Save, end all training processes, and start them again. Needs the role admin."""
    _order(run, token, "restart", driver=driver, security=security)


@app.command()
def rewind(
    run: Run,
    to_step: Annotated[int, typer.Option("--to-step", min=0, help="go on from the newest checkpoint at or before it", show_default=False)],
    skip_samples: Annotated[
        str, typer.Option("--skip-samples", metavar="FIRST:END", help="never train on FIRST to END - 1", show_default=False)
    ],
    driver: Driver = None,
    security: SecurityFolder = None,
    token: TokenFile = None,
) -> None:
    """Give up what was trained after a step, checkpoints too, and skip the samples of a loss spike. Needs the role admin."""
    first, _, end = skip_samples.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise UsageError(f"--skip-samples {skip_samples}: expected FIRST:END, two numbers with END above FIRST, such as 3200:3840")
    _order(run, token, "rewind", driver=driver, security=security, rewind=(to_step, int(first), int(end)))


@app.command()
def evict(run: Run, node: Node, driver: Driver = None, security: SecurityFolder = None, token: TokenFile = None) -> None:
    """Take a node out of the job for good; a spare takes its place. Needs the role admin, and another admin's `confirm`."""
    _order(run, token, "evict", driver=driver, security=security, node=node)


@app.command()
def confirm(
    run: Run,
    number: Annotated[int, typer.Argument(help="of the eviction, as `evict` said it", show_default=False)],
    driver: Driver = None,
    security: SecurityFolder = None,
    token: TokenFile = None,
) -> None:
    """Confirm another admin's eviction. Needs the role admin."""
    _order(run, token, "confirm", driver=driver, security=security, number=number)


@app.command()
def cordon(run: Run, node: Node, driver: Driver = None, security: SecurityFolder = None, token: TokenFile = None) -> None:
    """Give a node no new place; it keeps the one it has until the next restart. Needs the role operate."""
    _order(run, token, "cordon", driver=driver, security=security, node=node)


@app.command()
def uncordon(run: Run, node: Node, driver: Driver = None, security: SecurityFolder = None, token: TokenFile = None) -> None:
    """Take a cordoned or evicted node back, as a spare. Needs the role operate, for an evicted one admin."""
    _order(run, token, "uncordon", driver=driver, security=security, node=node)


def _order(run: Path, token: Path | None, action: str, **values: Any) -> None:
    from megascale_jax.cluster.asking import ask_driver

    answer = ask_driver(run, token, action, **values)
    if not answer.is_done:
        raise UsageError(answer.text)
    typer.echo(answer.text)


def wide_console() -> Console:
    """A console whose tables are not squeezed where there is no terminal."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else Console(soft_wrap=True, width=160)


def _show(found: dict[str, Any]) -> None:
    console = wide_console()
    console.print(Text(f"{found['phase']}, attempt {found['attempt']}, step {found['step']} of {found['steps']}  {found['outcome']}"))
    table = Table("rank", "node", "status", "step", "in section", "process", title_justify="left")
    ranks = {name: str(rank) for rank, name in enumerate(found["seats"])}
    for name, node in sorted(found["nodes"].items(), key=lambda item: str(ranks.get(item[0], f"~{item[0]}"))):
        process = node["processes"][0] if node["processes"] else None
        table.add_row(
            ranks.get(name, "-"),
            name,
            node["status"] + (f": {node['reason']}" if node["reason"] else ""),
            "-" if process is None else str(process["step"]),
            "-" if process is None else f"{process['section']} {process['in_section_s']:.1f} s",
            "-" if process is None else f"{process['pid']} {process['state']}",
        )
    console.print(table)
    for incident in found["incidents"]:
        console.print(Text(incident["text"]))
    for name, one in found["slow"].items():
        checks = f"; checks: {one['findings']}" if one["findings"] else ""
        times = f", {one['isolations']} isolation(s)" if one["isolations"] else ""
        console.print(Text(f"slow: {name} {one['stage']} {found['now_s'] - one['since_s']:.0f} s ago{times}: {one['evidence']}{checks}"))
    for one in found.get("requests", ()):
        asked = f"{one['command']} {one['node']}".strip()
        confirm = f"megascale job confirm RUN {one['number']}"
        console.print(Text(f"waiting for another admin: {asked}, asked for by {one['by']}, {one['left_s']:.0f} s left: {confirm}"))
    for what, text in found["where"].items():
        console.print(Text(f"{what}: {text}", style="dim"))
    for at_s, text in found["observed"]:
        console.print(Text(f"{found['now_s'] - at_s:.0f} s ago: {text}"))
    for alarm in found["alarms"]:
        console.print(Text(f"alarm: {alarm}", style="bold red"))

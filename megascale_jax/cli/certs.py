"""`megascale certs`: the certificates and tokens of the control link between a driver, its executors and its operators."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megascale_jax.cluster.link.tokens import Role
from megascale_jax.errors import UsageError

app = typer.Typer(help="Make the certificates and tokens of a driver's control link.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="folder of the certificates, for their owner only", show_default=False)]
ForceOption = Annotated[bool, typer.Option("--force", help="replace files that are there")]
JobOption = Annotated[str | None, typer.Option("--job", help="identity of the job that tokens are for", show_default=False)]


@app.command()
def init(
    folder: Folder,
    host: Annotated[
        list[str] | None, typer.Option("--host", help="name or address at which executors reach the driver; repeat", show_default=False)
    ] = None,
    job: JobOption = None,
    days: Annotated[int, typer.Option(min=1, help="until the certificates expire")] = 365,
    force: ForceOption = False,
) -> None:
    """Make an authority, certificates for the driver and for its clients, and the key that signs tokens.

    The driver's certificate is also for localhost, 127.0.0.1 and ::1. Executors and operators need `ca.pem`, `client.pem`, `client.key`,
    `job` and a token of their own; `ca.key`, `driver.key` and `signing.key` stay with the driver. A new signing key voids all tokens.
    """
    from megascale_jax.cluster.link.certificates import make_folder

    for path in make_folder(folder, host or [], job=job, days=days, force=force):
        Console(soft_wrap=True).print(str(path), highlight=False)


@app.command()
def token(
    folder: Folder,
    name: Annotated[str, typer.Option("--name", help="who holds it: a node's name, or a person's", show_default=False)],
    role: Annotated[Role, typer.Option("--role", help="node: an executor; view, operate, admin: an operator", show_default=False)],
    days: Annotated[float, typer.Option(min=0.001, help="until it expires")] = 30.0,
    job: JobOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="default FOLDER/NAME.token", show_default=False)] = None,
    force: ForceOption = False,
) -> None:
    """Sign a token, and write it to a file for its owner only. Whoever has the file is NAME until it expires."""
    from megascale_jax.cluster.link.security import Security, make_token

    security = Security.load(folder, role="driver")
    if output is None and "/" in name:
        raise UsageError(f"no token for {name!r}: expected letters, digits, '.', '_' and '-', at most 63 of them")
    path = output or folder / f"{name}.token"
    made = make_token(security, name, role, days=days, path=path, job=job, force=force)
    Console(soft_wrap=True).print(f"{path}: {made.name} as {made.role} of job {made.job}, for {days:g} days", highlight=False)

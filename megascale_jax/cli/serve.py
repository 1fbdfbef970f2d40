"""`megascale serve`: a run in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from megascale_jax.errors import RunFolderError

HOST, PORT = "127.0.0.1", 8080


def serve(
    run: Annotated[Path, typer.Argument(help="run folder, of a run that goes on or is over", show_default=False)],
    host: Annotated[str, typer.Option(help="address to listen at; any but this machine's own needs --security")] = HOST,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen at; 0: any")] = PORT,
    security: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="made by `megascale certs init`: serve over TLS, and ask everyone for a token", show_default=False
        ),
    ] = None,
) -> None:
    """Show a run in a browser: heat map, 3D view, and why it stands still; kept fresh while it trains. Ctrl-C ends it.

    At 127.0.0.1 everyone on this machine may look. From another machine come through a tunnel, `ssh -L 8080:127.0.0.1:8080 HOST`, or open
    it to others with TLS and tokens:

        megascale certs init FOLDER --host NAME-OF-THIS-MACHINE

        megascale certs token FOLDER --name ANN --role view

        megascale serve runs/quickstart --host 0.0.0.0 --security FOLDER

    The browser asks for the token; `FOLDER/ca.pem` is the authority that it should trust. Commands (roles operate and admin) need a token
    in any case. Nothing is loaded from the network, and nothing in the run folder is changed.
    """
    from megascale_jax.cluster.job import job_folder
    from megascale_jax.views.dashboard.app import make_app
    from megascale_jax.views.dashboard.guard import guard_for
    from megascale_jax.views.dashboard.run_view import RunView
    from megascale_jax.views.dashboard.server import bound, browser_context, url_of
    from megascale_jax.views.dashboard.server import serve as serve_app

    if not run.is_dir():
        raise RunFolderError(f"{run} is no folder; expected that of a run, such as runs/quickstart")
    guard = guard_for(host, security, job_folder(run))
    certified = guard.security if guard.needs_token else None
    if certified is not None:
        browser_context(certified)
    listening = bound(host, port)
    view = RunView(run)
    typer.echo(f"{view.name} at {url_of(listening, is_tls=certified is not None)} (Ctrl-C ends it)")
    try:
        serve_app(make_app(view, guard), listening, certified)
    finally:
        view.close()

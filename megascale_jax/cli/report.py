"""`megascale report`: a run in one file, for a postmortem."""

import time
from pathlib import Path
from typing import Annotated

import typer

from megascale_jax.errors import RunFolderError
from megascale_jax.observe.report import check_output_path, replace_file


def report(
    run: Annotated[Path, typer.Argument(help="run folder, of a run that goes on or is over", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = Path("report.html"),
) -> None:
    """Write a run into one HTML file: how it ended, loss, where the time went, incidents, slow devices, its slowest step, configuration.

    The file needs no server, script or network, so it can be mailed, archived and printed. A damaged run has a report too, which says what
    could not be read.
    """
    if not run.is_dir():
        raise RunFolderError(f"{run} is no folder; expected that of a run, such as runs/quickstart")
    check_output_path(output, "--output")
    from megascale_jax.views.dashboard.report import READ_S, report_html
    from megascale_jax.views.dashboard.run_view import RunView

    view = RunView(run, patience_s=READ_S)
    try:
        content = report_html(view, time.time())
    finally:
        view.close()
    replace_file(output, content)
    typer.echo(f"{view.name}: {output}, {len(content) / 1e3:,.0f} kB")

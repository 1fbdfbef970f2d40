"""`megascale keep`: hold a run's newest states on this host, in the foreground, for whoever supervises processes himself."""

from pathlib import Path
from typing import Annotated

import typer


def keep(
    run: Annotated[Path, typer.Argument(help="folder of a run that has been started at least once", show_default=False)],
    idle_s: Annotated[float, typer.Option(help="seconds without a rank after which it ends")] = 600.0,
) -> None:
    """Hold the newest states of this host's ranks in memory, and carry them to storage and to the next host.

    Ranks start a keeper by themselves where none answers; it lives in a session of its own and outlives them. Start one by
    hand where a supervisor must own it (a container, a systemd unit, a Slurm step), before the ranks. It gives way to
    everything else on CPU and disk, ends at once when the run is over, and otherwise when no rank has come back for a while.
    """
    from megascale_jax.checkpoint.keeper_client import keeper_folder
    from megascale_jax.checkpoint.keeper_process import serve
    from megascale_jax.train.folder import RunFolder

    folder = RunFolder(run)
    folder.experiment()
    serve(keeper_folder(f"{folder.identity()} {folder.storage().url}"), idle_s)

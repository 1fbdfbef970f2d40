"""The keeper as a process: priority, signals, command line.

python -m megascale_jax.checkpoint.keeper_process FOLDER        # what a rank starts, and `megascale keep RUN_FOLDER` runs
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from filelock import Timeout

from megascale_jax.checkpoint.keeper import IDLE_S, Keeper
from megascale_jax.errors import UsageError
from megascale_jax.observe.output import outlive_full_disks
from megascale_jax.observe.priority import lowest_priority


def serve(folder: Path, idle_s: float) -> None:
    """Be the keeper in ``folder`` until there is no reason to. Files that it makes are for this user only.

    SIGTERM, SIGINT and SIGHUP ask it to end once no rank is connected and no work is left. Raises UsageError when another one serves.
    """
    os.umask(0o077)
    lowest_priority()
    keeper = Keeper(folder, idle_s)

    def stop(*_: object) -> None:
        keeper.stopping = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        keeper.serve()
    except Timeout as error:
        raise UsageError(f"another keeper serves {folder}; it ends by itself when its run is over") from error


def main() -> None:
    """Entry point of the process that a rank starts."""
    outlive_full_disks()
    parser = argparse.ArgumentParser(description="Hold the newest states of a run's local ranks, and carry them to storage.")
    parser.add_argument("folder", type=Path, help="folder of the keeper's lock and log; its name is also that of the socket")
    parser.add_argument("--idle-s", type=float, default=IDLE_S, help="seconds without a rank after which it ends")
    options = parser.parse_args()
    try:
        serve(options.folder, options.idle_s)
    except UsageError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

"""The executor as a process: `megascale execute`, and what the local backend starts for each node.

    python -m megascale_jax.cluster.executor_process --driver HOST:PORT --security FOLDER --node NODE --folder FOLDER -- COMMAND...

COMMAND is the argv of a training process; the overrides of an attempt are added to it. Exit code 0: the job is over; 75: this node leaves
it (evicted, told by a signal, or without a driver for too long), and whoever runs executors may start another one.
"""

import argparse
import asyncio
import logging
import os
import platform
import secrets
import signal
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import TypeAdapter

from megascale_jax.cluster.counters import read_counters
from megascale_jax.cluster.diagnose.request import Options, switch_of
from megascale_jax.cluster.diagnose.run import run_checks
from megascale_jax.cluster.executor import Executor
from megascale_jax.cluster.executor_file import record_executor
from megascale_jax.cluster.job import token_file
from megascale_jax.cluster.link.client import LinkClient
from megascale_jax.cluster.link.security import Security
from megascale_jax.cluster.messages import DiagnosisOrder, Hello, ToNode
from megascale_jax.cluster.ports import address_towards, free_ports, parse_address
from megascale_jax.cluster.processes import TrainingProcesses
from megascale_jax.cluster.warm import COMMAND
from megascale_jax.errors import UsageError
from megascale_jax.observe.output import outlive_full_disks
from megascale_jax.observe.provenance import library_versions

_logger = logging.getLogger(__name__)
_PORTS = 16
"""For the coordinators of as many attempts, in turn."""
_LOCK_S = 5.0
"""Longest wait for an executor of the same folder to be gone."""
EXIT_LEFT = os.EX_TEMPFAIL


def software() -> dict[str, str]:
    """Versions that should be the same on all nodes of a job."""
    driver = Path("/proc/driver/nvidia/version")
    versions = {"kernel": platform.release(), **{name: str(version) for name, version in library_versions().items()}}
    if driver.is_file():
        versions["nvidia driver"] = driver.read_text().splitlines()[0]
    return versions


def examine(order: DiagnosisOrder, folder: Path) -> list[Mapping[str, object]]:
    """Run the checks of an order in probe processes; their outcomes as JSON values."""
    options = Options(folders=(str(folder),), pair=order.pair)
    return [outcome.model_dump(mode="json") for outcome in run_checks(order.checks, options, limit_s=order.limit_s)]


def own_command(command: list[str]) -> list[str]:
    """``megascale ...`` as the interpreter of this installation runs it, which a process that waits with its imports done can become."""
    return [sys.executable, *COMMAND, *command[1:]] if command[0] == "megascale" else command


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Start, watch and stop the training process of this node, as a driver wants it.")
    parser.add_argument("--driver", required=True, metavar="HOST:PORT", help="where the driver listens")
    parser.add_argument(
        "--security", required=True, type=Path, metavar="FOLDER", help="made by `megascale certs init`; the token is FOLDER/tokens/NODE"
    )
    parser.add_argument("--node", required=True, help="name of this node in the job")
    parser.add_argument(
        "--folder",
        type=lambda text: Path(os.path.expandvars(text)),
        help="of this node, on a local disk: logs, marks; may have variables of this node; default: below SLURM_TMPDIR, TMPDIR or /tmp",
    )
    parser.add_argument("--token", type=Path, metavar="FILE", help="this node's token, where it is not in the folder of the certificates")
    parser.add_argument("--address", help="where other nodes reach this one; default: the address from which it reaches the driver")
    parser.add_argument("--machine", default="", help="what the node runs on: evicted, and back on another machine, it is a new node")
    parser.add_argument("command", nargs="+", help="argv of a training process, after --")
    return parser.parse_args(arguments)


def scratch_folder(environment: Mapping[str, str], node: str) -> Path:
    """A folder for a node on a disk of its own: below ``SLURM_TMPDIR``, ``TMPDIR``, or wherever this machine keeps such things.

    It is this user's alone; raises UsageError when somebody else has it or may write there.
    """
    named = (Path(environment[name]) for name in ("SLURM_TMPDIR", "TMPDIR") if environment.get(name))
    place = next((path for path in named if path.is_dir() and os.access(path, os.W_OK)), Path(tempfile.gettempdir()))
    folder = place / f"megascale-{os.geteuid()}-{environment.get('SLURM_JOB_ID', 'job')}" / node
    for path in (folder.parent, folder):
        path.mkdir(exist_ok=True, mode=0o700)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UsageError(f"{path} is no folder of this user that nobody else may write to; remove it, or name another with --folder")
    return folder


async def execute(options: argparse.Namespace) -> bool:
    """Be the executor of this node until the driver lets it go or a signal ends it; whether the job is over.

    Raises UsageError for a bad request.
    """
    driver = parse_address(options.driver, "--driver")
    security = Security.load(options.security, role="client", token=options.token or token_file(options.security, options.node))
    address = options.address or address_towards(driver)
    hello = Hello(
        node=options.node,
        incarnation=secrets.token_hex(8),
        address=address,
        ports=free_ports(address, _PORTS),
        software=software(),
        switch=switch_of(os.environ),
        machine=options.machine,
    )
    environment = {"MEGASCALE_KEEPER": str(options.folder / "keeper"), "MEGASCALE_LAUNCHER": "megascale drive"}
    link = LinkClient(
        security,
        driver,
        TypeAdapter(ToNode),
        received=lambda message: executor.received(message),
        connected=lambda: executor.connected(),
        lost=lambda why: _logger.info("the driver is away: %s", why),
    )
    executor = Executor(
        hello,
        own_command(options.command),
        dict(os.environ) | environment,
        TrainingProcesses(),
        link,
        lambda order: examine(order, options.folder),
        lambda: read_counters(options.folder),
        options.folder,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: setattr(executor, "leaving", True))
    talking = asyncio.create_task(link.run())
    try:
        await executor.run()
        await asyncio.sleep(0.2)  # the last beat is on its way
    finally:
        link.close()
        talking.cancel()
    return executor.is_over


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the process."""
    outlive_full_disks()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    options = parse(arguments)
    options.folder = options.folder or scratch_folder(os.environ, options.node)
    options.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = FileLock(options.folder / "executor.lock", timeout=_LOCK_S)
    try:
        lock.acquire()
    except Timeout as error:
        raise UsageError(f"another executor has {options.folder}; a node has one") from error
    record_executor(options.folder)
    _logger.info("executor of %s, process %d on %s; logs: %s", options.node, os.getpid(), platform.node(), options.folder)
    sys.exit(0 if asyncio.run(execute(options)) else EXIT_LEFT)


if __name__ == "__main__":
    main()

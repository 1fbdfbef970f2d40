"""`megascale drive` and `megascale execute`: a run that does not stop, from the driver's and from a node's side."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from megascale_jax.cluster.lifecycle import ENDS, Phase
from megascale_jax.config.load import load_experiment
from megascale_jax.errors import ConfigError, JournalError, RunFolderError
from megascale_jax.observe.output import outlive_full_disks

if TYPE_CHECKING:
    from megascale_jax.cluster.backends.base import Engine
    from megascale_jax.cluster.journal import Journal
    from megascale_jax.cluster.suspects import Suspects
    from megascale_jax.config.schema import Experiment
    from megascale_jax.train.folder import RunFolder


_JOURNAL_S, _AGAIN_S = 600.0, 2.0
"""Longest wait for a journal that cannot be opened, and the pause between two tries."""


class BackendName(StrEnum):
    """What runs the nodes."""

    LOCAL = "local"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"


def drive(
    experiment: Annotated[str, typer.Argument(help="name of an experiment (`megascale config list`) or a YAML file", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="changes, such as cluster.grace_s=30", show_default=False)] = None,
    backend: Annotated[
        BackendName,
        typer.Option(
            help="local: nodes are processes of this machine; slurm: nodes of the allocation that this runs in; kubernetes: pods, see "
            "`megascale launch render`"
        ),
    ] = BackendName.LOCAL,
    nodes: Annotated[int, typer.Option(min=1, help="nodes that train")] = 1,
    spares: Annotated[int, typer.Option(min=0, help="further nodes that stand by")] = 0,
    node_order: Annotated[
        Path | None, typer.Option(help="file with the nodes in the order of their ranks, of `megascale place`", show_default=False)
    ] = None,
    run_folder: Annotated[Path | None, typer.Option(help="where the run lives; default runs/EXPERIMENT", show_default=False)] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="remove an earlier run in that folder and start from step 0")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of the control link; 0: any")] = 0,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="where the nodes reach the driver, if not where it listens: a relay", show_default=False),
    ] = None,
    security: Annotated[
        Path | None,
        typer.Option(envvar="MEGASCALE_SECURITY", help="made by `megascale certs init`; default: the run's own", show_default=False),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option("--metrics-port", min=0, max=65535, help="numbers for Prometheus at 127.0.0.1 here; 0: any port", show_default=False),
    ] = None,
    dashboard_port: Annotated[
        int | None,
        typer.Option(
            "--dashboard-port", min=1, max=65535, help="the run in a browser at 127.0.0.1, see `megascale serve`", show_default=False
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="also write the job's end and its incidents to this file", show_default=False)
    ] = None,
) -> None:
    """Train an experiment on several nodes and keep it running: watch, diagnose, replace, restore.

    One executor a node starts, watches and stops its training process. Ctrl-C saves and stops. A driver that was killed is
    started again with the same command: it reads its journal and takes over the executors that run on.

    With Slurm: `sbatch --nodes 10 launch/slurm-drive.sbatch gpt-13b --nodes 8 --spares 2`, or this command with --backend slurm within
    `salloc --no-kill --nodes 10`. The run folder must be on a file system that all nodes share.

    Exit code 0: all steps done, or stopped by an operator; 20: no progress after several recoveries; 21: too few nodes are left;
    2: the request cannot be carried out.
    """
    from megascale_jax.cluster.driver_process import held
    from megascale_jax.cluster.job import is_under_way, job_folder
    from megascale_jax.cluster.moves import EXIT_NO_NODES
    from megascale_jax.cluster.ports import parse_address
    from megascale_jax.config.layout import MeshShape
    from megascale_jax.observe.report import check_json_path, write_json
    from megascale_jax.train.folder import RunFolder

    outlive_full_disks()
    check_json_path(json)
    resolved = load_experiment(experiment, overrides or [])
    mesh = MeshShape.of(resolved.parallel).size
    if mesh % nodes:
        raise ConfigError(f"a mesh of {mesh} devices does not divide over {nodes} nodes; give a divisor with --nodes, or another mesh")
    folder = RunFolder((run_folder or Path("runs") / resolved.name).absolute())
    command = [sys.executable, "-m", "megascale_jax.cli.main", "train", experiment, *(overrides or []), "--run-folder", str(folder.path)]
    relay = parse_address(advertise, "--advertise") if advertise is not None else None
    engine = open_engine(backend, nodes, spares, resolved)
    ordered = _with_order(resolved, node_order, nodes, spares, None if backend is BackendName.KUBERNETES else engine.names)
    folder.check_clear() if fresh else folder.check(resolved)
    with held(folder.path):
        if fresh and is_under_way(job_folder(folder.path)):
            raise RunFolderError(
                f"a job is under way in {folder.path}: the same command without --fresh takes it over, `megascale job stop` then ends it; "
                "to throw it away with all its checkpoints, remove the folder"
            )
        if fresh:
            with folder.taken(resolved, fresh=True):
                pass
        status = _drive(_Request(ordered, folder, command, nodes, engine, port, relay, security, metrics_port, dashboard_port))
    if status is not None:
        if json is not None:
            write_json(json, status)
        if status["exit_code"] == EXIT_NO_NODES and (done := engine.start_over()):
            say(done)
        _end(status)


def _with_order(experiment: "Experiment", path: Path | None, nodes: int, spares: int, known: Sequence[str] | None) -> "Experiment":
    """With the order of a file, if one is given. Raises UsageError for an order that does not fit the nodes."""
    from megascale_jax.cluster.node_order import check_order, read_names

    order = read_names(path, "--node-order") if path is not None else experiment.cluster.node_order
    if order:
        origin = f"--node-order {path}" if path is not None else "cluster.node_order"
        check_order(order, origin, nodes=nodes, spares=spares, known=known)
    return experiment.model_copy(update={"cluster": experiment.cluster.model_copy(update={"node_order": tuple(order)})})


def open_engine(backend: BackendName, nodes: int, spares: int, experiment: "Experiment") -> "Engine":
    """Where the nodes come from. Raises UsageError when they are not to be had here."""
    match backend:
        case BackendName.LOCAL:
            from megascale_jax.cluster.backends.local import LocalEngine

            return LocalEngine(nodes + spares)
        case BackendName.SLURM:
            from megascale_jax.cluster.backends.slurm import SlurmEngine

            return SlurmEngine(nodes, spares, experiment.cluster.slurm, say)
        case BackendName.KUBERNETES:
            from megascale_jax.cluster.backends.kubernetes.engine import KubernetesEngine

            return KubernetesEngine(nodes + spares, experiment.cluster.kubernetes)


@dataclass(frozen=True)
class _Request:
    """A job to be driven."""

    experiment: "Experiment"
    folder: "RunFolder"
    command: list[str]
    nodes: int
    engine: "Engine"
    port: int
    relay: tuple[str, int] | None
    security: Path | None
    metrics_port: int | None
    dashboard_port: int | None


def _drive(job: _Request) -> dict[str, Any] | None:
    """Drive the job of a folder that is ours to its end; its last status, ``None`` when it had all its steps before."""
    import uvloop

    from megascale_jax.checkpoint.manifest import published_steps
    from megascale_jax.cluster.anomaly import Watcher
    from megascale_jax.cluster.backends.base import Start
    from megascale_jax.cluster.driver import Driver
    from megascale_jax.cluster.driver_process import drive as drive_job
    from megascale_jax.cluster.exporter import Rates, exported
    from megascale_jax.cluster.job import check_command, ended_under, job_folder, keep_launch, open_journal, port_of, secure
    from megascale_jax.cluster.journal import JournalClock
    from megascale_jax.cluster.limits import Limits
    from megascale_jax.cluster.link.operators import Rule
    from megascale_jax.cluster.link.security import Security
    from megascale_jax.cluster.messages import Desired
    from megascale_jax.cluster.seats import shapes_of
    from megascale_jax.cluster.status import status_of
    from megascale_jax.cluster.webhook import Webhook
    from megascale_jax.comm.storage import Storage
    from megascale_jax.observe.events import EVENTS_FOLDER, Events
    from megascale_jax.views.dashboard.beside import beside_driver

    experiment, folder, engine = job.experiment, job.folder, job.engine
    place, parallel, config, names = job_folder(folder.path), experiment.parallel, experiment.cluster, engine.names
    shapes = shapes_of(job.nodes, parallel, experiment.train.global_batch_size, shrink=config.shrink)
    if (ended := ended_under(place, engine.launch, shapes, config)) is not None:
        return {"phase": ended.phase, "outcome": ended.outcome, "exit_code": ended.exit_code}
    with _patiently(lambda: open_journal(place, shapes, config)) as journal, ExitStack() as stack:
        events = list(journal.events())
        if folder.finished(experiment) and not events:
            say(f"{folder.path} has all its steps; extend it with train.steps=N, or start anew with --fresh")
            return None
        check_command(journal, job.command)
        keep_launch(journal, engine.launch)
        security = job.security or secure(place, names, (engine.host,))
        listen = (engine.host, port_of(journal, engine.host, job.port))
        machines = engine.backend(Start(job.relay or listen, security, place, job.command))
        if (webhook := Webhook.of(config.webhook, folder.path.name, say)) is not None:
            stack.callback(webhook.close)
        watcher = Watcher(config, Limits.of(config, journal.fact("limits")))
        clock = JournalClock(max((event.at_s for event in events), default=0.0))

        def make(send: Callable[[str, Desired], None]) -> Driver:
            events = Events(folder.path / EVENTS_FOLDER if experiment.train.events.enabled else None, role="driver")
            stack.callback(events.close)
            suspects = _suspects(experiment, folder.path, place)
            total = experiment.train.steps
            driver = Driver(journal, config, shapes, names, total, machines, watcher, clock, send, say, events, suspects, webhook)
            stack.callback(driver.governor.close)
            if job.metrics_port is not None:
                stack.enter_context(exported(driver, Rates.of(experiment, job.nodes), job.metrics_port, say))
            return driver

        if job.dashboard_port is not None:
            stack.enter_context(beside_driver(folder.path, job.dashboard_port, job.security, say))
        rule = Rule() if config.two_persons else Rule(frozenset())
        link = Security.load(security, role="driver")
        steps = partial(published_steps, Storage(folder.place(experiment)))
        return status_of(uvloop.run(drive_job(place, link, listen, make, rule, say, saved=steps, leaves=bool(engine.launch))))


def _suspects(experiment: "Experiment", run: Path, place: Path) -> "Suspects | None":
    """What looks for slow nodes in the events of a run; ``None`` where it is not to, or there will be no stamps to look at."""
    from megascale_jax.cluster.suspects import Suspects

    config, events = experiment.cluster.slow_nodes, experiment.train.events
    if config.action == "off" or not (events.enabled and events.stamps):
        return None
    command = (sys.executable, "-m", "megascale_jax.views.slow_nodes", str(run))
    return Suspects(command, config, place / "slow_nodes.log", say)


def _patiently(open_it: "Callable[[], Journal]") -> "Journal":
    """The journal, also from a disk that is full for some minutes: nobody else looks after the job meanwhile. Raises JournalError then."""
    limit, said = time.monotonic() + _JOURNAL_S, ""
    while True:
        try:
            return open_it()
        except JournalError as error:
            if time.monotonic() > limit:
                raise
            if str(error) != said:
                said = str(error)
                say(f"waiting: {said}")
            time.sleep(_AGAIN_S)


def say(text: str) -> None:
    """A line of a driver or a drill, with the time."""
    Console().print(Text(f"{time.strftime('%H:%M:%S')} {text}"), soft_wrap=True)


def execute(
    command: Annotated[list[str], typer.Argument(help="argv of a training process, after --", show_default=False)],
    driver: Annotated[str, typer.Option(metavar="HOST:PORT", help="where the driver listens", show_default=False)],
    security: Annotated[Path, typer.Option(help="made by `megascale certs init`; the token is FOLDER/tokens/NODE", show_default=False)],
    node: Annotated[str, typer.Option(help="name of this node in the job", show_default=False)],
    folder: Annotated[Path, typer.Option(help="of this node, on a local disk: logs, marks", show_default=False)],
    token: Annotated[Path | None, typer.Option(help="this node's token, where it is not in that folder", show_default=False)] = None,
    address: Annotated[
        str | None, typer.Option(help="where other nodes reach this one; default: as the driver does", show_default=False)
    ] = None,
    machine: Annotated[str, typer.Option(help="what the node runs on: back from elsewhere after an eviction, it is a new node")] = "",
) -> None:
    """Be the executor of this node: start, watch and stop its training process as a driver wants it.

    Backends start their executors by themselves; start one by hand where a supervisor must own it, such as
    `megascale execute --driver HOST:PORT --security DIR --node node-3 --folder /scratch/node-3 -- megascale train gpt-13b`.
    """
    from megascale_jax.cluster.executor_process import main

    options = ["--driver", driver, "--security", str(security), "--node", node, "--folder", str(folder), "--machine", machine]
    options += ["--token", str(token)] if token is not None else []
    options += ["--address", address] if address is not None else []
    main([*options, "--", *command])


def _end(status: dict[str, Any]) -> None:
    """The last words, and the exit code."""
    if status["phase"] not in ENDS:
        stopping = status["phase"] == Phase.STOPPING
        rest = (
            "its processes go on saving, and the same command finishes the stop"
            if stopping
            else "the job goes on, and the next driver adopts it"
        )
        say(f"this driver leaves: {rest}")
        raise typer.Exit(1)
    if status["phase"] == Phase.FAILED:
        Console(stderr=True, soft_wrap=True).print(Text.assemble(("failed: ", "bold red"), status["outcome"]))
        raise typer.Exit(status["exit_code"])

"""`megascale drill`: break a driven run on purpose and see what it does about it."""

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megascale_jax.cli.drive import say
from megascale_jax.cli.job import wide_console
from megascale_jax.errors import MegascaleError, UsageError

if TYPE_CHECKING:
    from megascale_jax.cluster.drilled import OwnJob, RunningJob

REFERENCE_LIMIT_S = 7200.0
_OVERRIDES = (
    *("train.steps=100000", "train.checkpoint.every=5", "train.evaluation.every=null", "train.checkpoint.keep=3"),
    *("cluster.strikes=1000", "cluster.max_evictions=1000", "cluster.fruitless_recoveries=50"),
)
"""A run without an end; one node may be hit again and again without being bad."""
_COMPILES_ANEW = ("cluster.floors.compile=120",)
"""With the default of half an hour, the limit that was learned from the run would not be the one that counts."""
_ISOLATES = ("cluster.slow_nodes.every_s=5", "cluster.slow_nodes.steps=20")
"""Windows in short succession: nothing else happens on purpose meanwhile."""
_SHRINKS = ("cluster.shrink=true", "cluster.wait_s=5")


def drill(
    scenario: Annotated[Path | None, typer.Argument(help="YAML file: a list of {kind, node}", show_default=False)] = None,
    faults: Annotated[int, typer.Option(min=1, help="without a scenario: so many random faults, over all kinds")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="of the random scenario")] = 0,
    attach: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="hurt this run, whose driver and nodes are on this machine, and no other", show_default=False),
    ] = None,
    experiment: Annotated[str, typer.Option(help="what a job of the drill's own trains")] = "quickstart",
    nodes: Annotated[int, typer.Option(min=2, help="nodes of that job")] = 4,
    spares: Annotated[int, typer.Option(min=1, help="spares of that job")] = 2,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="it may go on with fewer nodes: losses then agree within 1e-5, not bit for bit")
    ] = False,
    pause_s: Annotated[float, typer.Option(min=0, help="seconds of training before each fault")] = 10.0,
    run_folder: Annotated[Path | None, typer.Option(help="where that job lives; default a temporary folder", show_default=False)] = None,
    reference: Annotated[
        bool, typer.Option(help="afterwards run the same steps without faults and compare every loss, bit for bit")
    ] = True,
    json: Annotated[Path | None, typer.Option("--json", help="write all that was seen to this file", show_default=False)] = None,
) -> None:
    """Break a driven run of the real trainer on purpose, one fault after the other, and report what became of each.

    By default it starts a job of its own on local nodes and ends it afterwards. With --attach it injects a scenario into a run that goes on
    already, local or Slurm (`cluster.slurm.node_folder=RUN/cluster/nodes`), whose nodes are on this machine.

    Kinds: `process_killed`, `_halted` (SIGSTOP), `_frozen` (alive and stuck), `_slowed`; `executor_killed`, `_halted`; `beats_delayed`,
    `beats_dropped`, `node_partitioned`; `driver_killed`; `node_down`, `node_flapping`, `spares_exhausted`, `shrunk`; `disk_full`;
    `checkpoint_corrupt`, `silent_corruption`; `compile_slow` (only in a scenario: no process then starts with programs that an earlier one
    has compiled); `node_slow`, 11 % longer steps of one node (only in a scenario: the job then acts on slow nodes). What cannot be done
    here is said, with the reason.

    Exit code 0: every fault was healed, the right node was named, no healthy one was evicted, all losses are as without faults; else 1.
    """
    from megascale_jax.cluster.drill import losses
    from megascale_jax.cluster.drilled import ISOLATES, OwnJob, RunningJob
    from megascale_jax.cluster.faults import KINDS
    from megascale_jax.observe.report import check_json_path, write_json

    check_json_path(json)
    if attach is not None and scenario is None:
        raise UsageError("--attach hurts a run that is somebody's: name its faults in a scenario file, such as `- kind: process_killed`")
    chosen = _scenario(scenario, KINDS) if scenario is not None else None
    compiles, isolates = (any(kind == name for kind, _ in chosen or ()) for name in ("compile_slow", "node_slow"))
    with tempfile.TemporaryDirectory(prefix="megascale-drill-", ignore_cleanup_errors=True) as temporary:
        if attach is not None:
            found = _injected(RunningJob(attach), chosen, faults, seed, pause_s)
        else:
            place = (run_folder or Path(temporary) / "run").absolute()
            place.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "megascale_jax.cli.main", "drive", experiment, *_OVERRIDES, *(_SHRINKS if shrink else ())]
            command += _COMPILES_ANEW if compiles else ()
            command += (ISOLATES, *_ISOLATES) if isolates else ()
            command += ["--nodes", str(nodes), "--spares", str(spares)]
            job = OwnJob(place, command, is_ours=run_folder is None, shrinks=shrink, compiles_anew=compiles, isolates=isolates)
            say(f"{experiment} on {nodes} nodes and {spares} spares; the driver's words: {job.log}")
            try:
                job.start()
                found = _injected(job, chosen, faults, seed, pause_s)
                if json is not None:  # the run without faults may take long, or fail
                    write_json(json, found)
                if reference and not found["ended_early"]:
                    found |= _compared(losses(place), command, place.parent / "reference", 1e-5 if shrink else 0.0)
            finally:
                job.clear()
        _show(wide_console(), found)
        if json is not None:
            write_json(json, found)
    healed = found["recovered"] == found["injected"] and found["right_node_named"] == found["nodes_to_name"]
    if found["ended_early"] or not healed or found["healthy_evicted"] or not found.get("losses_agree", True):
        raise typer.Exit(1)


def _injected(job: "OwnJob | RunningJob", scenario: list[tuple[str, int]] | None, faults: int, seed: int, pause_s: float) -> dict[str, Any]:
    """Inject and end; what was seen, also when the job did not live to see the last fault."""
    from megascale_jax.cluster.drill import Drill, summary
    from megascale_jax.cluster.faults import draw

    run, broken = Drill(job, say), ""
    try:
        for kind, choice in scenario if scenario is not None else draw(faults, seed, run.kinds()):
            run.run(kind, choice, pause_s)
    except (MegascaleError, OSError) as error:  # what was seen before counts all the same
        if not run.records:
            raise
        broken = str(error)
        say(f"the drill ends here: {broken}")
    finally:
        job.end()
    return summary(run.records) | {"ended_early": broken}


def _scenario(path: Path, kinds: Any) -> list[tuple[str, int]]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        entries = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(entries, list):
        raise UsageError(f"{path}: expected a list of faults, such as `- kind: process_killed`")
    chosen = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("kind") not in kinds or set(entry) - {"kind", "node"}:
            raise UsageError(f"{path}: fault {number + 1} is {entry!r}; expected kind ({', '.join(kinds)}) and perhaps node, a rank")
        chosen.append((entry["kind"], int(entry.get("node", number))))
    return chosen


def _compared(broken: dict[int, float | None], command: list[str], folder: Path, tolerance: float) -> dict[str, Any]:
    """Whether the same steps without faults have the same losses, and how many were compared."""
    from megascale_jax.cluster.drill import compared, losses
    from megascale_jax.cluster.drilled import OwnJob

    steps = max(broken)
    say(f"the same {steps} steps without faults")
    whole = OwnJob(folder, command, is_ours=True)
    try:
        whole.start()
        limit = time.monotonic() + REFERENCE_LIMIT_S
        while (status := whole.status()) is None or status["step"] <= steps:
            if time.monotonic() > limit:
                raise MegascaleError(
                    f"the run without faults did not come to step {steps} within {REFERENCE_LIMIT_S:.0f} s; see {whole.log}"
                )
            time.sleep(1.0)
    finally:
        whole.end()
    try:
        return compared(broken, losses(folder), tolerance)
    finally:
        whole.clear()


def _show(console: Console, found: dict[str, Any]) -> None:
    table = Table(
        "fault", "node", "detected", "suspended", "diagnosed", "replaced", "restored", "total", "steps again", "named", title_justify="left"
    )

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f} s"

    for record in found["faults"]:
        spans = [record[f"{name}_s"] for name in ("detected", "suspended", "diagnosed", "replaced", "restored", "total")]
        verdict = {True: "right", False: "WRONG", None: "-"}[record["right_node_named"]]
        table.add_row(record["kind"], record["node"] or "-", *map(seconds, spans), str(record["steps_lost"]), verdict)
    console.print(table)
    console.print(
        f"{found['recovered']} of {found['injected']} recovered, right node named {found['right_node_named']} of {found['nodes_to_name']}, "
        f"{found['healthy_evicted']} healthy evicted, losses bit-equal: {found.get('loss_bit_equal', 'not compared')}"
    )

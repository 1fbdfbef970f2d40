"""`megascale drill`: break a driven run on purpose and see what it does about it."""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megascale_jax.cli.drive import say
from megascale_jax.cli.job import ask_driver, wide_console
from megascale_jax.config.cluster import JOB_FOLDER
from megascale_jax.errors import MegascaleError, UsageError

END_S = 60.0
REFERENCE_LIMIT_S = 7200.0
_OVERRIDES = (
    *("train.steps=100000", "train.checkpoint.every=5", "train.evaluation.every=null", "train.checkpoint.keep=3"),
    *("cluster.strikes=1000", "cluster.fruitless_recoveries=50"),
)
"""A run without an end; one node may be hit again and again without being bad."""


class DrivenJob:
    """A local job of the drill's own."""

    def __init__(self, folder: Path, command: list[str]):
        self.folder, self._command = folder, command
        self.log = folder.parent / f"{folder.name}.driver.log"
        self._driver: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the driver, as a user would."""
        with self.log.open("ab") as log:
            self._driver = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def status(self) -> dict[str, Any] | None:
        """What the driver says; ``None`` while there is none."""
        if self._driver is not None and (code := self._driver.poll()) is not None:
            raise UsageError(f"the driver ended with code {code}; its words are in {self.log}")
        try:
            return ask_driver(self.folder, None, "status").status
        except (MegascaleError, OSError):
            return None

    def kill_driver(self) -> None:
        """SIGKILL, and the same command again."""
        assert self._driver is not None, "only a driver of our own is killed"
        self._driver.kill()
        self._driver.wait()
        self.start()

    def end(self) -> None:
        """Stop the job; with force when it does not stop by itself."""
        from megascale_jax.cluster.backends.local import NODES_FOLDER, end_executors

        if self._driver is None or self._driver.poll() is not None:
            return
        self._driver.send_signal(signal.SIGTERM)
        try:
            self._driver.wait(END_S)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            end_executors(self.folder / JOB_FOLDER / NODES_FOLDER)


def drill(
    scenario: Annotated[Path | None, typer.Argument(help="YAML file: a list of {kind, node}", show_default=False)] = None,
    faults: Annotated[int, typer.Option(min=1, help="without a scenario: so many random faults, over all kinds")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="of the random scenario")] = 0,
    experiment: Annotated[str, typer.Option(help="what the job trains")] = "quickstart",
    nodes: Annotated[int, typer.Option(min=2, help="nodes of the job")] = 4,
    spares: Annotated[int, typer.Option(min=1, help="spares of the job")] = 2,
    pause_s: Annotated[float, typer.Option(min=0, help="seconds of training before each fault")] = 10.0,
    run_folder: Annotated[Path | None, typer.Option(help="where the job lives; default a temporary folder", show_default=False)] = None,
    reference: Annotated[
        bool, typer.Option(help="afterwards run the same steps without faults and compare every loss, bit for bit")
    ] = True,
    json: Annotated[Path | None, typer.Option("--json", help="write all that was seen to this file", show_default=False)] = None,
) -> None:
    """Start a job of the real trainer on local nodes, inject faults one after the other, and report what became of each.

    Kinds: process_killed, process_halted, executor_killed, executor_halted, beats_delayed, driver_killed, node_down, checkpoint_corrupt.
    Exit code 0: every fault was healed, the right node was named, no healthy one was evicted, all losses are as without faults; else 1.
    """
    from megascale_jax.cluster.drill import Drill, losses, summary
    from megascale_jax.cluster.faults import KINDS, draw
    from megascale_jax.observe.report import check_json_path, write_json

    check_json_path(json)
    chosen = _scenario(scenario, KINDS) if scenario is not None else draw(faults, seed)
    with tempfile.TemporaryDirectory(prefix="megascale-drill-", ignore_cleanup_errors=True) as temporary:
        place = (run_folder or Path(temporary) / "run").absolute()
        place.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "megascale_jax.cli.main", "drive", experiment, *_OVERRIDES, "--nodes", str(nodes)]
        job = DrivenJob(place, [*command, "--spares", str(spares), "--run-folder", str(place)])
        say(f"{len(chosen)} faults for {experiment} on {nodes} nodes and {spares} spares; the driver's words: {job.log}")
        run, broken = Drill(job, say), ""
        job.start()
        try:
            for kind, choice in chosen:
                run.run(kind, choice, pause_s)
        except MegascaleError as error:  # what was seen before counts all the same
            broken = str(error)
            say(f"the drill ends here: {broken}")
        finally:
            job.end()
        found = summary(run.records) | {"ended_early": broken}
        if reference and not broken:
            found |= _compared(losses(place), command, place.parent / "reference")
        _show(wide_console(), found)
        if json is not None:
            write_json(json, found)
    healed = found["recovered"] == found["injected"] and found["right_node_named"] == found["nodes_to_name"]
    if broken or not healed or found["healthy_evicted"] or not found.get("loss_bit_equal", True):
        raise typer.Exit(1)


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


def _compared(broken: dict[int, float | None], command: list[str], folder: Path) -> dict[str, Any]:
    """Whether the same steps without faults have the same losses, and how many were compared."""
    from megascale_jax.cluster.drill import losses

    steps = max(broken)
    say(f"the same {steps} steps without faults")
    whole = DrivenJob(folder, [*command, "--run-folder", str(folder)])
    whole.start()
    limit = time.monotonic() + REFERENCE_LIMIT_S
    try:
        while (status := whole.status()) is None or status["step"] <= steps:
            if time.monotonic() > limit:
                raise MegascaleError(
                    f"the run without faults did not come to step {steps} within {REFERENCE_LIMIT_S:.0f} s; see {whole.log}"
                )
            time.sleep(1.0)
    finally:
        whole.end()
    unbroken = losses(folder)
    return {"loss_bit_equal": all(unbroken.get(step) == loss for step, loss in broken.items()), "steps_compared": len(broken)}


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

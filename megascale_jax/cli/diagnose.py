"""`megascale diagnose`: is this node, or are these nodes, fit to train? Exit codes by kind of fault."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megascale_jax.errors import UsageError
from megascale_jax.observe.report import check_json_path, write_json

if TYPE_CHECKING:
    from megascale_jax.cluster.diagnose.checks import Outcome
    from megascale_jax.cluster.diagnose.fleet import Verdict
    from megascale_jax.cluster.diagnose.nic import Baseline
    from megascale_jax.cluster.diagnose.request import PairTask
    from megascale_jax.comm.processes import Processes

SECRET = "MEGASCALE_SECRET"


def diagnose(
    only: Annotated[str | None, typer.Option(help="groups, such as host,gpu,nic,compute,network; default all", show_default=False)] = None,
    folder: Annotated[
        list[Path] | None, typer.Option(help="folder that the run writes to; may be given several times", show_default="the current one")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="YAML file: settings that NICs should have, rates that devices should reach", show_default=False)
    ] = None,
    limit_s: Annotated[float | None, typer.Option(help="seconds of one check at most", min=0.1, show_default=False)] = None,
    json: Annotated[Path | None, typer.Option("--json", help="also write the result to this file", show_default=False)] = None,
) -> None:
    """Check this node before a run: host, GPUs, NICs, compute, network. Each check has a time limit.

    Started on several nodes with the variables that training takes, they also meet in pairs, and rates, versions and results are
    compared: `MEGASCALE_COMMAND=megascale launch/local.sh -n 4 diagnose`, or by srun.
    A check that cannot run says `not run`, and why; it never passes. Rates need three devices to compare, or a baseline.

    Exit codes: 0 nothing bad found, 15 silent corruption, 11 GPU, 10 host, 12 NIC, 14 network, 13 slow compute, 16 a node or everything
    could not be checked. Of several faults the first in this order. 2 is a wrong option.
    """
    from megascale_jax.cluster.diagnose.checks import GROUPS, alone, parse_groups
    from megascale_jax.cluster.diagnose.nic import Baseline, read_baseline
    from megascale_jax.comm.processes import Processes

    check_json_path(json)
    groups = parse_groups(only) if only is not None else GROUPS
    expected = read_baseline(baseline) if baseline is not None else Baseline()
    processes = Processes.from_environment()
    names, with_pairs = alone(groups), "network" in groups
    check = _Check([str(one.absolute()) for one in folder or [Path()]], expected, limit_s)
    if processes.count == 1:
        raise typer.Exit(_alone(check, names, with_pairs, json))
    if processes.index == 0:
        raise typer.Exit(_lead(check, names, processes, with_pairs, json))
    raise typer.Exit(_attend(check, names, processes))


class _Check:
    """Runs checks of this node in a probe process, and says which one it is at."""

    def __init__(self, folders: list[str], baseline: "Baseline", limit_s: float | None) -> None:
        self.folders, self.baseline = folders, baseline
        self.limit_s = float("inf") if limit_s is None else limit_s
        self.console = Console()

    def __call__(self, names: Sequence[str], pair: "PairTask | None", clock_offset_s: float | None) -> "list[Outcome]":
        from megascale_jax.cluster.diagnose.request import Options
        from megascale_jax.cluster.diagnose.run import run_checks

        options = Options(folders=tuple(self.folders), clock_offset_s=clock_offset_s, baseline=self.baseline, pair=pair)
        outcomes, waiting = [], list(names)
        with self.console.status("") as status:
            status.update(f"checking {waiting[0]}" if pair is None else f"round {pair.round}: all-reduce with {pair.peer}")
            for outcome in run_checks(names, options, limit_s=self.limit_s):
                outcomes.append(outcome)
                waiting.remove(outcome.check)
                if waiting:
                    status.update(f"checking {waiting[0]}")
        return outcomes

    def show(self, outcomes: "dict[str, list[Outcome]]", verdict: "Verdict", json: Path | None) -> int:
        """Print the verdict and write it; the exit code."""
        from megascale_jax.cluster.diagnose.report import as_data, shown

        self.console.print(shown(outcomes, verdict), highlight=False)
        if json is not None:
            write_json(json, as_data(outcomes, verdict))
        return verdict.exit_code


def _alone(check: _Check, names: Sequence[str], with_pairs: bool, json: Path | None) -> int:
    from megascale_jax.cluster.diagnose.checks import PAIR, not_run
    from megascale_jax.cluster.diagnose.fleet import judge_all
    from megascale_jax.cluster.diagnose.request import Node

    name = socket.gethostname()
    outcomes = {name: check(names, None, None) + ([not_run(PAIR, "one node only")] if with_pairs else [])}
    return check.show(outcomes, judge_all({name: Node(address="-", ports=())}, outcomes, check.baseline), json)


def _lead(check: _Check, names: Sequence[str], processes: "Processes", with_pairs: bool, json: Path | None) -> int:
    from megascale_jax.cluster.diagnose.meeting import Meeting
    from megascale_jax.cluster.diagnose.request import switch_of

    secret = os.environ.get(SECRET, "")
    meeting = Meeting(processes.count, names, check, check.baseline, secret, with_pairs, check.limit_s)
    verdict = meeting.hold(_address(processes), socket.gethostname(), switch_of(os.environ))
    code = check.show(meeting.outcomes, verdict, json)
    meeting.close(code)
    return code


def _attend(check: _Check, names: Sequence[str], processes: "Processes") -> int:
    from megascale_jax.cluster.diagnose.meeting import attend
    from megascale_jax.cluster.diagnose.request import switch_of

    host, secret = socket.gethostname(), os.environ.get(SECRET, "")
    try:
        return attend(_address(processes), processes.index, host, switch_of(os.environ), secret, names, check, check.limit_s)
    except ConnectionError as error:
        raise UsageError(f"process 0 has gone: {error}; see its output") from error


def _address(processes: "Processes") -> tuple[str, int]:
    """Host and port of process 0. Raises UsageError."""
    host, _, port = (processes.coordinator or "").rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"MEGASCALE_COORDINATOR is {processes.coordinator!r}; expected host:port")
    return host.strip("[]"), int(port)

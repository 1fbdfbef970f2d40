"""Faults of a driven run of the real trainer, in seeded slices that append to one result.

    python benchmarks/fault_drill.py --faults 16 --seed 1 --json benchmarks/results/drill.json

Runs `megascale drill` (four local nodes, two spares, quickstart), adds what it saw to the JSON file and writes the table beside it.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from step_report import birth_certificate

ROOT = Path(__file__).parents[1]
BETWEEN_FAULTS_S = 300.0
"""One fault every five minutes, for the share of time that trains."""
SPANS = ("detected_s", "suspended_s", "diagnosed_s", "replaced_s", "restored_s", "total_s")


def main(
    json_path: Annotated[Path, typer.Option("--json", help="result that this slice is added to")],
    faults: Annotated[int, typer.Option(min=1, help="faults of this slice")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="of this slice")] = 0,
    pause_s: Annotated[float, typer.Option(min=0, help="seconds of training before each fault")] = 10.0,
    kinds: Annotated[list[str] | None, typer.Option("--kind", help="instead: these faults, in this order")] = None,
    experiment: Annotated[str, typer.Option(help="what is trained")] = "quickstart",
    nodes: Annotated[int, typer.Option(min=2, help="nodes that train")] = 4,
    spares: Annotated[int, typer.Option(min=1, help="nodes beside them")] = 2,
    limit_s: Annotated[int, typer.Option(min=60, help="longest that the slice may take")] = 3600,
    shared: Annotated[bool, typer.Option("--shared", help="other work runs on this machine: outcomes count, times do not")] = False,
) -> None:
    """Run a slice. Exit code 1 when a fault was not healed, a node wrongly named or evicted, or a loss differs."""
    own = "".join(f" --kind {kind}" for kind in kinds) if kinds else f" --faults {faults} --seed {seed}"
    own += f" --experiment {experiment} --nodes {nodes} --spares {spares} --pause-s {pause_s:g}{' --shared' if shared else ''}"
    flags = f"XLA_FLAGS={shlex.quote(os.environ['XLA_FLAGS'])} " if "XLA_FLAGS" in os.environ else ""
    record = birth_certificate(ROOT, f"{flags}python benchmarks/fault_drill.py{own} --json PATH") | {"seed": seed}
    with tempfile.TemporaryDirectory(prefix="fault-drill-") as folder:
        what = [str(scenario_of(kinds, Path(folder)))] if kinds else ["--faults", str(faults), "--seed", str(seed)]
        where = ["--experiment", experiment, "--nodes", str(nodes), "--spares", str(spares)]
        code, seen = drilled([*what, *where, "--pause-s", str(pause_s)], limit_s)
    record |= seen | ({"shared": True} if shared else {})
    append(json_path, record, f"# Faults of a driven run: {Path(experiment).stem} on {nodes} local nodes and {spares} spares")
    raise SystemExit(code)


def scenario_of(kinds: list[str], folder: Path) -> Path:
    """A file that names these faults, each on the next rank."""
    path = folder / "scenario.yaml"
    path.write_text("".join(f"- {{kind: {kind}, node: {number}}}\n" for number, kind in enumerate(kinds)))
    return path


def drilled(arguments: list[str], limit_s: float) -> tuple[int, dict[str, Any]]:
    """Exit code of `megascale drill`, and what it saw; ends with its code when it saw nothing."""
    with tempfile.TemporaryDirectory(prefix="fault-drill-", ignore_cleanup_errors=True) as folder:
        seen = Path(folder) / "drill.json"
        command = [sys.executable, "-m", "megascale_jax.cli.main", "drill", *arguments, "--json", str(seen)]
        code = subprocess.run(command, cwd=ROOT, timeout=limit_s, check=False).returncode
        if not seen.is_file():
            raise SystemExit(code or 1)
        return code, json.loads(seen.read_text())


def append(path: Path, slice_: dict[str, Any], title: str) -> None:
    """Add a slice to a result, and write the table of all beside it."""
    result = json.loads(path.read_text()) if path.is_file() else {"slices": []}
    result["slices"].append(slice_)
    result |= total(result["slices"])
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(result, title))


def total(slices: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all slices, and the mean of each part of the recoveries, seconds."""
    counts = ("injected", "recovered", "right_node_named", "nodes_to_name", "healthy_evicted")
    interrupted = healed(timed(slices))
    return {name: sum(one[name] for one in slices) for name in counts} | {
        "loss_bit_equal": all(one.get("loss_bit_equal", False) for one in slices),
        "steps_compared": sum(one.get("steps_compared", 0) for one in slices),
        "mttr_s": {name: statistics.mean(fault[name] for fault in interrupted) for name in SPANS} if interrupted else {},
        "effective_training_time": effective(interrupted),
    }


def timed(slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Faults whose times count: those of slices that had the machine for themselves, or of all where none had."""
    own = [one for one in slices if not one.get("shared")]
    return [fault for one in own or slices for fault in one["faults"]]


def healed(faults: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that interrupted the training, and after which it went on."""
    return [fault for fault in faults if fault["recovered"] and fault["detected_s"] is not None]


def effective(interrupted: list[dict[str, Any]]) -> float | None:
    """Share of the time that makes progress with a fault every `BETWEEN_FAULTS_S` (paper, section 6.3): what is left after the time to
    train again and the steps that are done again. ``None`` without an interruption."""
    if not interrupted:
        return None
    lost_s = statistics.mean(fault["total_s"] + fault["steps_lost"] * (fault.get("step_s") or 0.0) for fault in interrupted)
    return 1 - lost_s / BETWEEN_FAULTS_S


def table(result: dict[str, Any], title: str) -> str:
    """The result as Markdown."""
    last = result["slices"][-1]
    lines = [
        title,
        "",
        f"*Measured*, {last['date']}, commit {last['commit']}, {last['hardware']}, load before {last['load_before'][0]:.1f}; "
        f"{len(result['slices'])} slice(s), the last:",
        f"`{last['command']}`",
        "",
        f"{result['injected']} injected, {result['recovered']} recovered without a hand; right node named in "
        f"{result['right_node_named']} of {result['nodes_to_name']}; {result['healthy_evicted']} healthy nodes evicted; losses of "
        f"{result['steps_compared']} steps bit-equal to runs without faults: {'yes' if result['loss_bit_equal'] else 'NO'}.",
        "",
    ]
    if shared := sum(bool(one.get("shared")) for one in result["slices"]):
        lines += [f"{shared} slice(s) shared the machine with other work: their outcomes count, their times do not.", ""]
    if (share := result["effective_training_time"]) is not None:
        lines += [
            f"With one fault every {BETWEEN_FAULTS_S / 60:.0f} minutes, all kinds that interrupt, {share:.1%} of the time would train: "
            "computed, from the mean of the time to train again and of the steps that are done again.",
            "",
        ]
    lines += [
        "| kind | faults | recovered | named right | detected | suspended | diagnosed | replaced | restored | total, median (longest) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    faults, measured_ones = [fault for one in result["slices"] for fault in one["faults"]], healed(timed(result["slices"]))
    for kind in dict.fromkeys(sorted(fault["kind"] for fault in faults)):
        group = [fault for fault in faults if fault["kind"] == kind]
        times = [fault for fault in measured_ones if fault["kind"] == kind]
        named = [fault for fault in group if fault["right_node_named"] is not None]
        right = f"{sum(fault['right_node_named'] for fault in named)} of {len(named)}" if named else "-"
        spans = [f"{statistics.median(fault[name] for fault in times):.1f} s" if times else "-" for name in SPANS]
        if times:
            spans[-1] += f" ({max(fault['total_s'] for fault in times):.1f})"
        lines.append(f"| {kind} | {len(group)} | {sum(fault['recovered'] for fault in group)} | {right} | {' | '.join(spans)} |")
    for fault in faults:
        if measured := fault.get("measured"):
            lines += ["", f"{fault['kind']}: {', '.join(f'{name[:-2]} {seconds:.1f} s' for name, seconds in measured.items())}."]
    for one in result["slices"]:
        if "all_nodes_back_s" in one:
            back_s = one["all_nodes_back_s"]
            lines += ["", f"After the last fault all nodes were there again {'NOT' if back_s is None else f'within {back_s:.0f} s'}."]
    lines += ["", "Two cores hold all nodes: starting processes is what a recovery costs here. CPU times say nothing about GPUs.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)

"""Medians, ratios and birth certificate of the step benchmark, as a table, as JSON rows and as Markdown."""

import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from megascale_jax.config.load import load_experiment

Row = dict[str, Any]
COLUMNS = ("model", "devices", "variant", "CPU-s per step", "x", "wall s per step", "x", "tokens/s", "first loss")


def birth_certificate(root: Path, command: str) -> dict[str, Any]:
    """Where the numbers come from: hardware, versions, commit, command, load before."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "kind": "measured",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": f"{os.cpu_count()} cores, {cpu[1] if cpu else platform.machine()}, virtual CPU devices",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("jax", "jaxlib", "optax", "flax")},
        "commit": _git(root, "rev-parse", "--short=12", "HEAD"),
        "changed_since_commit": bool(_git(root, "status", "--porcelain", "--", "megascale_jax", "benchmarks", "configs")),
        "command": command,
        "load_before": os.getloadavg(),
    }


def summary(model: str, devices: int, wanted: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> list[Row]:
    """One row a variant: medians with minimum and maximum, and the ratio to the yardstick of the same process.

    The yardstick is the peer where it ran, else the plain step. Ratios are of medians.
    """
    rows: list[Row] = []
    by_variant = {item["variant"]: item for item in wanted}
    for name in dict.fromkeys(step["variant"] for step in measured):
        steps = [step for step in measured if step["variant"] == name and "cpu_s" in step]
        item = by_variant.get(name, {"experiment": wanted[0]["experiment"], "overrides": [], "layout": "", "implementation": "peer"})
        first = next(step["loss"] for step in measured if step["variant"] == name)
        row: Row = {"model": model, "devices": devices, **item, "variant": name, "steps": len(steps), "first_loss": first}
        row |= {f"{clock}_all": [step[clock] for step in steps] for clock in ("cpu_s", "wall_s")}
        row |= {clock: statistics.median(row[f"{clock}_all"]) for clock in ("cpu_s", "wall_s")}
        rows.append(row)
    tokens = load_experiment(wanted[0]["experiment"], wanted[0]["overrides"]).tokens_per_step
    yardstick = next((row for row in rows if row["implementation"] == "peer"), None)
    yardstick = yardstick or next(row for row in rows if row["implementation"] == "plain")
    for row in rows:
        row["tokens_per_step"], row["tokens_per_s"] = tokens, tokens / row["wall_s"]
        row["yardstick"] = yardstick["variant"]
        row |= {f"{clock}_ratio": row[clock] / yardstick[clock] for clock in ("cpu_s", "wall_s")}
    return rows


def table(rows: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    shown = Table(title="Cost of a training step: median (min-max); x: times the yardstick of the same process")
    for index, column in enumerate(COLUMNS):
        shown.add_column(column, justify="left" if index in (0, 2) else "right")
    for row in rows:
        shown.add_row(*_cells(row))
    return shown


def hardware_slug(record: dict[str, Any]) -> str:
    """The hardware of a birth certificate as a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(r\)|processor|cpu|virtual|devices", "", record["hardware"].lower())).strip("-")


def write_markdown(folder: Path, record: dict[str, Any]) -> Path:
    """Write ``step_<hardware>_<yyyymm>.md``, one section a model; a section measured again replaces the old one."""
    path = folder / f"step_{hardware_slug(record)}_{record['date'][:7].replace('-', '')}.md"
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", path.read_text(), re.DOTALL | re.MULTILINE)) if path.exists() else {}
    for model in dict.fromkeys(row["model"] for row in record["rows"]):
        sections[model] = _section(record, [row for row in record["rows"] if row["model"] == model])
    title = "# Cost of a training step on virtual CPU devices\n\n" + _PREAMBLE
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(title + "".join(f"\n## {model}\n{text.strip()}\n" for model, text in sections.items()))
    return path


_PREAMBLE = """Measured. CPU-seconds count all threads of the process and are the figure to compare: the virtual devices share the cores,
so wall time mostly says how busy the machine was. A CPU run supports no claim about speed on GPUs. One process a device
count; in it, one step of every variant in turn. *x* is the ratio of medians to the yardstick: the peer where it ran, else
plain single-device JAX of the same model in the same process (same initial weights and rows, same losses).
"""


def _section(record: dict[str, Any], rows: Sequence[Row]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    changed = " with changes on top" if record["changed_since_commit"] else ""
    loads = [f"{record[key][0]:.1f}" for key in ("load_before", "load_after")]
    lines = [
        f"{record['date']}, {record['hardware']}; {versions}; commit {record['commit']}{changed};",
        f"load average {loads[0]} before, {loads[1]} after; {rows[0]['tokens_per_step']:,} tokens a step.",
        f"Experiment `{rows[0]['experiment']}`. Command: `{record['command']}`",
        "",
        "| " + " | ".join(COLUMNS[1:]) + " |",
        "|" + "---|" * (len(COLUMNS) - 1),
        *("| " + " | ".join(_cells(row)[1:]) + " |" for row in rows),
    ]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    ratios = [f"{row[f'{clock}_ratio']:.2f}" for clock in ("cpu_s", "wall_s")]
    spreads = [_spread(row[f"{clock}_all"]) for clock in ("cpu_s", "wall_s")]
    numbers = (spreads[0], ratios[0], spreads[1], ratios[1], f"{row['tokens_per_s']:,.0f}", f"{row['first_loss']:.4f}")
    return (row["model"], str(row["devices"]), row["variant"], *numbers)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


def _git(root: Path, *arguments: str) -> str:
    """What git says; ``unknown`` where the tree came without its history."""
    try:
        return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("MEGASCALE_COMMIT", "unknown")

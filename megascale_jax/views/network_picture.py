"""Pictures of `megascale network`: one a study, from the values that its JSON has. All of them show simulated numbers and say so."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from megascale_jax.views.style import COLOUR_A, COLOUR_B, MUTED, RESUMED, TEXT, WARNING, new_figure, title

_COLOURS = (COLOUR_A, COLOUR_B, RESUMED, WARNING, "#7b5ea7")
Result = Mapping[str, Any]


def plot_network(result: Result, path: Path) -> None:
    """Draw a study to ``path`` (1200 x 700 pixels). Raises OSError if it cannot be written."""
    draw: Callable[[Result, list[Axes]], None] = {"ecmp": _ecmp, "congestion": _congestion, "flap": _flap, "placement": _placement}[
        result["study"]
    ]
    figure, axes = new_figure((1,) if result["study"] == "flap" else (1, 1))
    draw(result, axes)
    figure.savefig(path)


def _ecmp(result: Result, axes: list[Axes]) -> None:
    left, right = axes
    for split, colour in ((False, COLOUR_B), (True, COLOUR_A)):
        rows = [row for row in result["uplinks"] if row["split"] == split]
        if rows:
            x, name = np.arange(len(rows)), "split ports" if split else "whole ports"
            left.plot(x, [row["delivered_exact"] for row in rows], color=colour, label=f"{name}, closed form")
            errors = [3 * row["delivered_error"] for row in rows]
            left.errorbar(x, [row["delivered"] for row in rows], errors, fmt="o", color=colour, capsize=4, label=f"{name}, hashed")
            left.set_xticks(x, [f"{row['load']:.3g}" for row in rows])
    _named(left, "load of the ToR switch", "share of the offered rate that arrives")
    left.legend(loc="lower right", frameon=False, fontsize=11, labelcolor=TEXT)
    title(left, "ECMP on one ToR's uplinks", f"simulated; bars: 3 standard errors; {result['device']}")
    names = list(result["hashes"])
    values = [[row["mean"] for row in result["hashes"][name]] for name in names]
    _bars(right, names, {"mean rate": values, "slowest flow": [[row["slowest"] for row in result["hashes"][name]] for name in names]})
    _named(right, "", "rate over a NIC's")
    title(right, "One seed for all switches polarises", f"simulated; a permutation over {result['nodes']:,} nodes, {result['seeds']} seeds")


def _congestion(result: Result, axes: list[Axes]) -> None:
    rows = result["rows"]
    workloads, algorithms = (list(dict.fromkeys(row[field] for row in rows)) for field in ("workload", "algorithm"))

    def values(field: str) -> dict[str, list[list[float]]]:
        return {
            algorithm: [
                [row[field] for row in rows if (row["workload"], row["algorithm"]) == (workload, algorithm)] for workload in workloads
            ]
            for algorithm in algorithms
        }

    left, right = axes
    best = {workload: max(row["gbit_s"] for row in rows if row["workload"] == workload) for workload in workloads}
    rates = {
        name: [[one / best[workload] for one in many] for workload, many in zip(workloads, found, strict=True)]
        for name, found in values("gbit_s").items()
    }
    _bars(left, workloads, rates)
    _named(left, "", "rate over the best of the workload")
    title(left, "Throughput", f"simulated; 64 hosts, {result['seeds']} seeds, bars: standard deviation")
    _bars(right, workloads, {name: [[one + 1 for one in many] for many in found] for name, found in values("pauses").items()}, is_log=True)
    _named(right, "", "1 + pauses by PFC")
    title(right, "Pauses", "hybrid and nscc are reconstructions: read only their order")


def _flap(result: Result, axes: list[Axes]) -> None:
    (only,) = axes
    rows = result["rows"]
    timeouts = np.array([row["timeout_s"] for row in rows])
    for kind, colour in (("plain", COLOUR_B), ("adaptive", COLOUR_A)):
        only.plot(timeouts, [row[kind]["total_s"] for row in rows], color=colour, label=f"{kind}, closed form", linewidth=1.8)
        drawn = np.array([row[kind]["simulated_s"] for row in rows])
        only.errorbar(
            timeouts, drawn.mean(1), drawn.std(1, ddof=1), fmt="o", color=colour, markersize=4, capsize=3, label=f"{kind}, simulated"
        )
        first, last = result["plateaus"][kind]
        chosen = [row for row in rows if first <= row["exponent"] <= last]
        only.plot([row["timeout_s"] for row in chosen], [row[kind]["total_s"] for row in chosen], color=colour, linewidth=9, alpha=0.25)
    own = next((row for row in rows if row["exponent"] == result["own_exponent"]), None)
    if own is not None:
        only.axvline(own["timeout_s"], color=MUTED, linestyle=":", linewidth=1.4)
        only.text(own["timeout_s"] * 1.1, only.get_ylim()[1] * 0.4, f"system.limits: {own['exponent']}", color=MUTED, fontsize=11)
    only.set_xscale("log")
    only.set_yscale("log")
    _named(only, "time-out of one try, seconds", "cost of one flap, job seconds")
    only.legend(loc="center left", frameon=False, fontsize=11, labelcolor=TEXT)
    title(
        only,
        "What a link flap costs by NCCL's time-out",
        f"simulated; flaps of {result['flaps']['mean_s']:g} s on average; thick: within 10 % of the best",
    )


def _placement(result: Result, axes: list[Axes]) -> None:
    left, right = axes
    by_axis = [one["axis"] for one in result["placed"][0]["by_axis"]]
    parts = {
        name: [[score["by_axis"][index]["across_tor_bytes"] / 1e12 for score in result[key]] for index in range(len(by_axis))]
        for name, key in (("by name", "by_name"), ("placed", "placed"))
    }
    _bars(left, by_axis, parts)
    _named(left, "mesh axis", "terabytes of a step that cross ToR sets")
    title(left, f"Placement on {result['nodes']:,} nodes", f"simulated; {result['name']}, {result['seeds']} fleets")
    rings = result.get("rings", {})
    names = list(dict.fromkeys(name.split(", ", 1)[0] + ", " + name.split(", ")[1] for name in rings))
    pairs = list(dict.fromkeys(name.split(", ")[2] for name in rings))
    _bars(right, names, {pair: [[row["ring"] for row in rings[f"{name}, {pair}"]] for name in names] for pair in pairs})
    _named(right, "", "mean over rings of their slowest flow, over a NIC's rate")
    title(right, "Data rings", "simulated; flows over hashed paths, max-min shares")


def _bars(axes: Axes, groups: Sequence[str], parts: Mapping[str, Sequence[Sequence[float]]], *, is_log: bool = False) -> None:
    """A group of bars for each name, one of them a part: the mean of its values, with their standard deviation."""
    width = 0.8 / max(len(parts), 1)
    for number, (name, found) in enumerate(parts.items()):
        x = np.arange(len(groups)) + (number - (len(parts) - 1) / 2) * width
        spread = [float(np.std(many, ddof=1)) if len(many) > 1 else 0.0 for many in found]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.bar(x, [float(np.mean(many)) for many in found], width * 0.92, yerr=spread, color=colour, label=name, ecolor=MUTED, capsize=2)
    axes.set_xticks(np.arange(len(groups)), [name.replace(", ", "\n").replace(" incast", "\nincast") for name in groups])
    if is_log:
        axes.set_yscale("log")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False, fontsize=10.5, labelcolor=TEXT)


def _named(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=12, color=TEXT)
    axes.set_ylabel(y, fontsize=12, color=TEXT)

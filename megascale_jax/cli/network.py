"""`megascale network`: the cluster's network, simulated: hashing, congestion control, link flaps, placement. Needs no device."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megascale_jax.config.load import is_experiment, load_experiment, load_system
from megascale_jax.errors import ConfigError
from megascale_jax.observe.report import check_json_path, check_output_path, write_json

if TYPE_CHECKING:
    from megascale_jax.config.network import NetworkConfig
    from megascale_jax.config.schema import Experiment, SystemConfig

WIDTH = 132
"""Columns of a terminal that the tables need; in a narrower one it breaks their lines, which keeps every number whole."""
UPLINK_TRIALS = 4000
FLAPS = 20_000
"""Trials of one seed."""


class Study(StrEnum):
    """What is looked at."""

    ECMP = "ecmp"
    CONGESTION = "congestion"
    FLAP = "flap"
    PLACEMENT = "placement"


def network(
    name: Annotated[
        str, typer.Argument(help="an experiment (`megascale config list`), its YAML file, or a system: a100", show_default=False)
    ],
    study: Annotated[
        Study,
        typer.Option(
            help="ecmp: hashed paths; congestion: DCQCN, Swift and hybrids by packets; flap: NCCL's time-out; placement: ranks on nodes",
            show_default=False,
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="changes, such as system.network.nodes_per_tor=32", show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="runs that differ by chance alone; tables show mean and standard deviation")] = 5,
    json: Annotated[Path | None, typer.Option("--json", help="also write all rows to this file", show_default=False)] = None,
    picture: Annotated[Path | None, typer.Option(help="also draw the study into this PNG file", show_default=False)] = None,
) -> None:
    """Simulate the cluster's network. No number here is measured; constants and their sources are in docs/network.md."""
    check_json_path(json)
    check_output_path(picture, "--picture")
    experiment = load_experiment(name, overrides or []) if is_experiment(name) else None
    system = experiment.system if experiment is not None else load_system(name, overrides or [])
    if system.network is None and study is not Study.FLAP:
        raise ConfigError(f"system.network of {system.device} is null; take a system that has one, such as system=a100, or set its fields")
    console = Console(width=max(Console().width, WIDTH))
    match study:
        case Study.ECMP:
            found = _ecmp(console, _fabric(system), _nodes(experiment), seeds)
        case Study.CONGESTION:
            found = _congestion(console, _fabric(system), seeds)
        case Study.FLAP:
            found = _flap(console, system, seeds)
        case Study.PLACEMENT:
            if experiment is None:
                raise ConfigError(
                    f"{name} is a system; --study placement needs an experiment, whose ranks are placed: gpt-175b system={name}"
                )
            found = _placement(console, experiment, seeds)
    console.print(Text(f"simulated; mean and standard deviation over {seeds} seeds", style="dim"))
    result = {"kind": "simulated", "name": name, "device": system.device, "study": study.value, "seeds": seeds, **found}
    if picture is not None:
        from megascale_jax.views.network_picture import plot_network

        plot_network(result, picture)
        typer.echo(f"wrote {picture}")
    if json is not None:
        write_json(json, result)


def _fabric(system: "SystemConfig") -> "NetworkConfig":
    assert system.network is not None, "checked before"
    return system.network


PAPER_NODES = 1536
"""12,288 GPUs, the largest job of the MegaScale paper: what a study of a system alone takes."""


def _nodes(experiment: "Experiment | None") -> int:
    from megascale_jax.config.layout import MeshShape

    if experiment is None or experiment.system.devices_per_node is None:
        return PAPER_NODES
    return max(2, MeshShape.of(experiment.parallel).size // experiment.system.devices_per_node)


def _ecmp(console: Console, config: "NetworkConfig", nodes: int, seeds: int) -> dict[str, Any]:
    from megascale_jax.sim.network import ecmp

    trials = UPLINK_TRIALS * seeds
    uplinks = ecmp.uplinks(config, trials, 0)
    table = _table(
        f"flows of one ToR switch over its {config.tor_uplinks} uplinks",
        ("port", "load", "flows", "delivered", "closed form", "any overload", "closed form", "slowest flow"),
    )
    for row in uplinks:
        cells = (f"{row.load:.1%}", f"{row.flows}", f"{row.delivered:.4f} ± {row.delivered_error:.4f}", f"{row.delivered_exact:.4f}")
        table.add_row("split" if row.split else "whole", *cells, f"{row.overload:.4f}", f"{row.overload_exact:.4f}", f"{row.slowest:.3f}")
    console.print(table)
    console.print(Text(f"{trials:,} trials; ± standard error; rates over that of a NIC", style="dim"))
    hashes = ecmp.polarisation(config, nodes, seeds)
    table = _table(
        f"a permutation of {nodes * config.rails:,} NICs over three layers", ("hash", "mean rate", "slowest", "spine-ward links used")
    )
    for name, rows in hashes.items():
        table.add_row(name, *(_spread([getattr(row, field) for row in rows]) for field in ("mean", "slowest", "used_aggregation_uplinks")))
    console.print(table)
    return {"nodes": nodes, "uplinks": [asdict(row) for row in uplinks], "hashes": _rows_of(hashes)}


def _congestion(console: Console, config: "NetworkConfig", seeds: int) -> dict[str, Any]:
    from megascale_jax.sim.congestion import study
    from megascale_jax.sim.congestion.parameters import ALGORITHMS

    rows = study.rows(config, seeds)
    for workload in study.all_workloads():
        columns = ("algorithm", "Gbit/s", "pauses", "of NICs", "paused ms", "p99 ms", "slowdown of flow 0", "peak queue MB", "dropped")
        table = _table(f"{workload.name}: {workload.words}; {study.HOSTS} hosts under {study.LEAVES} ToR switches", columns)
        for algorithm in ALGORITHMS:
            chosen = [row for row in rows if (row.workload, row.algorithm) == (workload.name, algorithm)]
            fields = ("gbit_s", "pauses", "nic_pauses", "paused_ms", "p99_ms", "slowdown", "peak_mb")
            cells = [_spread([getattr(row, field) for row in chosen]) for field in fields]
            table.add_row(algorithm, *cells, f"{sum(row.dropped for row in chosen)}")
        console.print(table)
    console.print(Text("hybrid and nscc are reconstructions: read only their order among the others", style="dim"))
    return {"rows": [asdict(row) for row in rows]}


def _flap(console: Console, system: "SystemConfig", seeds: int) -> dict[str, Any]:
    import numpy as np

    from megascale_jax.sim import flap

    limits, flaps, rows = system.limits, flap.Flaps(), list[dict[str, Any]]()
    columns = ("exponent", "time-out s", "plain s", "simulated", "job lost", "adaptive s", "simulated")
    table = _table(f"seconds that one flap costs; flaps of {flaps.mean_s:g} s on average, {limits.ib_retries} retries", columns)
    for exponent in flap.EXPONENTS:
        cells, row = list[str](), {"exponent": exponent, "timeout_s": flap.UNIT_S * 2**exponent}
        for adaptive in (False, True):
            retries = flap.Retries.of(exponent, limits.ib_retries, limits.execution_s, adaptive=adaptive)
            cost = flap.expected(retries, flaps)
            drawn = [flap.simulated(retries, flaps, FLAPS, np.random.default_rng([seed, exponent]))[0] for seed in range(seeds)]
            totals = [one.total_s for one in drawn]
            row["adaptive" if adaptive else "plain"] = asdict(cost) | {"simulated_s": totals}
            cells += [f"{cost.total_s:.4g}", _spread(totals), *([] if adaptive else [f"{cost.death:.2%}"])]
        own = " (system.limits)" if exponent == limits.ib_timeout_exponent else ""
        table.add_row(f"{exponent}{own}", f"{row['timeout_s']:.3g}", *cells)
        rows.append(row)
    console.print(table)
    plateaus = {}
    for kind in ("plain", "adaptive"):
        first, last = flap.plateau(np.array([row[kind]["total_s"] for row in rows]))
        plateaus[kind] = [rows[first]["exponent"], rows[last]["exponent"]]
        words = f"{kind}: exponents {plateaus[kind][0]} to {plateaus[kind][1]} cost at most {flap.PLATEAU:g} times the least"
        console.print(Text(words), soft_wrap=True)
    return {"rows": rows, "plateaus": plateaus, "own_exponent": limits.ib_timeout_exponent, "flaps": asdict(flaps)}


def _placement(console: Console, experiment: "Experiment", seeds: int) -> dict[str, Any]:
    from megascale_jax.sim.network import ecmp
    from megascale_jax.sim.placement_study import scores

    found = scores(experiment, seeds)
    columns = ("axis", "sent GB", "across ToR, by name", "placed", "across pods, by name", "placed")
    table = _table(f"{experiment.name}: one step on {found.nodes:,} nodes whose names say nothing of where they hang", columns)
    for axis in found.by_name[0].by_axis:
        cells = []
        for field in ("across_tor_bytes", "across_pod_bytes"):
            for one in (found.by_name, found.placed):
                values = [getattr(part, field) / 1e9 for score in one for part in score.by_axis if part.axis == axis.axis]
                cells.append(_spread(values))
        table.add_row(axis.axis, f"{axis.total_bytes / 1e9:,.4g}", *cells)
    console.print(table)
    result: dict[str, Any] = {
        "nodes": found.nodes,
        "by_name": [asdict(one) for one in found.by_name],
        "placed": [asdict(one) for one in found.placed],
    }
    if found.ring_nodes > 1:
        assert experiment.system.network is not None, "checked before"
        rings = ecmp.rings(experiment.system.network, found.nodes, found.ring_nodes, seeds)
        table = _table(
            f"data rings of {found.ring_nodes} nodes on all rails: rate over a NIC's", ("fabric", "mean flow", "mean ring", "slowest flow")
        )
        for name, rows in rings.items():
            table.add_row(name, *(_spread([getattr(row, field) for row in rows]) for field in ("mean", "ring", "slowest")))
        console.print(table)
        result["rings"] = _rows_of(rings)
    return result


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=f"{title} (simulated)", title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, in the digits that the deviation leaves."""
    mean = sum(values) / len(values)
    deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{mean:,.4g} ± {deviation:.2g}"


def _rows_of(found: Mapping[str, Sequence[Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [asdict(row) for row in rows] for name, rows in found.items()}

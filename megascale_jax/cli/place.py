"""`megascale place`: which node gets which ranks, and what that saves on the network. Needs no device."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megascale_jax.config.load import load_experiment
from megascale_jax.errors import BackendError, ConfigError, UsageError
from megascale_jax.observe.report import check_json_path, check_output_path, replace_file, write_json

if TYPE_CHECKING:
    from megascale_jax.cluster.node_order import Hangs
    from megascale_jax.config.schema import Experiment
    from megascale_jax.sim.placement import Placement, Score

SLURM = "slurm"


def place(
    experiment: Annotated[str, typer.Argument(help="name of an experiment (`megascale config list`) or a YAML file", show_default=False)],
    nodes: Annotated[Path, typer.Option(help="file with the nodes that there are, one a line, spares among them", show_default=False)],
    node_order: Annotated[Path, typer.Option(help="file to write: the nodes in the order of their ranks", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="changes, such as parallel.data=48", show_default=False)] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            help="file with lines NODE TOR_SET [POD], or `slurm` to ask scontrol; default: assumed, sets filled in the order of names",
            show_default=False,
        ),
    ] = None,
    devices_per_node: Annotated[int | None, typer.Option(min=1, help="default: system.devices_per_node", show_default=False)] = None,
    json: Annotated[Path | None, typer.Option("--json", help="also write the scores to this file", show_default=False)] = None,
) -> None:
    """Order the nodes of a job so that tensor groups stay in a node and data groups under as few ToR switches as can be.

    The file goes to `megascale drive --node-order`, `megascale launch render --node-order` or `launch/slurm.sbatch --node-order`. The score
    is what one step sends over the network, by mesh axis, beside that of the nodes by name, which is what schedulers and drivers go by.
    """
    from megascale_jax.cluster.node_order import natural, read_names, write_order
    from megascale_jax.sim.placement import nodes_needed
    from megascale_jax.sim.placement import place as place_ranks

    check_json_path(json)
    check_output_path(node_order, "--node-order")
    resolved = load_experiment(experiment, overrides or [])
    devices = devices_per_node or resolved.system.devices_per_node
    if devices is None:
        raise ConfigError(f"system.devices_per_node of {resolved.system.device} is null; say how many a node has with --devices-per-node")
    names = sorted(read_names(nodes, "--nodes"), key=natural)
    needed = nodes_needed(resolved, devices)
    if len(names) < needed:
        raise UsageError(f"--nodes {nodes}: got {len(names)} nodes, expected at least {needed} of {devices} devices for the mesh")
    sites, source = _sites(names, topology, resolved)
    found = place_ranks(resolved, names, sites, devices)
    header = [
        f"{resolved.name}: {found.num_ranked} nodes with ranks, then {len(found.order) - found.num_ranked} spares; line i gets rank i",
        f"across ToR sets {found.score.across_tor_bytes / 1e9:.4g} GB a step, by name {found.naive.across_tor_bytes / 1e9:.4g}",
        f"topology: {source}",
    ]
    replace_file(node_order, write_order(found.order, header))
    _show(Console(), resolved, found, source)
    typer.echo(f"wrote {node_order}")
    if json is not None:
        write_json(json, _as_data(found, source, devices))


def _sites(names: Sequence[str], topology: str | None, experiment: "Experiment") -> tuple[Mapping[str, "Hangs"], str]:
    """Where each node hangs, and who says so. Raises UsageError where nobody knows."""
    from megascale_jax.cluster.node_order import Hangs, read_topology, slurm_topology

    if topology == SLURM:
        from megascale_jax.cluster.backends.slurm_commands import Slurm

        slurm = Slurm()
        try:
            return _known(slurm_topology(slurm.topology(), slurm.host_names), names, "Slurm"), "Slurm's"
        except BackendError as error:
            raise UsageError(f"--topology slurm: {error}") from error
    if topology is not None:
        return _known(read_topology(Path(topology)), names, topology), topology
    network = experiment.system.network
    if network is None:
        raise ConfigError(f"system.network of {experiment.system.device} is not known; name a file with --topology, or set system.network")
    sets = [index // network.nodes_per_tor for index in range(len(names))]
    found = {name: Hangs(f"set-{one}", f"pod-{one // network.tor_sets_per_pod}") for name, one in zip(names, sets, strict=True)}
    return found, f"assumed, {network.nodes_per_tor} nodes to a ToR set in the order of their names"


def _known(sites: Mapping[str, "Hangs"], names: Sequence[str], origin: str) -> Mapping[str, "Hangs"]:
    if lost := [name for name in names if name not in sites]:
        raise UsageError(f"--topology {origin}: nothing of {lost[0]}, one of {len(lost)} such nodes; expected all {len(names)} of --nodes")
    return sites


def _show(console: Console, experiment: "Experiment", found: "Placement", source: str) -> None:
    table = Table(title=f"{experiment.name}: one step on {found.num_ranked} nodes, simulated", title_justify="left")
    for column in (
        "axis",
        "sent GB",
        "leaves node",
        "across ToR, by name",
        "placed",
        "across pod, by name",
        "placed",
        "under one ToR, by name",
        "placed",
    ):
        table.add_column(column, justify="left" if column == "axis" else "right")
    for naive, placed in zip(found.naive.by_axis, found.score.by_axis, strict=True):
        pairs = ((one.across_tor_bytes, other.across_tor_bytes) for one, other in ((naive, placed),))
        pods = naive.across_pod_bytes, placed.across_pod_bytes
        cells = [f"{value / 1e9:,.4g}" for value in (placed.total_bytes, placed.network_bytes, *next(pairs), *pods)]
        table.add_row(placed.axis, *cells, f"{naive.groups_whole:.0%}", f"{placed.groups_whole:.0%}")
    console.print(table)
    console.print(Text(f"topology: {source}; chosen: {found.method}"), soft_wrap=True)


def _as_data(found: "Placement", source: str, devices_per_node: int) -> dict[str, object]:
    def scored(score: "Score") -> dict[str, object]:
        axes = {one.axis: {key: value for key, value in dataclasses.asdict(one).items() if key != "axis"} for one in score.by_axis}
        return {"across_tor_bytes": score.across_tor_bytes, "across_pod_bytes": score.across_pod_bytes, "by_axis": axes}

    return {
        "kind": "simulated",
        "topology": source,
        "method": found.method,
        "nodes": found.num_ranked,
        "spares": len(found.order) - found.num_ranked,
        "devices_per_node": devices_per_node,
        "placed": scored(found.score),
        "by_name": scored(found.naive),
    }

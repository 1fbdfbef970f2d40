"""`megascale launch`: what a cluster needs to be given so that a run is driven there."""

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from megascale_jax.config.load import load_experiment
from megascale_jax.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from megascale_jax.cluster.backends.kubernetes.plan import Plan
    from megascale_jax.config.schema import Experiment

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Make what starts a driven run on a cluster.")

MANIFESTS, SECRETS = "run.yaml", "secrets.yaml"


class Target(StrEnum):
    """Clusters that manifests are made for."""

    KUBERNETES = "kubernetes"


@app.callback()
def _launch() -> None:
    """A group, also with one command in it."""


@app.command()
def render(
    experiment: Annotated[str, typer.Argument(help="name of an experiment in the image (`megascale config list`)", show_default=False)],
    image: Annotated[str, typer.Option(help="container image with megascale_jax[gpu,kubernetes], better by digest", show_default=False)],
    run_volume: Annotated[str, typer.Option(help="claim of a volume that all pods can write; mounted at /volume", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="changes, such as parallel.data=2", show_default=False)] = None,
    backend: Annotated[Target, typer.Option(help="what the cluster is run by")] = Target.KUBERNETES,
    nodes: Annotated[int, typer.Option(min=1, help="nodes that train")] = 1,
    spares: Annotated[int, typer.Option(min=0, help="further nodes that stand by")] = 0,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="0: train on CPUs")] = 8,
    name: Annotated[str | None, typer.Option(help="of the JobSet; default: the experiment's", show_default=False)] = None,
    namespace: Annotated[str, typer.Option(help="where everything is made")] = "default",
    run_folder: Annotated[str, typer.Option(help="below /volume; default runs/NAME", show_default=False)] = "",
    resource: Annotated[
        list[str] | None, typer.Option(help="of each node: cpu=90, memory=900Gi, hugepages-2Mi=8Gi, rdma/hca=8; repeat", show_default=False)
    ] = None,
    shared_memory: Annotated[str, typer.Option(help="size of /dev/shm")] = "64Gi",
    queue: Annotated[str | None, typer.Option(help="Kueue's local queue; the run waits until it is admitted", show_default=False)] = None,
    topology: Annotated[
        str | None, typer.Option(help="label of machines that nodes should share, such as a rack's", show_default=False)
    ] = None,
    node_order: Annotated[
        Path | None,
        typer.Option(
            help="file with machines (kubernetes.io/hostname) in the order of their ranks, of `megascale place`", show_default=False
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1024, max=65535, help="of the control link")] = 7070,
    user: Annotated[int, typer.Option(min=1, help="user and group that containers run as; must be able to write the volume")] = 1000,
    retention: Annotated[int, typer.Option(min=0, help="seconds after its end until the JobSet and its logs are deleted")] = 7 * 86400,
    egress: Annotated[list[str] | None, typer.Option(help="network that pods may reach on port 443: an object store's; repeat")] = None,
    api_server: Annotated[
        list[str] | None, typer.Option(metavar="CIDR[:PORT]", help="network of the API server; default: its ports anywhere; repeat")
    ] = None,
    dns_network: Annotated[
        list[str] | None, typer.Option(help="network with DNS servers other than kube-system's pods, such as 169.254.20.10/32; repeat")
    ] = None,
    dns_port: Annotated[int, typer.Option(min=1, max=65535, help="that the DNS servers' pods listen on")] = 53,
    pull_secret: Annotated[str | None, typer.Option(help="Secret for the image's registry", show_default=False)] = None,
    security: Annotated[
        Path | None,
        typer.Option(help="certificates of `megascale certs init`, made when not there; writes the Secrets", show_default=False),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="folder to write to; default: print", show_default=False)] = None,
) -> None:
    """Write the manifests of a driven run: JobSet, rights of its driver, network policies, disruption budget.

    Nothing is sent anywhere: read them, then `kubectl apply`. Secrets are written only with `--security` and `--output`, to a file for its
    owner only; they are never printed. The cluster needs JobSet; with `--queue` also Kueue.
    """
    from megascale_jax.cluster.backends.kubernetes.manifests import render as manifests
    from megascale_jax.cluster.backends.kubernetes.plan import Plan, pairs

    resolved = _checked(experiment, overrides or [], nodes, gpus_per_node)
    plan = Plan(
        name=name or re.sub(r"[^a-z0-9]+", "-", experiment.lower()).strip("-"),
        namespace=namespace,
        image=image,
        experiment=experiment,
        overrides=tuple(overrides or ()),
        nodes=nodes,
        spares=spares,
        gpus_per_node=gpus_per_node,
        run_volume=run_volume,
        run_folder=run_folder,
        resources=pairs(resource or (), "--resource"),
        shared_memory=shared_memory,
        queue=queue,
        topology=topology,
        lists_machines=bool(resolved.cluster.kubernetes.switch_labels),
        port=port,
        user=user,
        retention_s=retention,
        egress=tuple(egress or ()),
        api_server=tuple(api_server or ()),
        dns=tuple(dns_network or ()),
        dns_port=dns_port,
        pull_secret=pull_secret,
        node_order=_order(node_order, nodes, spares),
    )
    if security is not None and output is None:
        raise UsageError("--security writes Secrets, which are not printed; name a folder with --output")
    text = _yaml(manifests(plan))
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.mkdir(parents=True, exist_ok=True)
        (output / MANIFESTS).write_text(text)
    _explain(plan, output, security)


def _order(path: Path | None, nodes: int, spares: int) -> tuple[str, ...]:
    from megascale_jax.cluster.node_order import check_order, read_names

    if path is None:
        return ()
    order = read_names(path, "--node-order")
    check_order(order, f"--node-order {path}", nodes=nodes, spares=spares)
    return order


def _checked(experiment: str, overrides: list[str], nodes: int, gpus_per_node: int) -> "Experiment":
    from megascale_jax.config.layout import MeshShape

    if Path(experiment).suffix in (".yaml", ".yml"):
        raise UsageError(f"{experiment} is a file of this machine; expected an experiment that the image has, by name")
    resolved = load_experiment(experiment, overrides)
    mesh = MeshShape.of(resolved.parallel).size
    devices = nodes * gpus_per_node if gpus_per_node else None
    if mesh % nodes or (devices is not None and mesh != devices):
        has = f"{nodes} nodes of {gpus_per_node} GPUs" if devices else f"{nodes} nodes"
        raise ConfigError(f"a mesh of {mesh} devices does not fit {has}; change --nodes, --gpus-per-node or parallel.*")
    return resolved


def _explain(plan: "Plan", output: Path | None, security: Path | None) -> None:
    """Write the Secrets, and say what is to be done."""
    from megascale_jax.cluster.backends.kubernetes.names import driver_hosts
    from megascale_jax.cluster.backends.kubernetes.secrets import prepare, secrets
    from megascale_jax.cluster.link.certificates import write_private

    say = Console(stderr=True, soft_wrap=True)
    if output is not None and security is not None:
        prepare(plan, security)
        write_private({output / SECRETS: _yaml(secrets(plan, security)).encode()}, force=True)
        say.print(Text(f"{output / SECRETS}: private keys and tokens; delete it once it is applied"))
        say.print(Text(f"kubectl create -f {output / SECRETS} && kubectl apply -f {output / MANIFESTS}"))
    else:
        hosts = " ".join(f"--host {host}" for host in driver_hosts(plan.name))
        say.print(
            Text(
                f"its pods wait for the Secrets {plan.name}-driver, {plan.name}-executor and {plan.name}-tokens; render again with "
                f"--security FOLDER --output FOLDER, which makes certificates as `megascale certs init FOLDER {hosts}` does"
            )
        )


def _yaml(objects: list[dict[str, Any]]) -> str:
    """Without YAML's anchors, which people read badly."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    return yaml.dump_all(objects, Dumper=Plain, sort_keys=False, explicit_start=True, width=140)

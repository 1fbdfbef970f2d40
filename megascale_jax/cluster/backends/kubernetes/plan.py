"""What `megascale launch render` was asked for, checked before anything is made of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import PurePosixPath

from megascale_jax.cluster.backends.kubernetes.names import EXECUTOR
from megascale_jax.errors import UsageError

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_RESOURCE = re.compile(r"([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9][-A-Za-z0-9_.]*")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_LONGEST = 63


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One driven run on a cluster. Paths are those inside the containers."""

    name: str
    namespace: str
    image: str
    experiment: str
    overrides: tuple[str, ...] = ()
    nodes: int
    spares: int
    gpus_per_node: int
    run_volume: str
    """Claim of a volume that all pods can write: run folder, prepared data, compiled programs."""
    run_folder: str = ""
    """Default: ``runs/NAME`` of the volume."""
    resources: tuple[tuple[str, str], ...] = ()
    """Of an executor, beside GPUs: cpu, memory, hugepages-2Mi, rdma/hca."""
    shared_memory: str = "64Gi"
    queue: str | None = None
    topology: str | None = None
    """Label of machines that executors should have in common, such as a rack's."""
    lists_machines: bool = True
    """The driver may list all machines, to know by their labels which are under one switch."""
    port: int = 7070
    user: int = 1000
    retention_s: int = 7 * 86400
    egress: tuple[str, ...] = ()
    """Networks that pods may reach on port 443, such as an object store's."""
    api_server: tuple[str, ...] = ()
    """Networks of the API server, ``CIDR`` or ``CIDR:PORT``; none: ports 443 and 6443 of all."""
    dns: tuple[str, ...] = ()
    """Networks with DNS servers beside the pods of kube-system."""
    dns_port: int = 53
    """That the DNS servers themselves listen on."""
    pull_secret: str | None = None
    node_order: tuple[str, ...] = ()
    """Machines that executors are to be on, in the order of their ranks, then those of the spares."""

    def __post_init__(self) -> None:
        """Raises UsageError for what a cluster would refuse, or would only find out later."""
        longest = f"{self.name}-{EXECUTOR}-0-{self.number - 1}-xxxxx"
        for what, text in (("--name", self.name), ("--namespace", self.namespace)):
            if not _LABEL.fullmatch(text):
                raise UsageError(f"{what} is {text!r}; expected small letters, digits and '-', first a letter")
        if len(longest) > _LONGEST:
            raise UsageError(
                f"pods would be called {longest}, {len(longest)} characters; Kubernetes allows {_LONGEST}: choose a shorter --name"
            )
        for name, quantity in self.resources:
            if not _RESOURCE.fullmatch(name) or not _QUANTITY.fullmatch(quantity):
                raise UsageError(f"--resource is {name}={quantity}; expected NAME=QUANTITY, such as memory=900Gi or rdma/hca=1")
        named = {name for name, _ in self.resources}
        if any(name.startswith("hugepages-") for name in named) and not named & {"cpu", "memory"}:
            raise UsageError("Kubernetes gives huge pages only beside cpu or memory; add --resource memory=QUANTITY")
        if not _QUANTITY.fullmatch(self.shared_memory):
            raise UsageError(f"--shared-memory is {self.shared_memory!r}; expected a quantity such as 64Gi")
        for option, networks in (
            ("--egress", self.egress),
            ("--dns-network", self.dns),
            ("--api-server", [one for one, _ in self.servers]),
        ):
            for network in networks:
                _check_network(option, network)
        if not PurePosixPath(self.folder).is_relative_to(VOLUME):
            raise UsageError(f"--run-folder is {self.run_folder}; expected a folder below {VOLUME}, where --run-volume is mounted")

    @property
    def number(self) -> int:
        """Executors: those that train and the spares."""
        return self.nodes + self.spares

    @property
    def folder(self) -> str:
        """The run folder."""
        return str(PurePosixPath(VOLUME) / (self.run_folder or f"runs/{self.name}"))

    @property
    def servers(self) -> list[tuple[str, int | None]]:
        """Networks of the API server, each with its port where one was given. Raises UsageError."""
        found = []
        for text in self.api_server:
            address, slash, rest = text.partition("/")
            length, sign, port = rest.partition(":")
            if sign and not (port.isdecimal() and 0 < int(port) < 65536):
                raise UsageError(f"--api-server is {text!r}; expected CIDR or CIDR:PORT, such as 10.96.0.1/32:443")
            found.append((address + slash + length, int(port) if port else None))
        return found

    @property
    def training(self) -> list[str]:
        """Argv of a training process."""
        return ["megascale", "train", self.experiment, *self.overrides, "--run-folder", self.folder]


VOLUME = "/volume"


def _check_network(option: str, text: str) -> None:
    try:
        ip_network(text)
        is_network = "/" in text
    except ValueError:
        is_network = False
    if not is_network:
        raise UsageError(f"{option} is {text!r}; expected a network such as 10.0.0.0/8 or fd00::/8, without bits beyond its length")


def pairs(given: Sequence[str], option: str) -> tuple[tuple[str, str], ...]:
    """``NAME=VALUE`` texts, split. Raises UsageError."""
    found = []
    for text in given:
        name, sign, value = text.partition("=")
        if not sign:
            raise UsageError(f"{option} is {text!r}; expected NAME=QUANTITY")
        found.append((name, value))
    return tuple(found)

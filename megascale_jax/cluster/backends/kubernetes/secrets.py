"""Secrets of a run: what the driver's end of the control link needs, what every executor's needs, and one token for each node.

They go to files for their owner only, never to a terminal. A pod is given its own token alone, but whoever is root on its machine, or may
read Secrets of the namespace, sees all.
"""

import base64
from pathlib import Path
from typing import Any

from cryptography import x509

from megascale_jax.cluster.backends.kubernetes.names import DRIVER, EXECUTOR, driver_hosts, node_name
from megascale_jax.cluster.backends.kubernetes.plan import Plan
from megascale_jax.cluster.backends.kubernetes.pods import own_labels
from megascale_jax.cluster.job import OWNER, TOKEN_DAYS, token_file
from megascale_jax.cluster.link.certificates import make_folder
from megascale_jax.cluster.link.security import Security, make_token
from megascale_jax.cluster.link.tokens import Role
from megascale_jax.errors import UsageError

_CLIENT = ("ca.pem", "client.pem", "client.key", "job")
_DRIVER = (*_CLIENT, "driver.pem", "driver.key", "signing.key")


def prepare(plan: Plan, folder: Path) -> None:
    """Have certificates for this job's driver in ``folder``, and tokens of all nodes and of its owner: what is missing is made.

    Raises UsageError when what is there is not in order, or for another driver.
    """
    hosts = driver_hosts(plan.name)
    if not folder.exists():
        make_folder(folder, hosts)
    security = Security.load(folder, role="driver")
    found = x509.load_pem_x509_certificate(security.certificate.read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    if missing := [host for host in hosts if host not in found.value.get_values_for_type(x509.DNSName)]:
        raise UsageError(
            f"{security.certificate} is not for {', '.join(missing)}, the driver's names in JobSet {plan.name}; make another folder with "
            f"`megascale certs init FOLDER {' '.join(f'--host {host}' for host in hosts)}`, or name one that does not exist yet"
        )
    for name, role in (*((node_name(index), Role.NODE) for index in range(plan.number)), (OWNER, Role.ADMIN)):
        if not token_file(folder, name).is_file():
            make_token(security, name, role, days=TOKEN_DAYS, path=token_file(folder, name))
        else:
            Security.load(folder, role="client", token=token_file(folder, name))


def secrets(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """The Secrets as objects, from a folder that `prepare` has seen."""
    tokens = {node_name(index): token_file(folder, node_name(index)) for index in range(plan.number)}
    return [
        _secret(plan, DRIVER, {name: folder / name for name in _DRIVER} | {OWNER: token_file(folder, OWNER)}),
        _secret(plan, EXECUTOR, {name: folder / name for name in _CLIENT}),
        _secret(plan, "tokens", tokens),
    ]


def _secret(plan: Plan, part: str, files: dict[str, Path]) -> dict[str, Any]:
    data = {key: base64.b64encode(path.read_bytes()).decode() for key, path in files.items()}
    metadata = {"name": f"{plan.name}-{part}", "namespace": plan.namespace, "labels": own_labels(plan)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "immutable": True, "data": data}

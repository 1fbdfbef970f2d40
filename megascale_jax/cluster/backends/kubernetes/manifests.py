"""Everything a driven run needs on a cluster that has JobSet, as objects of the API; nothing here talks to one.

The JobSet succeeds with its driver, and fails with it: JobSet itself restarts nothing (it would restart all), the two Jobs in it do.
It makes the headless Service by which executors find the driver.
"""

from typing import Any

from megascale_jax.cluster.backends.kubernetes.names import DRIVER, EXECUTOR, JOBSET_LABEL, ORDER_FILE, QUEUE_LABEL, order_name
from megascale_jax.cluster.backends.kubernetes.plan import Plan
from megascale_jax.cluster.backends.kubernetes.pods import driver_job, executor_job, own_labels, pod_labels

Object = dict[str, Any]

_RBAC = "rbac.authorization.k8s.io"
_API_PORTS = (443, 6443)


def render(plan: Plan) -> list[Object]:
    """All objects but the Secrets, in the order in which they are to be made."""
    return [*_accounts(plan), *_rights(plan), *_networks(plan), *_budget(plan), *_order(plan), jobset(plan)]


def jobset(plan: Plan) -> Object:
    """The run itself."""
    spec = {
        "ttlSecondsAfterFinished": plan.retention_s,
        "network": {"enableDNSHostnames": True, "subdomain": plan.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [DRIVER]},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [driver_job(plan), executor_job(plan)],
    }
    made = _named(plan, "jobset.x-k8s.io/v1alpha2", "JobSet", plan.name) | {"spec": spec}
    if plan.queue is not None:  # Kueue's webhook suspends it; said here, every later `apply` would suspend the run
        made["metadata"]["labels"][QUEUE_LABEL] = plan.queue
    return made


def cluster_role(plan: Plan) -> str:
    """Of the run alone among all namespaces: no part of it can hold a ``:``."""
    return f"megascale:{plan.namespace}:{plan.name}:{DRIVER}"


def _accounts(plan: Plan) -> list[Object]:
    return [
        _named(plan, "v1", "ServiceAccount", f"{plan.name}-{role}") | {"automountServiceAccountToken": False} for role in (DRIVER, EXECUTOR)
    ]


def _rights(plan: Plan) -> list[Object]:
    """Of the driver alone; executors have none. No right to read Secrets, to make pods, or to run anything in them."""
    name, everywhere = f"{plan.name}-{DRIVER}", cluster_role(plan)
    account = {"kind": "ServiceAccount", "name": name, "namespace": plan.namespace}
    pods = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "delete"]},
        {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]},
    ]
    verbs = ["get", *(["list"] if plan.lists_machines else []), "patch"]
    machines = [{"apiGroups": [""], "resources": ["nodes"], "verbs": verbs}]
    made = [
        _named(plan, f"{_RBAC}/v1", "Role", name) | {"rules": pods},
        _binding(plan, "Role", name, account),
        _named(plan, f"{_RBAC}/v1", "ClusterRole", everywhere) | {"rules": machines},
        _binding(plan, "ClusterRole", everywhere, account),
    ]
    for one in made[2:]:
        del one["metadata"]["namespace"]
    return made


def _binding(plan: Plan, kind: str, name: str, account: Object) -> Object:
    reference = {"apiGroup": _RBAC, "kind": kind, "name": name}
    return _named(plan, f"{_RBAC}/v1", f"{kind}Binding", name) | {"roleRef": reference, "subjects": [account]}


def _networks(plan: Plan) -> list[Object]:
    """Deny all of the job's pods, then allow what is needed: control port, training traffic, DNS, the API server, storage on request."""
    driver, executors = ({"podSelector": {"matchLabels": pod_labels(plan, role)}} for role in (DRIVER, EXECUTOR))
    control = _tcp(plan.port)
    storage = [{"to": _blocks(plan.egress), "ports": _tcp(443)}] if plan.egress else []
    servers = [{"to": _blocks((network,)), "ports": _tcp(port) if port else _tcp(*_API_PORTS)} for network, port in plan.servers]
    dns = _dns(plan)
    return [
        _network(plan, plan.name, {JOBSET_LABEL: plan.name}, [], []),
        _network(
            plan,
            f"{plan.name}-{DRIVER}",
            pod_labels(plan, DRIVER),
            [{"from": [executors], "ports": control}],
            [dns, *(servers or [{"ports": _tcp(*_API_PORTS)}]), *storage],
        ),
        _network(
            plan,
            f"{plan.name}-{EXECUTOR}",
            pod_labels(plan, EXECUTOR),
            [{"from": [executors]}],
            [dns, {"to": [driver], "ports": control}, {"to": [executors]}, *storage],
        ),
    ]


def _network(plan: Plan, name: str, selected: dict[str, str], ingress: list[Object], egress: list[Object]) -> Object:
    spec = {"podSelector": {"matchLabels": selected}, "policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress}
    return _named(plan, "networking.k8s.io/v1", "NetworkPolicy", name) | {"spec": spec}


def _dns(plan: Plan) -> Object:
    """The cluster's DNS pods, by the labels that Kubernetes' own have, and what else was named."""
    pods = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    }
    return {"to": [pods, *_blocks(plan.dns)], "ports": [{"protocol": one, "port": plan.dns_port} for one in ("UDP", "TCP")]}


def _tcp(*ports: int) -> list[Object]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def _blocks(networks: tuple[str, ...]) -> list[Object]:
    return [{"ipBlock": {"cidr": network}} for network in networks]


def _budget(plan: Plan) -> list[Object]:
    """Draining takes one executor at a time. Kubernetes takes a number of pods that must stay only, for pods of a Job."""
    if plan.number == 1:
        return []
    spec = {
        "minAvailable": plan.number - 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": pod_labels(plan, EXECUTOR)},
    }
    return [_named(plan, "policy/v1", "PodDisruptionBudget", f"{plan.name}-{EXECUTOR}") | {"spec": spec}]


def _order(plan: Plan) -> list[Object]:
    """The order of machines, which the driver goes by; executors are wherever Kubernetes puts them among these."""
    if not plan.node_order:
        return []
    data = {ORDER_FILE: "".join(f"{name}\n" for name in plan.node_order)}
    return [_named(plan, "v1", "ConfigMap", order_name(plan.name)) | {"data": data}]


def _named(plan: Plan, version: str, kind: str, name: str) -> Object:
    metadata: Object = {"name": name, "namespace": plan.namespace, "labels": own_labels(plan)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}

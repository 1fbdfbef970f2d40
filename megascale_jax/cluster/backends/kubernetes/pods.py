"""The two Jobs of a JobSet: the driver, and the executors with one index a node."""

from typing import Any

from megascale_jax.cluster.backends.kubernetes.names import (
    DRIVER,
    DRIVER_RESTARTS,
    EXECUTOR,
    HOST_LABEL,
    INDEX_ANNOTATION,
    JOBSET_LABEL,
    JOBSET_VARIABLE,
    LAUNCH_LABEL,
    LAUNCH_VARIABLE,
    ORDER_FILE,
    QUEUE_TOPOLOGY_ANNOTATION,
    ROLE_LABEL,
    driver_hosts,
    node_name,
    order_name,
)
from megascale_jax.cluster.backends.kubernetes.plan import VOLUME, Plan
from megascale_jax.cluster.job import SECURITY_VARIABLE

_NEVER_FAILS = 2**31 - 1
_GONE_S = 30
"""After which the driver leaves a machine that is away; Kubernetes alone would wait five minutes."""
_SECURITY, _TOKEN, _SCRATCH, _ORDER = "/security", "/token/node", "/scratch", "/node-order"

Object = dict[str, Any]


def driver_job(plan: Plan) -> Object:
    """One pod, restarted in place when it ends without success, on another machine when its own is away."""
    container = _container(plan, DRIVER) | {
        "command": ["megascale", "drive", *_literal(plan.experiment, *plan.overrides)],
        "args": [
            *("--backend", "kubernetes", "--nodes", str(plan.nodes), "--spares", str(plan.spares)),
            *("--port", str(plan.port), "--run-folder", plan.folder),
            *(("--node-order", f"{_ORDER}/{ORDER_FILE}") if plan.node_order else ()),
        ],
        "ports": [{"name": "control", "containerPort": plan.port}],
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "4Gi"}},
    }
    container["env"] += [
        _field(JOBSET_VARIABLE, f"metadata.labels['{JOBSET_LABEL}']"),
        _field(LAUNCH_VARIABLE, f"metadata.labels['{LAUNCH_LABEL}']"),
        {"name": SECURITY_VARIABLE, "value": _SECURITY},
    ]
    away = [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _GONE_S}
        for key in ("not-ready", "unreachable")
    ]
    spec = _pod(plan, DRIVER, container) | {"automountServiceAccountToken": True, "tolerations": away, "terminationGracePeriodSeconds": 30}
    if plan.node_order:
        spec["volumes"] += [{"name": "node-order", "configMap": {"name": order_name(plan.name)}}]
        container["volumeMounts"] += [{"name": "node-order", "mountPath": _ORDER, "readOnly": True}]
    return _job(plan, DRIVER, 1, DRIVER_RESTARTS, spec)


def executor_job(plan: Plan) -> Object:
    """One pod a node, each on a machine of its own. A container that ends is restarted in place; a pod that is told to end is replaced
    at once, for its machine may never say that it has ended. It completes with the run alone (exit code 0 of `megascale execute`).
    """
    gpus = (("nvidia.com/gpu", str(plan.gpus_per_node)),) if plan.gpus_per_node else ()
    amounts = dict((*plan.resources, *gpus))
    container = _container(plan, EXECUTOR) | {
        "command": ["megascale", "execute"],
        "args": [
            *("--driver", f"{driver_hosts(plan.name)[1]}:{plan.port}", "--security", _SECURITY, "--token", _TOKEN),
            *("--node", node_name("$(JOB_COMPLETION_INDEX)"), "--machine", "$(MACHINE)", "--address", "$(POD_IP)"),
            *("--folder", _SCRATCH, "--", *_literal(*plan.training)),
        ],
        "resources": {"requests": amounts, "limits": amounts} if amounts else {},
    }
    container["env"] += [
        _field("JOB_COMPLETION_INDEX", f"metadata.annotations['{INDEX_ANNOTATION}']"),
        _field("MACHINE", "spec.nodeName"),
        _field("POD_IP", "status.podIP"),
    ]
    container["volumeMounts"] += [
        {"name": "token", "mountPath": _TOKEN, "subPathExpr": node_name("$(JOB_COMPLETION_INDEX)"), "readOnly": True},
        {"name": "scratch", "mountPath": _SCRATCH},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    if any(name.startswith("rdma/") for name, _ in plan.resources):
        container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]  # registering memory with a NIC pins it
    spec = _pod(plan, EXECUTOR, container) | {"terminationGracePeriodSeconds": 60, "affinity": _affinity(plan)}
    spec["volumes"] += [
        {"name": "token", "secret": {"secretName": f"{plan.name}-tokens", "defaultMode": 0o440}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": plan.shared_memory}},
    ]
    job = _job(plan, EXECUTOR, plan.number, _NEVER_FAILS, spec)
    if plan.queue and plan.topology:
        job["template"]["spec"]["template"]["metadata"]["annotations"] = {QUEUE_TOPOLOGY_ANNOTATION: plan.topology}
    return job


def own_labels(plan: Plan) -> dict[str, str]:
    """What people find everything of a run by."""
    return {"app.kubernetes.io/name": "megascale", "app.kubernetes.io/instance": plan.name}


def pod_labels(plan: Plan, role: str) -> dict[str, str]:
    """What selects the pods of a role; JobSet sets them."""
    return {JOBSET_LABEL: plan.name, ROLE_LABEL: role}


def _job(plan: Plan, role: str, completions: int, restarts: int, pod: Object) -> Object:
    spec = {
        "completionMode": "Indexed",
        "completions": completions,
        "parallelism": completions,
        "backoffLimit": restarts,
        "podReplacementPolicy": "TerminatingOrFailed",
        "template": {"metadata": {"labels": own_labels(plan)}, "spec": pod},
    }
    return {"name": role, "replicas": 1, "template": {"spec": spec}}


def _pod(plan: Plan, role: str, container: Object) -> Object:
    user = {"runAsUser": plan.user, "runAsGroup": plan.user, "fsGroup": plan.user, "fsGroupChangePolicy": "OnRootMismatch"}
    pulled = {"imagePullSecrets": [{"name": plan.pull_secret}]} if plan.pull_secret else {}
    return pulled | {
        "restartPolicy": "OnFailure",
        "serviceAccountName": f"{plan.name}-{role}",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "shareProcessNamespace": True,  # its first process is the sandbox's, which reaps what others leave behind
        "securityContext": {"runAsNonRoot": True, **user, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": plan.run_volume}},
            {"name": "security", "secret": {"secretName": f"{plan.name}-{role}", "defaultMode": 0o440, **_items(role)}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def _items(role: str) -> Object:
    """Where a Secret's keys, which may hold no '/', lie in the folder."""
    if role == EXECUTOR:
        return {}
    files = ("ca.pem", "driver.pem", "driver.key", "client.pem", "client.key", "signing.key", "job")
    return {"items": [*({"key": name, "path": name} for name in files), {"key": "owner", "path": "tokens/owner"}]}


def _container(plan: Plan, role: str) -> Object:
    return {
        "name": role,
        "image": plan.image,
        "workingDir": VOLUME,
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "MEGASCALE_CACHE", "value": f"{VOLUME}/cache"}],
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "work", "mountPath": VOLUME},
            {"name": "security", "mountPath": _SECURITY, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def _affinity(plan: Plan) -> Object:
    selector = {"matchLabels": pod_labels(plan, EXECUTOR)}
    apart = [{"topologyKey": HOST_LABEL, "labelSelector": selector}]
    found: Object = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}}
    if plan.node_order:
        named = {"matchExpressions": [{"key": HOST_LABEL, "operator": "In", "values": list(plan.node_order)}]}
        found["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [named]}}
    if plan.topology and not plan.queue:
        term = {"weight": 100, "podAffinityTerm": {"topologyKey": plan.topology, "labelSelector": selector}}
        found["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [term]}
    return found


def _field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _literal(*texts: str) -> list[str]:
    """Arguments in which Kubernetes expands nothing."""
    return [text.replace("$(", "$$(") for text in texts]

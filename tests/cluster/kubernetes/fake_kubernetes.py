"""An API server of our own for the official client: what a cluster has, who may do what, and everything that can go wrong.

It knows the requests that a driver's rights allow, and refuses all others: the rules come from the rendered Role and ClusterRole.
`reconcile` is what the Job controller, the scheduler and the kubelets do meanwhile.
"""

import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client

from megascale_jax.cluster.backends.kubernetes.client import Cluster, api_client
from megascale_jax.cluster.backends.kubernetes.manifests import render
from megascale_jax.cluster.backends.kubernetes.names import HOST_LABEL, INDEX_ANNOTATION
from megascale_jax.cluster.backends.kubernetes.plan import Plan
from megascale_jax.cluster.backends.kubernetes.pods import pod_labels
from tests.cluster.kubernetes.schemas import problems

TOKEN = "a-service-account"
LIMIT_S = 1.0
"""Of a request, so that one that hangs ends soon."""
PAGE = 3
"""Pods or machines in one answer, fewer than there are."""
Object = dict[str, Any]

_CONTENT_TYPES = {
    "PATCH": ("application/merge-patch+json", "application/strategic-merge-patch+json"),
    "POST": ("application/json",),
    "DELETE": ("application/json",),
}


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, message: str, after_s: int | None = None, cause: str = ""):
        super().__init__(message)
        self.status, self.after_s, self.cause = status, after_s, cause


@dataclass(frozen=True)
class Done:
    """A request that changed something."""

    verb: str
    kind: str
    name: str
    machine: str
    body: Object


@dataclass
class FakeKubernetes:
    """A cluster of so many machines with the pods of one plan. ``faults``: for the next requests, one each."""

    plan: Plan
    machines: int
    faults: deque[str] = field(default_factory=deque)
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(verb, resource) of each request that was let in."""
    done: list[Done] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    """Requests that no well-behaved client makes."""
    url: str = ""
    driver_restarts: int = 3
    pods: dict[str, Object] = field(default_factory=dict)
    nodes: dict[str, Object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._versions, self._uids = itertools.count(1), itertools.count(1)
        problems({"apiVersion": "policy/v1", "kind": "Eviction"})  # read the schemas now, not while a client waits
        self.rules = _rules(render(self.plan), self.plan.namespace)
        budgets = [one for one in render(self.plan) if one["kind"] == "PodDisruptionBudget"]
        self.min_available = budgets[0]["spec"]["minAvailable"] if budgets else 0
        for number in range(self.machines):
            self.add_machine(f"machine-{number}")
        self.reconcile()

    # The cluster's own doing.

    def add_machine(self, name: str) -> None:
        status = {"conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "True"}]}
        metadata = {"name": name, "resourceVersion": self._next(), "labels": {HOST_LABEL: name}}
        self.nodes[name] = {"metadata": metadata, "spec": {}, "status": status}

    def set_labels(self, name: str, labels: Mapping[str, str]) -> None:
        """Those of a machine beside its host's."""
        with self.lock:
            self.nodes[name]["metadata"]["labels"] = {HOST_LABEL: name, **labels}
            self.nodes[name]["metadata"]["resourceVersion"] = self._next()

    def set_ready(self, name: str, is_ready: bool) -> None:
        with self.lock:
            self.nodes[name]["status"]["conditions"][1]["status"] = "True" if is_ready else "Unknown"
            self.nodes[name]["metadata"]["resourceVersion"] = self._next()

    def is_ready(self, name: str) -> bool:
        return name in self.nodes and self.nodes[name]["status"]["conditions"][1]["status"] == "True"

    def set_container(self, name: str, state: str) -> None:
        """Of the pod of a node: running, waiting or terminated."""
        with self.lock:
            self.pod_of(name)["status"]["containerStatuses"] = [{"name": "executor", "state": {state: {}}}]

    def set_cordon(self, name: str, is_cordoned: bool) -> None:
        """As `kubectl cordon` and `kubectl uncordon` do."""
        with self.lock:
            node = self.nodes[name]
            node["spec"] = {"unschedulable": True} if is_cordoned else {}
            node["metadata"]["resourceVersion"] = self._next()

    def pod_of(self, node: str) -> Object:
        """The newest pod of a node of the job."""
        index = node.removeprefix("node-")
        return [pod for pod in self.pods.values() if pod["metadata"]["annotations"][INDEX_ANNOTATION] == index][-1]

    def machine_of(self, node: str) -> str:
        return self.pod_of(node)["spec"].get("nodeName", "")

    def reconcile(self) -> None:
        """Kubelets end what is to end, the Job controller makes pods, the scheduler puts them on machines of their own."""
        with self.lock:
            for name, pod in list(self.pods.items()):
                if "deletionTimestamp" in pod["metadata"] and self.is_ready(pod["spec"].get("nodeName", "")):
                    del self.pods[name]
            for index in range(self.plan.number):
                mine = [pod for pod in self.pods.values() if pod["metadata"]["annotations"][INDEX_ANNOTATION] == str(index)]
                if not any("deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] != "Failed" for pod in mine):
                    self._make_pod(index)
            for pod in self.pods.values():
                if pod["status"]["phase"] == "Pending":
                    self._schedule(pod)

    def _make_pod(self, index: int) -> None:
        uid = f"uid-{next(self._uids)}"
        name = f"{self.plan.name}-executor-0-{index}-{uid[4:]:0>5}"
        metadata = {
            "name": name,
            "namespace": self.plan.namespace,
            "uid": uid,
            "resourceVersion": self._next(),
            "labels": pod_labels(self.plan, "executor"),
            "annotations": {INDEX_ANNOTATION: str(index)},
        }
        self.pods[name] = {"metadata": metadata, "spec": {}, "status": {"phase": "Pending"}}

    def _schedule(self, pod: Object) -> None:
        taken = {other["spec"].get("nodeName") for other in self.pods.values() if other["status"]["phase"] not in ("Failed", "Succeeded")}
        for name, node in self.nodes.items():
            if name not in taken and self.is_ready(name) and not node["spec"].get("unschedulable"):
                pod["spec"]["nodeName"] = name
                pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "executor", "state": {"running": {}}}]}
                return

    def _next(self) -> str:
        return str(next(self._versions))

    # Requests.

    def answer(self, method: str, target: str, headers: Mapping[str, str], content: bytes) -> Object:
        """Carry out a request. Raises Refusal."""
        url = urlsplit(target)
        verb, resource, namespace, name = _request(method, url.path)
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refusal(401, "Unauthorized")
        if (verb, resource, namespace) not in self.rules:
            self.violations.append(f"{method} {url.path}")
            raise Refusal(403, f'User "system:serviceaccount:..." cannot {verb} resource "{resource}"')
        self.asked.append((verb, resource))
        body = self._body(method, headers, content)
        with self.lock:
            if (verb, resource) == ("list", "nodes"):
                return self._list_nodes(parse_qs(url.query), headers.get("Accept", ""))
            if resource == "nodes":
                return self._patch(name, body) if verb == "patch" else self._found(self.nodes, name)
            if verb == "list":
                return self._list(parse_qs(url.query))
            return self._end(name, body["deleteOptions"], True, body) if verb == "create" else self._end(name, body, False, body)

    def _body(self, method: str, headers: Mapping[str, str], content: bytes) -> Object:
        if method == "GET":
            return {}
        if headers.get("Content-Type") not in _CONTENT_TYPES[method]:
            self.violations.append(f"{method} with content type {headers.get('Content-Type')}")
            raise Refusal(415, "the body of the request was in an unknown format")
        body = json.loads(content)
        if method != "PATCH" and (wrong := problems(body)):
            self.violations.append(f"{method}: {wrong}")
            raise Refusal(400, str(wrong))
        return body

    def _list(self, query: Mapping[str, list[str]]) -> Object:
        wanted = dict(part.split("=", 1) for part in query.get("labelSelector", [""])[0].split(",") if part)
        if wanted == pod_labels(self.plan, "driver"):
            status = {"phase": "Running", "containerStatuses": [{"name": "driver", "restartCount": self.driver_restarts}]}
            return {"kind": "PodList", "metadata": {}, "items": [{"metadata": {}, "spec": {}, "status": status}]}
        if wanted != pod_labels(self.plan, "executor"):
            self.violations.append(f"pods selected by {wanted}")
        return self._page("PodList", list(self.pods.values()), query)

    def _list_nodes(self, query: Mapping[str, list[str]], accept: str) -> Object:
        """Metadata alone for who asks for that: status and images of all machines are too much to ask for."""
        if "as=PartialObjectMetadataList;g=meta.k8s.io;v=v1" not in accept:
            self.violations.append(f"machines listed as {accept}")
        return self._page("PartialObjectMetadataList", [{"metadata": node["metadata"]} for node in self.nodes.values()], query)

    def _page(self, kind: str, items: list[Object], query: Mapping[str, list[str]]) -> Object:
        first, limit = int(query.get("continue", ["0"])[0]), int(query["limit"][0])
        metadata = {"resourceVersion": self._next()}
        if first + limit < len(items):
            metadata["continue"] = str(first + limit)
        return {"kind": kind, "metadata": metadata, "items": items[first : first + limit]}

    def _patch(self, name: str, body: Object) -> Object:
        node = self._found(self.nodes, name)
        version = body.get("metadata", {}).pop("resourceVersion", None)
        if version != node["metadata"]["resourceVersion"]:
            raise Refusal(409, f'Operation cannot be fulfilled on nodes "{name}": the object has been modified')
        if set(body) - {"metadata", "spec"} or set(body["metadata"]) - {"annotations"} or set(body.get("spec", ())) - {"unschedulable"}:
            self.violations.append(f"a patch of {body}")
        _merge(node, body)
        node["metadata"]["resourceVersion"] = self._next()
        self.done.append(Done("patch", "nodes", name, name, body))
        return node

    def _end(self, name: str, options: Object, asks: bool, body: Object) -> Object:
        pod = self._found(self.pods, name)
        metadata, machine = pod["metadata"], pod["spec"].get("nodeName", "")
        if asks and body["metadata"] != {"name": name, "namespace": self.plan.namespace}:
            raise Refusal(400, "name in URL does not match name in Eviction object")
        if options.get("preconditions", {}).get("uid", metadata["uid"]) != metadata["uid"]:
            raise Refusal(409, "Precondition failed: UID in precondition is another")
        standing = [one for one in self.pods.values() if one["status"]["phase"] == "Running" and "deletionTimestamp" not in one["metadata"]]
        if asks and pod in standing and len(standing) - 1 < self.min_available:
            raise Refusal(429, "Cannot evict pod as it would violate the pod's disruption budget.", 10, cause="DisruptionBudget")
        metadata["deletionTimestamp"] = "2026-11-30T00:00:00Z"
        self.done.append(Done("evict" if asks else "delete", "pods", name, machine, options))
        if options.get("gracePeriodSeconds") == 0:
            del self.pods[name]
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _found(self, where: Mapping[str, Object], name: str) -> Object:
        if name not in where:
            raise Refusal(404, f'"{name}" not found')
        return where[name]

    def changes(self, verb: str) -> list[str]:
        """Names of the objects that were changed with a verb, in order."""
        return [one.name for one in self.done if one.verb == verb]

    @contextmanager
    def serving(self) -> Iterator[Cluster]:
        """The cluster as the driver sees it, through the official client."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        settings = client.Configuration()
        settings.host = self.url = f"http://127.0.0.1:{server.server_address[1]}"
        settings.api_key = {"BearerToken": f"Bearer {TOKEN}"}
        api = api_client(settings)
        try:
            yield Cluster(api, self.plan.namespace, self.plan.name, limit_s=(LIMIT_S, LIMIT_S), page=PAGE)
        finally:
            api.rest_client.pool_manager.clear()
            server.shutdown()
            server.server_close()


def _handler(fake: FakeKubernetes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _handle(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = fake.faults.popleft() if fake.faults else ""
            if fault == "hang":
                time.sleep(3 * LIMIT_S)
                self.close_connection = True
                return
            if fault == "drop":
                self.close_connection = True
                return
            after_s = None
            try:
                if fault.isdecimal():
                    raise Refusal(int(fault), "a fault", 1 if fault == "429" else None)
                status, answer = 200, json.dumps(fake.answer(self.command, self.path, self.headers, content))
            except Refusal as refusal:
                details = {"causes": [{"reason": refusal.cause, "message": str(refusal)}]} if refusal.cause else {}
                said = {"kind": "Status", "status": "Failure", "message": str(refusal), "details": details}
                status, answer, after_s = refusal.status, json.dumps(said), refusal.after_s
            if fault == "garbage":
                answer = "<html>a proxy</html>"
            if fault == "lost":  # carried out, and nobody hears of it
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            if after_s is not None:
                self.send_header("Retry-After", str(after_s))
            self.end_headers()
            with suppress(OSError):  # a client that waits no longer
                self.wfile.write(answer.encode())

        do_GET = do_PATCH = do_POST = do_DELETE = do_PUT = _handle

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def _request(method: str, path: str) -> tuple[str, str, str | None, str]:
    """Verb, resource, namespace and name, as the authorizer has them."""
    parts = path.strip("/").split("/")
    assert parts[:2] == ["api", "v1"], path
    parts = parts[2:]
    namespace = None
    if parts[0] == "namespaces":
        namespace, parts = parts[1], parts[2:]
    resource = "/".join([parts[0], *parts[2:]])
    name = parts[1] if len(parts) > 1 else ""
    verbs = {"GET": "get" if name else "list", "PATCH": "patch", "POST": "create", "DELETE": "delete", "PUT": "update"}
    return verbs[method], resource, namespace, name


def _rules(objects: list[Object], namespace: str) -> set[tuple[str, str, str | None]]:
    """What the rendered roles allow: verb, resource, and the namespace of a Role."""
    places = {"Role": namespace, "ClusterRole": None}
    return {
        (verb, resource, places[one["kind"]])
        for one in objects
        if one["kind"] in places
        for rule in one["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def _merge(target: Object, change: Mapping[str, Any]) -> None:
    """RFC 7396."""
    for key, value in change.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value

"""The few requests that the driver makes of a cluster, through the official client; nothing else imports it.

Answers are read as JSON and not as the client's models, which take 12 times as long. Every request has a limit in time,
and none is repeated in here: whoever calls looks at the world again first.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config

from megascale_jax.cluster.backends.kubernetes.names import (
    CORDONED_BY,
    DRIVER,
    EXECUTOR,
    INDEX_ANNOTATION,
    JOBSET_LABEL,
    REASON,
    ROLE_LABEL,
)
from megascale_jax.errors import BackendError

_LIMIT_S = (3.0, 10.0)
"""To connect, and of silence."""
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PAGE = 200
"""Pods, or machines, in one answer: some 20 ms of reading JSON, during which no other thread runs."""
_LONGEST_REASON = 1000
_NO_NOTES = {CORDONED_BY: None, REASON: None}
_SOON_S = 1.0
"""When to ask a server again that is asked too much, and does not say when."""
_JSON = {"Content-Type": "application/json"}
"""The client names no type by itself for the bodies of POST."""
_WHOLE = "application/json"
_METADATA = f"{_WHOLE};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""A machine's labels without its status, which is most of it: images, conditions, volumes."""


class RequestError(BackendError):
    """A request failed. ``status``: as HTTP has it; ``None``: there was no answer. ``is_of_budget``: a disruption budget refuses an
    eviction. ``after_s``: the server is asked too much, and wants to be asked again after so many seconds.
    """

    def __init__(self, text: str, status: int | None = None, *, is_of_budget: bool = False, after_s: float | None = None):
        super().__init__(text)
        self.status, self.is_of_budget, self.after_s = status, is_of_budget, after_s


@dataclass(frozen=True)
class Pod:
    """An executor's pod."""

    name: str
    uid: str
    index: str
    machine: str
    """Empty while it has none."""
    phase: str
    is_running: bool
    """Its container runs, as far as its machine has said."""
    is_leaving: bool
    """It was told to end."""

    @property
    def is_over(self) -> bool:
        """It has ended for good; the object is what is left of it."""
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True)
class Machine:
    """A node of the cluster."""

    name: str
    version: str
    is_ready: bool
    is_cordoned: bool
    cordoned_by: str
    reason: str
    """Of the job that cordoned it, as it was kept."""


class Cluster:
    """One JobSet's pods, and the machines that they are on. Every method raises RequestError."""

    def __init__(self, api: client.ApiClient, namespace: str, jobset: str, *, limit_s: tuple[float, float] = _LIMIT_S, page: int = _PAGE):
        self.job = f"{namespace}/{jobset}"
        self._namespace, self._limit_s, self._page = namespace, limit_s, page
        self._selectors = {role: f"{JOBSET_LABEL}={jobset},{ROLE_LABEL}={role}" for role in (DRIVER, EXECUTOR)}
        self._core = client.CoreV1Api(api)

    @classmethod
    def of_this_pod(cls, jobset: str) -> "Cluster":
        """With the service account that is mounted into this pod. Raises BackendError where there is none."""
        settings = client.Configuration()
        try:
            config.load_incluster_config(settings)
            namespace = _NAMESPACE.read_text().strip()
        except (config.ConfigException, OSError) as error:
            raise BackendError(
                f"no service account of Kubernetes is mounted here ({error}); the driver runs in a pod that has one"
            ) from error
        return cls(api_client(settings), namespace, jobset)

    def pods(self) -> list[Pod]:
        """All executors' pods there are, as they were at one time. Status 410: that time is too long ago to read on."""
        return [_pod(item) for item in self._pods(EXECUTOR)]

    def driver_restarts(self) -> int:
        """How often the driver was started again, as the Job controller counts it: in its pods that are there, and those that failed."""
        statuses = [item.get("status", {}) for item in self._pods(DRIVER)]
        failed = sum(status.get("phase") == "Failed" for status in statuses)
        return failed + sum(one.get("restartCount", 0) for status in statuses for one in status.get("containerStatuses", ()))

    def labels(self, names: Sequence[str]) -> dict[str, dict[str, str]]:
        """By machine, for all that the cluster has at one time: those of these labels that it has. Status 410: as for `pods`."""
        found = {}
        for item in self._list("list machines", self._core.list_node, accept=_METADATA):
            labels = item["metadata"].get("labels", {})
            found[item["metadata"]["name"]] = {name: labels[name] for name in names if name in labels}
        return found

    def _pods(self, role: str) -> list[dict[str, Any]]:
        selector = self._selectors[role]
        return self._list("list pods", self._core.list_namespaced_pod, self._namespace, accept=_WHOLE, label_selector=selector)

    def _list(self, what: str, method: Callable[..., Any], *arguments: Any, accept: str, **options: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        rest: dict[str, Any] = {}
        while True:
            answer = self._ask(what, method, *arguments, limit=self._page, _headers={"Accept": accept}, **options, **rest)
            found += answer["items"]
            if not (token := answer["metadata"].get("continue")):
                return found
            rest = {"_continue": token}

    def machine(self, name: str) -> Machine | None:
        """A machine as it is now, ``None`` when the cluster has it no more."""
        try:
            found = self._ask(f"read machine {name}", self._core.read_node, name)
        except RequestError as error:
            if error.status == 404:
                return None
            raise
        conditions = {one["type"]: one["status"] for one in found.get("status", {}).get("conditions", ())}
        annotations = found["metadata"].get("annotations", {})
        return Machine(
            name=name,
            version=found["metadata"]["resourceVersion"],
            is_ready=conditions.get("Ready") == "True",
            is_cordoned=bool(found.get("spec", {}).get("unschedulable")),
            cordoned_by=annotations.get(CORDONED_BY, ""),
            reason=annotations.get(REASON, ""),
        )

    def cordon(self, machine: Machine, reason: str) -> None:
        """Let nothing new be put on a machine, provided that it is still as it was read (status 409 otherwise)."""
        annotations = {CORDONED_BY: self.job, REASON: self.kept(reason)}
        self._patch(f"cordon machine {machine.name}", machine, annotations, {"spec": {"unschedulable": True}})

    def uncordon(self, machine: Machine) -> None:
        """The contrary, under the same condition."""
        self._patch(f"uncordon machine {machine.name}", machine, _NO_NOTES, {"spec": {"unschedulable": None}})

    def forget(self, machine: Machine) -> None:
        """Take this job's annotations off, and leave the machine as it is otherwise, under the same condition."""
        self._patch(f"clear the annotations of machine {machine.name}", machine, _NO_NOTES, {})

    @staticmethod
    def kept(reason: str) -> str:
        """As much of a reason as a machine is annotated with."""
        return reason[:_LONGEST_REASON]

    def evict(self, pod: Pod) -> None:
        """Ask for the end of exactly this pod. Status 429: a disruption budget does not allow it now; 404, 409: it is another one now."""
        metadata = {"name": pod.name, "namespace": self._namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, "deleteOptions": _only(pod)}
        self._ask(f"evict pod {pod.name}", self._core.create_namespaced_pod_eviction, pod.name, self._namespace, body, _headers=dict(_JSON))

    def delete(self, pod: Pod, *, at_once: bool) -> None:
        """End exactly this pod, whatever a budget says. ``at_once``: without a word of its machine, which is known to be away."""
        options = _only(pod) | ({"gracePeriodSeconds": 0} if at_once else {})
        self._ask(f"delete pod {pod.name}", self._core.delete_namespaced_pod, pod.name, self._namespace, body=options, _headers=dict(_JSON))

    def _patch(self, what: str, machine: Machine, annotations: Mapping[str, str | None], more: Mapping[str, Any]) -> None:
        body = {"metadata": {"resourceVersion": machine.version, "annotations": annotations}, **more}
        self._ask(what, self._core.patch_node, machine.name, body, _content_type="application/merge-patch+json")

    def _ask(self, what: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
        try:
            answer = _read(method(*arguments, **options, _preload_content=False, _request_timeout=self._limit_s).data)
        except client.ApiException as error:
            raise _refused(what, error) from error
        except (config.ConfigException, urllib3.exceptions.HTTPError, OSError) as error:
            raise RequestError(f"cannot {what}: no answer of the API server ({type(error).__name__})") from error
        if answer is None:
            raise RequestError(f"cannot {what}: the answer is no JSON object; is that the API server?")
        return answer


def api_client(settings: client.Configuration) -> client.ApiClient:
    """A client that asks once: urllib3 would sleep for as long as a server says, and ask again."""
    settings.retries = urllib3.Retry(0, redirect=0, respect_retry_after_header=False)
    return client.ApiClient(settings)


def _read(content: bytes | str | None) -> dict[str, Any] | None:
    try:
        answer = json.loads(content or "")
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _refused(what: str, error: client.ApiException) -> RequestError:
    """Status 429 has two meanings: a budget refuses this eviction (``details.causes``), or the server is asked too much by all."""
    said = _read(error.body) or {}
    message = said.get("message", error.reason)
    causes = (said.get("details") or {}).get("causes") or ()
    is_of_budget = error.status == 429 and any(one.get("reason") == "DisruptionBudget" for one in causes)
    is_of_budget |= error.status == 500 and "more than one PodDisruptionBudget" in str(message)  # which Kubernetes never evicts
    after_s = None
    if error.status == 429 and not is_of_budget:
        given = str((error.headers or {}).get("Retry-After", ""))
        after_s = float(given) if given.isdecimal() else _SOON_S
    text = f"cannot {what}: {error.status or 'TLS'} {message}"
    return RequestError(text, error.status or None, is_of_budget=is_of_budget, after_s=after_s)


def _pod(item: Mapping[str, Any]) -> Pod:
    metadata, status = item["metadata"], item.get("status", {})
    phase = status.get("phase", "Pending")
    containers = status.get("containerStatuses", ())
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        index=metadata.get("annotations", {}).get(INDEX_ANNOTATION, ""),
        machine=item.get("spec", {}).get("nodeName", ""),
        phase=phase,
        is_running=phase == "Running" and any("running" in one.get("state", {}) for one in containers),
        is_leaving="deletionTimestamp" in metadata,
    )


def _only(pod: Pod) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": pod.uid}}

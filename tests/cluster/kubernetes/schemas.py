"""Kubernetes' own JSON schemas, strict (no unknown field), from the package kubernetes-validate; JobSet's own fields are here.

The package reads 10 MB for each object that it validates; here they are read once.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict, Field
from referencing import Registry, Resource

_FOLDER = files("kubernetes_validate") / "kubernetes-json-schema" / "v1.37.0-local-strict"


def problems(thing: dict[str, Any]) -> list[str]:
    """What an API server of that version would say about an object or the body of a request."""
    if thing.get("kind") == "JobSet":
        return _jobset_problems(thing)
    group, _, version = thing["apiVersion"].rpartition("/")
    if thing["kind"] == "DeleteOptions":
        group = "meta"
    name = "-".join([thing["kind"].lower(), *([group.partition(".")[0]] if group else []), version])
    return [f"{'/'.join(map(str, error.path))}: {error.message}" for error in _validator(name).iter_errors(thing)]


@cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((_FOLDER / f"{name}.json").read_text()), registry=_definitions())


@cache
def _definitions() -> Registry:
    content = json.loads((_FOLDER / "_definitions.json").read_text())
    return Registry().with_resource("_definitions.json", Resource.from_contents(content)).crawl()


# JobSet's v1alpha2, as far as it is used here: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Network(_Fields):
    enableDNSHostnames: bool
    subdomain: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
    publishNotReadyAddresses: bool


class _SuccessPolicy(_Fields):
    operator: Literal["All", "Any"]
    targetReplicatedJobs: list[str]


class _FailurePolicy(_Fields):
    maxRestarts: Annotated[int, Field(ge=0)]


class _JobTemplate(_Fields):
    metadata: dict[str, Any] = {}
    spec: dict[str, Any]


class _ReplicatedJob(_Fields):
    name: str
    replicas: Annotated[int, Field(ge=1)]
    template: _JobTemplate


class _Spec(_Fields):
    ttlSecondsAfterFinished: Annotated[int, Field(ge=0)]
    network: _Network
    successPolicy: _SuccessPolicy
    failurePolicy: _FailurePolicy
    replicatedJobs: list[_ReplicatedJob]


class _JobSet(_Fields):
    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: dict[str, Any]
    spec: _Spec


def _jobset_problems(thing: dict[str, Any]) -> list[str]:
    """Its own fields, its Jobs as Jobs, and what JobSet's webhook refuses: names of jobs and pods that are too long."""
    made = _JobSet.model_validate(thing)
    found = []
    names = [job.name for job in made.spec.replicatedJobs]
    found += [f"no replicated job {name}" for name in made.spec.successPolicy.targetReplicatedJobs if name not in names]
    for job in made.spec.replicatedJobs:
        full = f"{made.metadata['name']}-{job.name}-{job.replicas - 1}"
        longest = f"{full}-{job.template.spec['completions'] - 1}-abcde"
        found += [f"pod name {longest} is too long"] if len(longest) > 63 else []
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": full}, "spec": job.template.spec}
        found += [f"{job.name}: {problem}" for problem in problems(whole)]
    return found

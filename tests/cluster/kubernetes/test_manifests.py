"""Every manifest is valid for an API server, and says what it should, for whatever options."""

import re
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import yaml
from cryptography import x509
from hypothesis import given, settings
from typer.testing import CliRunner

from megascale_jax.cli.launch import MANIFESTS, SECRETS
from megascale_jax.cli.main import app
from megascale_jax.cluster.backends.kubernetes.manifests import render
from megascale_jax.cluster.backends.kubernetes.names import driver_hosts
from megascale_jax.cluster.backends.kubernetes.plan import Plan
from megascale_jax.cluster.backends.kubernetes.secrets import prepare, secrets
from megascale_jax.cluster.executor_process import own_command, parse
from megascale_jax.cluster.job import OWNER, token_file
from megascale_jax.cluster.link.certificates import make_folder
from megascale_jax.cluster.link.security import Security
from megascale_jax.errors import UsageError
from tests.cluster.kubernetes.schemas import problems
from tests.multiprocess.test_resume import ROOT

BASE: dict[str, Any] = {"name": "run", "namespace": "team", "image": "image@sha256:1", "experiment": "gpt-13b", "run_volume": "work"}
SPLITS = (("a-b", "c"), ("a", "b-c"))
PLAN = Plan(**BASE, nodes=2, spares=1, gpus_per_node=8)
RENDER = ("launch", "render", "quickstart", "--image", "image", "--run-volume", "work", "--gpus-per-node", "0")

PLANS = st.builds(
    Plan,
    **{key: st.just(value) for key, value in BASE.items()},
    overrides=st.lists(st.sampled_from(["system=h100", "train.data.source=$(HOME)/x", "a=$$(b)"]), max_size=2).map(tuple),
    nodes=st.integers(1, 1536),
    spares=st.integers(0, 64),
    gpus_per_node=st.integers(0, 8),
    resources=st.sampled_from([(), (("rdma/hca", "8"), ("memory", "1.5Ti")), (("cpu", "500m"), ("hugepages-2Mi", "8Gi"))]),
    queue=st.sampled_from([None, "gpus"]),
    topology=st.sampled_from([None, "cloud.provider.com/topology-rack"]),
    lists_machines=st.booleans(),
    retention_s=st.integers(0, 10**6),
    egress=st.sampled_from([(), ("10.0.0.0/8", "fd00::/8")]),
    api_server=st.sampled_from([(), ("10.96.0.1/32",), ("10.96.0.1/32:443", "fd00::1/128:6443")]),
    dns=st.sampled_from([(), ("169.254.20.10/32",)]),
    dns_port=st.sampled_from([53, 5353]),
    pull_secret=st.sampled_from([None, "registry"]),
)


def find(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def pod(plan: Plan, role: str) -> dict[str, Any]:
    jobs = find(render(plan), "JobSet", plan.name)["spec"]["replicatedJobs"]
    return next(job for job in jobs if job["name"] == role)["template"]["spec"]["template"]["spec"]


@settings(max_examples=30, deadline=None)
@given(plan=PLANS)
def test_all_is_valid(plan) -> None:
    for one in render(plan):
        assert not problems(one), one["kind"]


def test_the_validation_can_fail() -> None:
    made = find(render(PLAN), "JobSet", "run")
    container = made["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]["containers"][0]
    container["securityContext"]["privilege"] = True
    assert any("privilege" in problem for problem in problems(made))


def test_the_manifest_of_plain_runs_is_valid() -> None:
    made = list(yaml.safe_load_all((ROOT / "launch/k8s/job.yaml").read_text()))
    assert [one["kind"] for one in made] == ["Service", "Job"]
    assert not any(problems(one) for one in made)


@settings(max_examples=20, deadline=None)
@given(plan=PLANS)
def test_no_container_may_do_more_than_it_needs(plan) -> None:
    for role in ("driver", "executor"):
        spec = pod(plan, role)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] == (role == "driver")
        (container,) = spec["containers"]
        own = container["securityContext"]
        assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"], own["capabilities"]["drop"]) == (False, True, ["ALL"])
        assert own["capabilities"].get("add", []) == (["IPC_LOCK"] if role == "executor" and "rdma/hca" in dict(plan.resources) else [])
        assert container["command"][0] == "megascale", "no shell"


@pytest.mark.parametrize("lists_machines", [True, False])
def test_the_rights_are_the_least(lists_machines) -> None:
    objects = render(replace(PLAN, lists_machines=lists_machines))
    rules = find(objects, "Role", "run-driver")["rules"] + find(objects, "ClusterRole", "megascale:team:run:driver")["rules"]
    allowed = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    wanted = {("pods", "list"), ("pods", "delete"), ("pods/eviction", "create"), ("nodes", "get"), ("nodes", "patch")}
    assert allowed == wanted | ({("nodes", "list")} if lists_machines else set())
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        (binding,) = [one for one in objects if one["kind"] == kind]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "run-driver", "namespace": "team"}]


def test_only_executors_reach_the_control_port_and_each_other() -> None:
    objects = render(PLAN)
    executors = {"jobset.sigs.k8s.io/jobset-name": "run", "jobset.sigs.k8s.io/replicatedjob-name": "executor"}
    everything = find(objects, "NetworkPolicy", "run")["spec"]
    assert (everything["ingress"], everything["egress"]) == ([], [])
    (ingress,) = find(objects, "NetworkPolicy", "run-driver")["spec"]["ingress"]
    assert ingress == {"from": [{"podSelector": {"matchLabels": executors}}], "ports": [{"protocol": "TCP", "port": 7070}]}
    assert find(objects, "NetworkPolicy", "run-executor")["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": executors}}]}]


def test_no_two_runs_share_rights_over_machines() -> None:
    runs = [Plan(**{**BASE, "namespace": namespace, "name": name}, nodes=1, spares=0, gpus_per_node=8) for namespace, name in SPLITS]
    for kind in ("ClusterRole", "ClusterRoleBinding"):
        names = [one["metadata"]["name"] for run in runs for one in render(run) if one["kind"] == kind]
        assert len(set(names)) == len(runs)


def test_names_are_asked_of_the_clusters_dns_alone() -> None:
    pods = {"kubernetes.io/metadata.name": "kube-system"}, {"k8s-app": "kube-dns"}
    for dns, more in (((), []), (("169.254.20.10/32",), [{"ipBlock": {"cidr": "169.254.20.10/32"}}])):
        for role in ("driver", "executor"):
            plan = Plan(**BASE, nodes=2, spares=1, gpus_per_node=8, dns=dns, dns_port=5353)
            rule = find(render(plan), "NetworkPolicy", f"run-{role}")["spec"]["egress"][0]
            first, *others = rule["to"]
            assert (first["namespaceSelector"]["matchLabels"], first["podSelector"]["matchLabels"]) == pods
            assert others == more
            assert {(one["protocol"], one["port"]) for one in rule["ports"]} == {("UDP", 5353), ("TCP", 5353)}


def test_the_driver_reaches_the_api_server_and_no_further() -> None:
    plan = Plan(**BASE, nodes=2, spares=1, gpus_per_node=8, api_server=("10.96.0.1/32:8443", "fd00::1/128"))
    _, first, second = find(render(plan), "NetworkPolicy", "run-driver")["spec"]["egress"]
    assert first == {"to": [{"ipBlock": {"cidr": "10.96.0.1/32"}}], "ports": [{"protocol": "TCP", "port": 8443}]}
    assert second["to"] == [{"ipBlock": {"cidr": "fd00::1/128"}}]
    assert [one["port"] for one in second["ports"]] == [443, 6443]
    assert not [rule for rule in find(render(plan), "NetworkPolicy", "run-executor")["spec"]["egress"] if "to" not in rule]


def test_a_job_of_executors_ends_with_the_run_alone() -> None:
    spec = find(render(PLAN), "JobSet", "run")["spec"]
    driver, executor = (job["template"]["spec"] for job in spec["replicatedJobs"])
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["driver"]}
    assert spec["failurePolicy"] == {"maxRestarts": 0}
    assert (executor["completions"], executor["parallelism"], executor["backoffLimit"]) == (3, 3, 2147483647)
    assert {job["podReplacementPolicy"] for job in (driver, executor)} == {"TerminatingOrFailed"}
    assert driver["backoffLimit"] == 200, "a run of months outlives its driver's restarts"
    assert all(job["template"]["spec"]["shareProcessNamespace"] for job in (driver, executor)), "somebody reaps"
    assert "podFailurePolicy" not in driver, "with one, a pod on a machine that is away is never replaced"


def test_kueue_starts_what_has_a_queue() -> None:
    made = find(render(Plan(**BASE, nodes=2, spares=0, gpus_per_node=8, queue="gpus", topology="rack")), "JobSet", "run")
    assert "suspend" not in made["spec"], "its webhook says so; a second `apply` must not suspend the run"
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    template = made["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]
    assert template["metadata"]["annotations"] == {"kueue.x-k8s.io/podset-preferred-topology": "rack"}
    assert "kueue.x-k8s.io/queue-name" not in find(render(PLAN), "JobSet", "run")["metadata"]["labels"]


def test_an_executor_understands_what_its_pod_says() -> None:
    """As the kubelet expands it, which knows `$(NAME)` of the container's own variables and `$$(` for a plain one."""
    plan = Plan(**BASE, nodes=2, spares=1, gpus_per_node=8, overrides=("train.data.source=$(HOME)/x",))
    (container,) = pod(plan, "executor")["containers"]
    values = {"JOB_COMPLETION_INDEX": "2", "MACHINE": "machine-7", "POD_IP": "10.1.2.3"}
    assert values.keys() <= {one["name"] for one in container["env"]}

    def expand(text: str) -> str:
        return re.sub(r"\$\$\(|\$\((\w+)\)", lambda match: values[match[1]] if match[1] else "$(", text)

    assert container["command"] == ["megascale", "execute"]
    options = parse([expand(text) for text in container["args"]])
    assert (options.node, options.machine, options.address) == ("node-2", "machine-7", "10.1.2.3")
    assert options.driver == "run-driver-0-0.run:7070"
    assert own_command(options.command)[1:] == [
        *("-m", "megascale_jax.cli.main", "train", "gpt-13b", "train.data.source=$(HOME)/x", "--run-folder", "/volume/runs/run")
    ]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert expand(mounts[str(options.token)]["subPathExpr"]) == "node-2", "its own token, and no other"
    assert str(options.security) in mounts


def test_secrets_hold_what_each_end_needs(tmp_path) -> None:
    folder = tmp_path / "security"
    prepare(PLAN, folder)
    made = secrets(PLAN, folder)
    assert not any(problems(one) for one in made)
    driver, executor, tokens = (set(one["data"]) for one in made)
    assert tokens == {"node-0", "node-1", "node-2"}
    assert executor == {"ca.pem", "client.pem", "client.key", "job"}, "no key that signs"
    assert "ca.key" not in driver
    items = {item["key"] for item in pod(PLAN, "driver")["volumes"][1]["secret"]["items"]}
    assert items == driver
    certificate = x509.load_pem_x509_certificate((folder / "driver.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    assert set(driver_hosts("run")) <= set(names)
    for name in ("node-2", OWNER):
        Security.load(folder, role="client", token=token_file(folder, name))
    before = secrets(PLAN, folder)
    prepare(PLAN, folder)
    assert secrets(PLAN, folder) == before, "what is there is kept"


def test_certificates_of_another_driver_are_refused(tmp_path) -> None:
    make_folder(tmp_path / "security", ["elsewhere"])
    with pytest.raises(UsageError, match=r"not for run-driver-0-0.*certs init"):
        prepare(PLAN, tmp_path / "security")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "Run"}, "--name is 'Run'"),
        ({"name": "r" * 50}, "choose a shorter --name"),
        ({"resources": (("rdma hca", "1"),)}, "--resource"),
        ({"resources": (("memory", "lots"),)}, "--resource"),
        ({"resources": (("hugepages-2Mi", "8Gi"),)}, "huge pages"),
        ({"shared_memory": "big"}, "--shared-memory"),
        ({"run_folder": "/elsewhere"}, "--run-folder"),
        ({"api_server": ("10.96.0.1/32:https",)}, "--api-server"),
        ({"api_server": ("10.96.0.1:443",)}, "--api-server"),
        ({"egress": ("10.1.2.3/8",)}, "--egress"),
        ({"dns": ("dns",)}, "--dns-network"),
    ],
)
def test_a_plan_that_a_cluster_would_refuse(options, says) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        Plan(**{**BASE, "nodes": 2, "spares": 0, "gpus_per_node": 8, **options})


def test_render_prints_what_can_be_applied_and_no_secret() -> None:
    done = CliRunner().invoke(app, [*RENDER, "--nodes", "2", "--spares", "1", "parallel.data=2"])
    assert done.exit_code == 0, done.output
    made = list(yaml.safe_load_all(done.stdout))
    assert not any(problems(one) for one in made)
    assert "Secret" not in {one["kind"] for one in made}
    assert "--security" in done.stderr


@pytest.mark.parametrize(("override", "lists"), [((), True), (("cluster.kubernetes.switch_labels=[]",), False)])
def test_the_driver_may_list_machines_only_to_read_their_labels(override, lists) -> None:
    done = CliRunner().invoke(app, [*RENDER, *override])
    assert done.exit_code == 0, done.output
    (rule,) = find(list(yaml.safe_load_all(done.stdout)), "ClusterRole", "megascale:default:quickstart:driver")["rules"]
    assert ("list" in rule["verbs"]) == lists


def test_render_writes_secrets_for_their_owner_only(tmp_path) -> None:
    output, security = tmp_path / "out", tmp_path / "security"
    done = CliRunner().invoke(app, [*RENDER, "--output", str(output), "--security", str(security)])
    assert done.exit_code == 0, done.output
    assert (output / SECRETS).stat().st_mode & 0o077 == 0
    assert not any(problems(one) for one in yaml.safe_load_all((output / SECRETS).read_text()))
    assert "PRIVATE" not in done.output + (output / MANIFESTS).read_text()
    again = CliRunner().invoke(app, [*RENDER, "--output", str(output), "--security", str(security)])
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--security", "somewhere"), "--output"),
        (("--nodes", "3"), "does not fit 3 nodes"),
        (("--gpus-per-node", "3"), "does not fit 1 nodes of 3 GPUs"),
        (("--resource", "memory"), "expected NAME=QUANTITY"),
    ],
)
def test_render_refuses_what_cannot_work(arguments, says) -> None:
    done = CliRunner().invoke(app, [*RENDER, *arguments])
    assert isinstance(done.exception, UsageError)
    assert says in str(done.exception)

"""`megascale place`, and `--node-order` where it is taken without nodes being started."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from megascale_jax.cli.main import app
from megascale_jax.cluster.node_order import read_names, read_topology
from megascale_jax.errors import ConfigError, UsageError

EXPERIMENT = ("gpt-175b", "system=a100", "parallel.pipe=4", "parallel.data=6", "parallel.virtual_stages=null", "train.global_batch_size=48")
NODES = [f"n{number}" for number in range(26)]


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def files(tmp_path):
    """26 nodes under four ToR sets, dealt out in turn."""
    (tmp_path / "nodes").write_text("".join(f"{name}\n" for name in NODES))
    (tmp_path / "topology").write_text("".join(f"{name} t{number % 4} p{number % 4 // 2}\n" for number, name in enumerate(NODES)))
    return tmp_path


def place(files, *more):
    return run("place", *EXPERIMENT, "--nodes", files / "nodes", "--node-order", files / "order", *more)


def test_the_order_puts_data_groups_under_one_tor_and_says_what_that_saves(files):
    result = place(files, "--topology", files / "topology", "--json", files / "score.json")
    assert result.exit_code == 0 and "simulated" in result.stdout
    order, sites = read_names(files / "order", ""), read_topology(files / "topology")
    assert sorted(order) == sorted(NODES)
    whole = [len({sites[name].tor for name in order[6 * stage : 6 * stage + 6]}) for stage in range(4)]
    assert whole == [1, 1, 1, 1]
    score = json.loads((files / "score.json").read_text())
    assert (score["kind"], score["nodes"], score["spares"]) == ("simulated", 24, 2)
    assert score["placed"]["by_axis"]["data"]["across_tor_bytes"] == 0 < score["by_name"]["by_axis"]["data"]["across_tor_bytes"]
    assert score["placed"]["by_axis"]["tensor"]["network_bytes"] == 0


def test_without_a_topology_it_is_said_to_be_assumed(files):
    result = place(files)
    assert result.exit_code == 0 and "assumed, 64 nodes to a ToR set in the order of their names" in " ".join(result.stdout.split())


def test_wrong_requests_are_refused_and_nothing_is_written(files):
    topology = files / "topology"
    cases = [
        ("nodes", "".join(f"{name}\n" for name in NODES[:20]), UsageError, "got 20 nodes, expected at least 24 of 8 devices"),
        ("nodes", "n1\nn1\n", UsageError, "n1 is there twice"),
        ("nodes", "".join(f"{name}\n" for name in [*NODES, "n99"]), UsageError, "nothing of n99, one of 1 such nodes"),
    ]
    for name, text, kind, words in cases:
        (files / name).write_text(text)
        with pytest.raises(kind, match=words):
            place(files, "--topology", topology)
    with pytest.raises(ConfigError, match="say how many a node has with --devices-per-node"):
        run("place", "quickstart", "--nodes", files / "nodes", "--node-order", files / "order")
    assert not (files / "order").exists()


def render(files, *more):
    arguments = ("--nodes", 24, "--spares", 2, "--image", "i@sha256:0", "--run-volume", "v")
    return run("launch", "render", *EXPERIMENT, *arguments, *more)


def test_kubernetes_gets_the_order_its_driver_goes_by_and_executors_on_those_machines_alone(files):
    place(files, "--topology", files / "topology")
    order = list(read_names(files / "order", ""))
    objects = list(yaml.safe_load_all(render(files, "--node-order", files / "order").stdout))
    (config,) = [one for one in objects if one["kind"] == "ConfigMap"]
    assert config["data"]["nodes"].split() == order
    (jobset,) = [one for one in objects if one["kind"] == "JobSet"]
    driver, executor = (one["template"]["spec"]["template"]["spec"] for one in jobset["spec"]["replicatedJobs"])
    (container,) = driver["containers"]
    assert container["args"][-2:] == ["--node-order", "/node-order/nodes"]
    assert {"name": "node-order", "mountPath": "/node-order", "readOnly": True} in container["volumeMounts"]
    assert {"name": "node-order", "configMap": {"name": config["metadata"]["name"]}} in driver["volumes"]
    (term,) = executor["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "kubernetes.io/hostname", "operator": "In", "values": order}]
    plain = list(yaml.safe_load_all(render(files).stdout))
    assert not [one for one in plain if one["kind"] == "ConfigMap"] and "node-order" not in json.dumps(plain)


def test_orders_that_do_not_fit_are_refused_before_anything_starts(files):
    (files / "order").write_text("".join(f"node-{number}\n" for number in range(3)))
    with pytest.raises(UsageError, match="got 3 nodes, expected 24 that train and 2 spares"):
        render(files, "--node-order", files / "order")
    drive = ("drive", "quickstart", "parallel.data=2", "--run-folder", files / "run", "--node-order", files / "order")
    with pytest.raises(UsageError, match="got node-2, which is none of the 2 nodes here"):
        run(*drive, "--nodes", 2)
    with pytest.raises(UsageError, match="got 3 nodes, expected 4 that train and 0 spares"):
        run(*drive, "--nodes", 4)
    assert not (files / "run").exists()

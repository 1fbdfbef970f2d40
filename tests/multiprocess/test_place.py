"""A placement from file to processes: `megascale place`, `megascale drive --node-order`, and where each device then is in the mesh."""

import time

import pytest
from typer.testing import CliRunner

from megascale_jax.cli.main import app
from megascale_jax.cluster.node_order import read_names
from megascale_jax.errors import RunFolderError
from megascale_jax.views.progress import read_progress
from tests.build import TINY
from tests.multiprocess.test_drive import LIMIT_S, Driven

TORS = {"node-0": "left", "node-1": "right", "node-2": "left", "node-3": "right", "node-4": "left"}
"""Four nodes and a spare, of which two neighbours by name are never under one ToR set."""
OVERRIDES = [
    *TINY,
    "parallel.pipe=2",
    "parallel.data=2",
    "parallel.tensor=2",
    "train.global_batch_size=8",  # so few micro-batches that data groups send more than stages
    "train.steps=100000",
    "train.evaluation.every=null",
    "train.checkpoint.every=100000",
    "train.digest_every=null",
    "train.logging.tensorboard=false",
    "train.sample_prompt=null",
]


def devices_by_node(run, status):
    """Place in the mesh of every device, by the node on which it is: what each process says of its own devices, and where it runs."""
    try:
        progress = read_progress(run)
    except RunFolderError:
        return {}
    places = {one.rank: one.places for one in progress.ranks if one.passes.get("step", 0) > 0}
    if progress.mesh != (2, 2, 2) or len(places) < 4:
        return {}
    ranks = {process["rank"]: name for name, node in status["nodes"].items() for process in node["processes"]}
    return {place: ranks[rank] for rank, own in places.items() for place in own} if len(ranks) == 4 else {}


def test_after_the_start_tensor_groups_are_on_a_node_and_data_groups_under_one_tor(tmp_path):
    (tmp_path / "corpus.txt").write_text("".join(f"line {number} of a small corpus, {number * number} words\n" for number in range(400)))
    (tmp_path / "nodes").write_text("".join(f"{name}\n" for name in TORS))
    (tmp_path / "topology").write_text("".join(f"{name} {tor}\n" for name, tor in TORS.items()))
    options = ["--nodes", "nodes", "--topology", "topology", "--node-order", "order", "--devices-per-node", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        result = CliRunner().invoke(app, ["place", "quickstart", *OVERRIDES, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    order = read_names(tmp_path / "order", "")
    data = [f"train.data.source={tmp_path / 'corpus.txt'}"]
    driven = Driven(tmp_path, "quickstart", *OVERRIDES, *data, "--nodes", "4", "--spares", "1", "--node-order", str(tmp_path / "order"))
    try:
        status = driven.until(lambda status: status["phase"] == "running" and status["step"] >= 1)
        limit = time.monotonic() + LIMIT_S
        while not (node_of := devices_by_node(driven.run, status)):
            assert time.monotonic() < limit, driven.log.read_text()[-3000:]
            time.sleep(0.5)
            status = driven.status()
    finally:
        driven.driver.terminate()
        driven.driver.wait(LIMIT_S)
    assert status["seats"] == list(order[:4])
    assert sorted(node_of) == [(pipe, data, tensor) for pipe in range(2) for data in range(2) for tensor in range(2)]
    for pipe in range(2):
        for data_index in range(2):
            assert len({node_of[pipe, data_index, tensor] for tensor in range(2)}) == 1, "a tensor group is on one node"
        for tensor in range(2):
            nodes = {node_of[pipe, data_index, tensor] for data_index in range(2)}
            assert len(nodes) == 2 and len({TORS[name] for name in nodes}) == 1, "a data group is under one ToR set"

"""Files with orders and topologies, and seats by an order."""

import pytest

from megascale_jax.cluster.lifecycle import NodeStatus, Phase
from megascale_jax.cluster.node_order import Hangs, check_order, natural, read_names, read_topology, slurm_topology, write_order
from megascale_jax.cluster.seats import fill
from megascale_jax.cluster.state import Node, Shape, State
from megascale_jax.errors import UsageError
from tests.cluster.simulated import SimNode, World
from tests.cluster.test_driver import CONFIG


def test_an_order_is_read_back_as_it_was_written(tmp_path):
    path = tmp_path / "order"
    path.write_bytes(write_order(["n2", "n10", "n1"], ["a header", "another"]))
    assert read_names(path, "--node-order") == ("n2", "n10", "n1")
    path.write_text("\n n1 # first\n\n#none\nn2\n")
    assert read_names(path, "--node-order") == ("n1", "n2")
    assert sorted(["n10", "n9", "m"], key=natural) == ["m", "n9", "n10"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n1\nn2\nn1\n", "line 3: n1 is there twice, first in line 1"),
        ("n1 n2\n", "line 1: got 'n1 n2', expected one name of a node"),
        ("# nothing\n", "names no node"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_files_that_are_no_orders_are_refused(tmp_path, text, words):
    path = tmp_path / "order"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as error:
        read_names(path, "--node-order")
    assert words in str(error.value) and str(path) in str(error.value)
    with pytest.raises(UsageError, match="cannot be read"):
        read_names(tmp_path / "missing", "--node-order")


def test_orders_that_do_not_serve_a_job_are_refused():
    known = ("n1", "n2", "n3")
    check_order(("n3", "n1"), "it", nodes=2, known=known)
    with pytest.raises(UsageError, match=r"it: got n4, which is none of the 3 nodes here \(n1, n2, n3\)"):
        check_order(("n1", "n4"), "it", nodes=2, known=known)
    with pytest.raises(UsageError, match="it: got 2 nodes, expected 2 that train and 1 spares"):
        check_order(("n1", "n2"), "it", nodes=2, spares=1)
    with pytest.raises(UsageError, match="it: n1 is there twice"):
        check_order(("n1", "n2", "n1"), "it", nodes=2)


def test_a_topology_says_where_nodes_hang(tmp_path):
    path = tmp_path / "topology"
    path.write_text("n1 t1 p1\nn2 t1 p1 # comment\nn3 t2\n")
    assert read_topology(path) == {"n1": Hangs("t1", "p1"), "n2": Hangs("t1", "p1"), "n3": Hangs("t2", "")}
    for text, words in (
        ("n1\n", "expected NODE TOR_SET"),
        ("n1 t1\nn1 t2\n", "n1 is there twice"),
        ("n1 t1 p1\nn2 t1 p2\n", "n2 is under t1 of 'p2', others of that set of 'p1'"),
        ("", "names no node"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            read_topology(path)


def test_slurm_s_tree_of_switches_is_read():
    text = (
        "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-2]\nSwitchName=s2 Level=0 LinkSpeed=1 Nodes=n3\n"
        "SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-3] Switches=s[1-2]\n"
    )
    names = {"n[1-2]": ("n1", "n2"), "n3": ("n3",), "s[1-2]": ("s1", "s2")}
    assert slurm_topology(text, names.__getitem__) == {"n1": Hangs("s1", "top"), "n2": Hangs("s1", "top"), "n3": Hangs("s2", "top")}
    with pytest.raises(UsageError, match="Slurm shows no tree of switches"):
        slurm_topology("No topology information available\n", names.__getitem__)


ORDER = ("node-4", "node-1", "node-5", "node-0", "node-2", "node-3")


def test_ranks_follow_the_order_and_spares_its_rest(tmp_path):
    world = World(tmp_path, CONFIG.model_copy(update={"node_order": ORDER}))
    world.until_step(12)
    assert world.driver.state.seats == ORDER[:4]
    world.power_off("node-1")
    world.until_step(20)
    assert world.driver.state.seats == ("node-4", "node-2", "node-5", "node-0"), "the first spare of the order"


def test_a_node_of_the_order_that_does_not_come_is_waited_for_and_then_replaced(tmp_path):
    world = World(tmp_path, CONFIG.model_copy(update={"node_order": ORDER}))
    world.sims["node-1"] = SimNode("node-1", "executor", is_alive=False, is_down=True)
    world.run(CONFIG.wait_s - 5, lambda: world.driver.state.phase != Phase.REPLACING)
    assert world.driver.state.phase == Phase.REPLACING, "enough others are there, but not the one"
    world.until_step(12)
    assert world.driver.state.seats == ("node-4", "node-2", "node-5", "node-0")


def test_nodes_are_found_by_the_machines_they_are_on():
    config = CONFIG.model_copy(update={"node_order": ("m3", "m1", "m2", "m0")})
    nodes = {
        f"node-{number}": Node(status=NodeStatus.READY, incarnation="1", address="a", machine=f"m{number}") for number in (0, 1, 3, 4, 5)
    }
    state = State(shapes=(Shape(num_nodes=4),), seats=(None,) * 4, nodes=nodes)
    assert fill(state, 0.0, config)[0] == ("node-3", "node-1", None, "node-0")
    assert fill(state, config.wait_s, config)[0] == ("node-3", "node-1", "node-4", "node-0")

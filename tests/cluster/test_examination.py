"""Who checks what in a diagnosis."""

import pytest

from megascale_jax.cluster.diagnose.nic import Baseline
from megascale_jax.cluster.diagnose.request import Node
from megascale_jax.cluster.examination import FULL, LOOPBACK, QUICK, Examination


@pytest.mark.parametrize(("is_full", "checks"), [(False, QUICK), (True, FULL)])
def test_the_loopback_of_a_machine_is_measured_by_one_of_its_nodes(is_full, checks):
    nodes = {f"node-{number}": Node(address=f"10.0.0.{number // 2}", ports=(20000,)) for number in range(4)}
    examination = Examination(nodes, Baseline(), 60.0, is_full=is_full)
    orders = {name: examination.order(name) for name in nodes}
    assert [name for name, order in orders.items() if LOOPBACK in order.checks] == ["node-0", "node-2"]
    assert all(set(checks) - set(order.checks) <= {LOOPBACK} for order in orders.values()), "all else is checked by each"
    assert LOOPBACK in QUICK and LOOPBACK in FULL

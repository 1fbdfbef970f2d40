"""Loopbacks: perftest in place of which a function answers, and sockets that are real."""

import sys

import pytest

from megascale_jax.cluster.diagnose import loopback
from megascale_jax.cluster.diagnose.nic import Baseline
from tests.cluster.diagnose.test_host import tree

OUTPUT = """
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      1458000          0.00               382.17             0.728930
---------------------------------------------------------------------------------------
"""


@pytest.fixture
def root(tmp_path):
    for device in ("mlx5_0", "mlx5_1"):
        tree(tmp_path, {f"sys/class/infiniband/{device}/ports/1/state": "4: ACTIVE"})
    tree(tmp_path, {"sys/devices/system/node/has_memory": "0-1", "dev/nvidia0": "", "dev/nvidiactl": ""})
    return tmp_path


def found(tool):
    return f"/usr/bin/{tool}"


def test_each_nic_meets_each_memory_node_and_gpu(root):
    commands = []

    def measure(server, client):
        commands.append((list(server), list(client)))
        return OUTPUT

    outcome = loopback.nic_loopback(Baseline(), root, measure, found)
    places = ["memory node 0", "memory node 1", "GPU 0"]
    assert outcome.status == "pass" and [n.value for n in outcome.numbers] == [382.17] * 6
    assert {n.part for n in outcome.numbers} == {f"{device} to {place}" for device in ("mlx5_0", "mlx5_1") for place in places}
    server, client = commands[1]
    assert server[:3] == ["numactl", "--membind=1", "ib_write_bw"] and client[-3:] == ["-d", "mlx5_0", "127.0.0.1"]
    assert any("--use_cuda=0" in server for server, _ in commands)


def test_nic_to_nic_goes_round(root):
    outcome = loopback.nic_to_nic(Baseline(), root, lambda server, client: OUTPUT, found)
    assert [n.part for n in outcome.numbers] == ["mlx5_0 to mlx5_1", "mlx5_1 to mlx5_0"]


def test_a_transfer_that_fails_fails_and_what_perftest_cannot_do_is_not_run(root):
    def measure(server, client):
        raise OSError("unrecognized option '--use_cuda=0'" if "--use_cuda=0" in client else "Couldn't connect")

    outcome = loopback.nic_loopback(Baseline(), root, measure, found)
    assert outcome.status == "fail" and "mlx5_0 to memory node 0: Couldn't connect" in outcome.reason and "use_cuda" not in outcome.reason

    def no_cuda(server, client):
        return OUTPUT if "--use_cuda=0" not in client else measure(server, client)

    assert loopback.nic_loopback(Baseline(), root, no_cuda, found).status == "not_run"
    assert loopback.nic_to_nic(Baseline(), root, lambda *_: "what is this", found).status == "not_run"


def test_without_tools_or_nics_nothing_runs(root, tmp_path):
    assert "not installed" in loopback.nic_loopback(Baseline(), root, find=lambda tool: None).reason
    assert loopback.nic_to_nic(Baseline(), tmp_path / "nothing", find=found).reason == "0 RDMA NICs here, 2 needed"
    no_numactl = loopback.nic_loopback(Baseline(), root, lambda *_: OUTPUT, lambda tool: None if tool == "numactl" else tool)
    assert no_numactl.status == "not_run" and len(no_numactl.numbers) == 4


def test_a_server_and_its_client_are_run_and_ended():
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert loopback.measure_perftest(wait, [sys.executable, "-c", "print('rate')"]) == "rate\n"
    with pytest.raises(OSError, match="code 3: no device"):
        loopback.measure_perftest(
            [sys.executable, "-c", ""], [sys.executable, "-c", "import sys; print('no device', file=sys.stderr); sys.exit(3)"]
        )


def test_tcp_to_an_own_address(tmp_path):
    tree(tmp_path, {"sys/class/net/eth0/operstate": "up", "sys/class/net/eth0/device/vendor": "x"})
    outcome = loopback.nic_tcp(Baseline(), tmp_path, {"eth0": "127.0.0.1"})
    assert outcome.status == "pass" and outcome.numbers[0].unit == "GB/s"
    assert loopback.nic_tcp(Baseline(), tmp_path, {"eth0": "203.0.113.7"}).status == "fail"  # not an address of this host
    assert loopback.nic_tcp(Baseline(), tmp_path, {}).status == "not_run"

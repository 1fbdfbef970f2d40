"""NIC checks on a made-up /sys: a RoCE NIC, an InfiniBand NIC, an Ethernet NIC, and devices that are none."""

import pytest

from megascale_jax.cluster.diagnose import nic
from megascale_jax.cluster.diagnose.nic import Baseline, read_baseline
from megascale_jax.errors import ConfigError
from tests.cluster.diagnose.test_host import tree

NET, RDMA = "sys/class/net", "sys/class/infiniband"


@pytest.fixture
def root(tmp_path):
    pci = tmp_path / "sys/devices/pci0/0000:17:00.0"
    pci.mkdir(parents=True)
    tree(tmp_path, {f"{NET}/{name}/operstate": "up" for name in ("eth0", "rdma0", "lo", "docker0")})
    tree(
        tmp_path,
        {
            f"{NET}/eth0/mtu": 1500,
            f"{NET}/eth0/speed": 25000,
            f"{NET}/eth0/carrier_down_count": 1,
            f"{NET}/rdma0/mtu": 9000,
            f"{NET}/rdma0/speed": 400000,
        },
    )
    (tmp_path / f"{NET}/eth0/device").mkdir()
    (tmp_path / f"{NET}/rdma0/device").symlink_to(pci)
    tree(pci, {"net/rdma0/x": ""})
    for device, layer in (("mlx5_0", "Ethernet"), ("mlx5_1", "InfiniBand")):
        port = f"{RDMA}/{device}/ports/1"
        tree(tmp_path, {f"{port}/state": "4: ACTIVE", f"{port}/rate": "400 Gb/sec (4X NDR)", f"{port}/link_layer": layer})
        tree(tmp_path, {f"{port}/counters/link_downed": 0, f"{port}/counters/symbol_error": 3})
    (tmp_path / f"{RDMA}/mlx5_0/device").symlink_to(pci)
    for role in ("roce_np", "roce_rp"):
        tree(tmp_path, {f"{NET}/rdma0/ecn/{role}/enable/3": 1})
    return tmp_path


QOS = "PFC configuration:\n\tpriority    0   1   2   3   4   5   6   7\n\tenabled     0   0   0   1   0   0   0   0\n"
REGISTER = "Field Name  | Data\nroce_adp_retrans_field_select | 0x00000001\nroce_adp_retrans_en | 0x00000001\n"


def tools(qos=QOS, register=REGISTER, dcb=None):
    def run(command):
        assert command[0] != "mlxreg" or command[2] == "0000:17:00.0"
        return {"mlnx_qos": qos, "mlxreg": register, "dcb": dcb}[command[0]]

    return run


def test_physical_ports_are_found_each_once(root):
    assert [port.name for port in nic.ports(Baseline(), root)] == ["mlx5_0/1", "mlx5_1/1", "eth0"]
    assert [port.name for port in nic.ports(Baseline(nics=("rdma0",)), root)] == ["mlx5_0/1"]


def test_healthy_nics_pass(root):
    assert nic.nic_link(Baseline(), root).status == "pass"
    assert nic.nic_counters(Baseline(), root).status == "pass"
    assert nic.nic_settings(Baseline(), root, tools()).status == "pass"
    speeds = {number.part: number.value for number in nic.nic_link(Baseline(), root).numbers if number.name == "speed"}
    assert speeds == {"mlx5_0/1": 400, "mlx5_1/1": 400, "eth0": 25}


@pytest.mark.parametrize(
    ("file", "text", "baseline", "reason"),
    [
        (f"{RDMA}/mlx5_1/ports/1/state", "1: DOWN", {}, "mlx5_1/1: the link is down"),
        (f"{RDMA}/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)", {"nics": ("mlx5_0",), "speed_gbps": 400.0}, "200 Gb/s, the baseline is 400"),
        (f"{NET}/rdma0/mtu", "1500", {"nics": ("rdma0",), "mtu": 9000}, "MTU 1500, the baseline is 9000"),
        (f"{NET}/eth0/operstate", "down", {"nics": ("eth0", "rdma0")}, "eth0: the link is down"),
        (f"{NET}/eth0/mtu", "1500", {"nics": ("eth7",)}, "eth7 is not there"),
    ],
)
def test_a_link_that_is_not_like_the_baseline_fails(root, file, text, baseline, reason):
    tree(root, {file: text})
    found = nic.nic_link(Baseline(**baseline), root)
    assert found.status == "fail" and reason in found.reason


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        (f"{RDMA}/mlx5_0/ports/1/counters/link_downed", "6", "mlx5_0/1: the link went down 6 times, the baseline allows 5"),
        (f"{RDMA}/mlx5_1/ports/1/counters/symbol_error", "101", "mlx5_1/1: 101 symbol_error"),
        (f"{NET}/eth0/carrier_down_count", "9", "eth0: the link went down 9 times"),
        (f"{NET}/eth0/statistics/rx_crc_errors", "4000", "eth0: 4000 rx_crc_errors"),
    ],
)
def test_flapping_and_errors_fail(root, file, text, reason):
    tree(root, {file: text})
    found = nic.nic_counters(Baseline(), root)
    assert found.status == "fail" and reason in found.reason


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (tools(qos=QOS.replace("0   0   0   1   0", "0   0   0   0   0")), "mlx5_0/1: PFC of priority 3 is off"),
        (tools(register=REGISTER.replace("en | 0x00000001", "en | 0x00000000")), "adaptive retransmission is off"),
    ],
)
def test_settings_unlike_the_baseline_fail(root, run, reason):
    found = nic.nic_settings(Baseline(), root, run)
    assert found.status == "fail" and reason in found.reason


def test_ecn_is_on_only_at_both_ends_of_the_loop(root):
    tree(root, {f"{NET}/rdma0/ecn/roce_rp/enable/3": 0})
    assert "ECN of priority 3 is off" in nic.nic_settings(Baseline(), root, tools()).reason
    assert nic.nic_settings(Baseline(ecn=None), root, tools()).status == "pass"


def test_pfc_is_also_read_through_dcb(root):
    assert nic.nic_settings(Baseline(), root, tools(qos=None, dcb="prio-pfc 0:off 1:off 2:off 3:on 4:off")).status == "pass"
    assert "PFC" in nic.nic_settings(Baseline(), root, tools(qos=None, dcb="prio-pfc 0:off 3:off 4:on")).reason


def test_what_no_tool_tells_is_not_run_and_never_passes(root, tmp_path):
    found = nic.nic_settings(Baseline(), root, lambda command: None)
    assert found.status == "not_run" and "PFC of priority 3 cannot be read" in found.reason
    nothing = tmp_path / "nothing"
    for outcome in (nic.nic_settings(Baseline(), nothing), nic.nic_link(Baseline(), nothing), nic.nic_counters(Baseline(), nothing)):
        assert outcome.status == "not_run"


def test_a_tool_that_is_not_there_or_fails_says_nothing():
    assert nic.run_tool(["no-such-tool-here"]) is None and nic.run_tool(["false"]) is None


def test_a_baseline_is_a_checked_file(tmp_path):
    file = tmp_path / "baseline.yaml"
    file.write_text("mtu: 9000\nnics: [rdma0]\nrates: {gemm: 600}\n")
    assert read_baseline(file) == Baseline(mtu=9000, nics=("rdma0",), rates={"gemm": 600.0})
    for text, word in (("mtuu: 9000", "mtuu"), ("rates: {gemms: 1}", "gemms"), ("[", "--baseline"), ("rates: {gemm: -1}", "rates.gemm")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=word):
            read_baseline(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_baseline(tmp_path / "gone")

"""What can be checked, and what a check says. Values only: they travel as JSON from the probe to the executor and to the driver.

A check that cannot run is ``not_run`` and says why; it never passes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megascale_jax.errors import UsageError

type Status = Literal["pass", "warn", "fail", "not_run"]
type Group = Literal["host", "gpu", "nic", "compute", "network"]
type Fault = Literal["corruption", "gpu", "host", "nic", "network", "slow", "unable"]

PAIR = "pair"
CORRUPTION = "corruption"
SOFTWARE = "software"
DEVICE = "device"
"""Fact of an outcome: the kind of device. Rates are compared among devices of one kind."""
DIGEST = "digest"
"""Fact of `CORRUPTION`: the bits of the result."""
LONGEST_REASON = 500


class Wire(BaseModel):
    """What travels: frozen, checked, nothing unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Number(Wire):
    """A measured value with its unit; ``part``: which device, NIC or folder."""

    name: str = Field(max_length=100)
    value: float
    unit: str = Field(max_length=20)
    part: str = Field(default="", max_length=200)

    def __str__(self) -> str:
        value = f"{self.value:,.0f}" if self.value == round(self.value) or abs(self.value) >= 1000 else f"{self.value:.3g}"
        return " ".join(filter(None, (self.part, self.name, value, self.unit)))


class Outcome(Wire):
    """What one check found on one node. ``facts``: words that are compared between nodes, such as versions."""

    check: str = Field(max_length=40)
    status: Status
    numbers: tuple[Number, ...] = Field(default=(), max_length=2000)
    reason: str = Field(default="", max_length=LONGEST_REASON)
    facts: dict[str, str] = Field(default={}, max_length=40)

    @model_validator(mode="after")
    def _says_why(self) -> Self:
        if self.status != "pass" and not self.reason:
            raise ValueError(f"{self.check}: {self.status} without a reason")
        return self


@dataclass(frozen=True)
class Check:
    """One check. ``limit_s``: seconds after which it is ended and counts as failed; ``compared``: its rates are compared between nodes."""

    name: str
    group: Group
    fault: Fault
    needs: str
    limit_s: float
    advice: str
    compared: bool = False


_CHECKS = (
    Check("disk", "host", "host", "folders", 30, "free space, or name another folder"),
    Check("storage", "host", "host", "folders it may write to", 60, "check the mount and the storage's server"),
    Check("memory", "host", "host", "/proc/meminfo", 10, "end what else runs on the host"),
    Check("memory_errors", "host", "host", "an EDAC driver", 10, "drain the node and have the DIMM replaced"),
    Check("shared_memory", "host", "host", "/dev/shm", 10, "remount /dev/shm larger (docker: --shm-size)"),
    Check("clock", "host", "host", "a kernel clock", 10, "start chrony; training itself does not use the hosts' clocks"),
    Check(SOFTWARE, "host", "host", "installed packages", 30, "install the same versions on all nodes"),
    Check("leftovers", "host", "host", "/proc", 20, "end the processes named here before the next start"),
    Check("throttling", "host", "host", "counters of CPU throttling", 15, "check fans, air flow and power supply"),
    Check("gpu_memory", "gpu", "gpu", "an NVIDIA driver", 30, "reset the GPU; if it comes back, drain the node and replace the GPU"),
    Check("gpu_xid", "gpu", "gpu", "an NVIDIA driver and a readable kernel log", 20, "look up the Xid; reset the GPU or reboot"),
    Check("gpu_nvlink", "gpu", "gpu", "NVLink", 30, "reset the GPU; if errors go on, reseat or replace the board"),
    Check("gpu_clocks", "gpu", "gpu", "an NVIDIA driver", 30, "check cooling and power of the node"),
    Check("gpu_free", "gpu", "gpu", "an NVIDIA driver", 30, "end the processes; memory that nobody holds goes with a reset of the GPU"),
    Check("nic_link", "nic", "nic", "a physical NIC", 20, "check cable, transceiver and switch port"),
    Check("nic_counters", "nic", "nic", "a physical NIC", 20, "a flapping or faulty link: check cable, transceiver and switch port"),
    Check("nic_settings", "nic", "nic", "a RoCE NIC and its tools", 40, "set the NIC up as the baseline says"),
    Check("nic_tcp", "nic", "nic", "a NIC with an IPv4 address", 30, "check the address and the firewall of the host"),
    Check(
        "nic_loopback",
        "nic",
        "nic",
        "an RDMA NIC and ib_write_bw",
        300,
        "check PCIe link, IOMMU and NUMA placement of the NIC",
        compared=True,
    ),
    Check("nic_to_nic", "nic", "nic", "two RDMA NICs and ib_write_bw", 300, "check cables and switch ports of the two NICs", compared=True),
    Check(
        "gemm",
        "compute",
        "slow",
        "JAX and a device",
        120,
        "check clocks, power and temperature; replace a device that stays slow",
        compared=True,
    ),
    Check("copy", "compute", "slow", "JAX and a device", 60, "check memory errors and clocks of the device", compared=True),
    Check(
        CORRUPTION, "compute", "corruption", "JAX and a device", 60, "take the node out at once: it computes wrong numbers without an error"
    ),
    Check("all_to_all", "network", "network", "two devices in the node", 120, "check NVLink and PCIe of the node", compared=True),
    Check(PAIR, "network", "network", "another node", 120, "check the node's NICs and its way to the switch"),
)
CHECKS = {check.name: check for check in _CHECKS}
GROUPS: tuple[Group, ...] = ("host", "gpu", "nic", "compute", "network")


def alone(groups: Iterable[Group] = GROUPS) -> tuple[str, ...]:
    """Names of the checks of some groups that one node runs by itself, in order."""
    wanted = set(groups)
    return tuple(check.name for check in _CHECKS if check.group in wanted and check.name != PAIR)


def parse_groups(text: str) -> tuple[Group, ...]:
    """Groups from ``host,nic``. Raises UsageError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in GROUPS]
    if unknown or not words:
        raise UsageError(f"groups {text!r}: {', '.join(unknown) or 'nothing'} is not known; known: {', '.join(GROUPS)}")
    return tuple(group for group in GROUPS if group in words)


def outcome(
    check: str, problems: Sequence[tuple[Status, str]] = (), numbers: Iterable[Number] = (), facts: dict[str, str] | None = None
) -> Outcome:
    """The outcome of a check that found these problems: the worst decides, and only problems as bad are told."""
    order: tuple[Status, ...] = ("fail", "warn", "not_run")
    found: list[Status] = [level for level in order if any(is_ == level for is_, _ in problems)]
    status: Status = found[0] if found else "pass"
    reason = "; ".join(dict.fromkeys(text for is_, text in problems if is_ == status))
    return Outcome(check=check, status=status, numbers=tuple(numbers), reason=shorten(reason), facts=facts or {})


def not_run(check: str, reason: str) -> Outcome:
    """The outcome of a check that could not run."""
    return Outcome(check=check, status="not_run", reason=shorten(reason))


def shorten(text: str) -> str:
    """One line that fits into a reason."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 3]}..."

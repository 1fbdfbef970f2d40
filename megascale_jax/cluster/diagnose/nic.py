"""Checks of NICs against a stated baseline, from what the kernel shows and from `mlnx_qos`, `dcb` and `mlxreg` where they are.

``root``: the file system's root, another folder in tests. Counters run since the driver was loaded. Sources: sysfs-class-infiniband and
sysfs-class-net of the kernel; `roce_np`/`roce_rp` (DCQCN) and the register ROCE_ACCL (adaptive retransmission) of mlx5.
"""

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError, field_validator

from megascale_jax.cluster.diagnose.checks import CHECKS, PAIR, Number, Outcome, Status, Wire, not_run, outcome
from megascale_jax.errors import ConfigError

ROOT = Path("/")
TOOL_LIMIT_S = 10
_RDMA_ERRORS = ("symbol_error", "port_rcv_errors", "link_error_recovery", "local_link_integrity_errors", "excessive_buffer_overrun_errors")

type Run = Callable[[Sequence[str]], str | None]
"""Output of a command; ``None`` when it is not there or failed."""
type Problems = list[tuple[Status, str]]


class Baseline(Wire):
    """What each NIC should be like. ``None``: not judged."""

    nics: tuple[str, ...] = ()
    """Names of network or RDMA devices; none: all physical ones that are up, and all RDMA devices."""
    speed_gbps: float | None = None
    mtu: int | None = None
    adaptive_retransmission: bool | None = True
    ecn: bool | None = True
    pfc: bool | None = True
    roce_priority: Annotated[int, Field(ge=0, le=7)] = 3
    most_link_downs: int = 5
    most_errors: int = 100
    rates: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """What each check should measure, in the unit that it prints."""

    @field_validator("rates")
    @classmethod
    def _are_measured(cls, rates: dict[str, float]) -> dict[str, float]:
        measured = [name for name, check in CHECKS.items() if check.compared or name == PAIR]
        if unknown := sorted(set(rates) - set(measured)):
            raise ValueError(f"{', '.join(unknown)} measures no rate; those that do: {', '.join(measured)}")
        return rates


def read_baseline(path: Path) -> Baseline:
    """From a YAML file of the fields above. Raises ConfigError."""
    try:
        return Baseline.model_validate(yaml.safe_load(path.read_text()) or {}, strict=False)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--baseline {path}: {error}") from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"--baseline {path}: {wrong}; known fields: {', '.join(Baseline.model_fields)}") from error


@dataclass(frozen=True)
class Port:
    """A physical network device, or a port of an RDMA device with the network device that it belongs to, if any."""

    name: str
    folder: Path
    net: str | None
    rdma: str | None = None

    @property
    def is_roce(self) -> bool:
        """Whether it carries RDMA over Ethernet."""
        return self.rdma is not None and read(self.folder / "link_layer") == "Ethernet"


def run_tool(command: Sequence[str]) -> str | None:
    """Run a tool that only shows something."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_LIMIT_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def read(file: Path) -> str:
    """A small file without its line end; empty when it cannot be read."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def ports(baseline: Baseline, root: Path = ROOT) -> list[Port]:
    """RDMA ports, then physical network devices that are none of theirs."""
    found = []
    for device in sorted((root / "sys/class/infiniband").glob("*")):
        nets = sorted(entry.name for entry in (device / "device/net").glob("*"))
        found += [
            Port(f"{device.name}/{port.name}", port, nets[0] if nets else None, device.name)
            for port in sorted((device / "ports").glob("[0-9]*"))
        ]
    taken = {port.net for port in found}
    for device in sorted((root / "sys/class/net").glob("*")):
        is_wanted = device.name in baseline.nics if baseline.nics else (device / "device").exists() and read(device / "operstate") == "up"
        if is_wanted and device.name not in taken:
            found.append(Port(device.name, device, device.name))
    return [port for port in found if not baseline.nics or {port.name, port.net, port.rdma} & set(baseline.nics)]


def _missing(baseline: Baseline, found: Sequence[Port]) -> Problems:
    names = {name for port in found for name in (port.name, port.net, port.rdma)}
    return [("fail", f"{name} is not there") for name in baseline.nics if name not in names]


def _on_ports(check: str, baseline: Baseline, root: Path, look: Callable[[Port], tuple[Problems, list[Number]]]) -> Outcome:
    found = ports(baseline, root)
    problems: Problems = _missing(baseline, found)
    numbers: list[Number] = []
    if not found and not problems:
        return not_run(check, "no physical NIC is up")
    for port in found:
        wrong, measured = look(port)
        problems.extend((status, f"{port.name}: {text}") for status, text in wrong)
        numbers += measured
    return outcome(check, problems, numbers)


def nic_link(baseline: Baseline, root: Path = ROOT) -> Outcome:
    """State, speed and MTU."""

    def look(port: Port) -> tuple[Problems, list[Number]]:
        problems: Problems = []
        net = root / "sys/class/net" / (port.net or "-")
        state = read(port.folder / "state") if port.rdma else read(net / "operstate")
        if state.rpartition(" ")[2].lower() not in ("active", "up"):
            problems.append(("fail", f"the link is {state.rpartition(' ')[2].lower() or 'in an unknown state'}"))
        numbers = []
        speed = _speed_gbps(port, net)
        if speed is not None:
            numbers.append(Number(name="speed", value=speed, unit="Gb/s", part=port.name))
        elif baseline.speed_gbps is not None:
            problems.append(("not_run", "the driver does not tell its speed"))
        if speed is not None and baseline.speed_gbps is not None and speed < baseline.speed_gbps:
            problems.append(("fail", f"{speed:g} Gb/s, the baseline is {baseline.speed_gbps:g}"))
        if mtu := read(net / "mtu"):
            numbers.append(Number(name="MTU", value=int(mtu), unit="bytes", part=port.name))
            if baseline.mtu is not None and int(mtu) != baseline.mtu:
                problems.append(("fail", f"MTU {mtu}, the baseline is {baseline.mtu}"))
        return problems, numbers

    return _on_ports("nic_link", baseline, root, look)


def _speed_gbps(port: Port, net: Path) -> float | None:
    if port.rdma:
        rate = re.match(r"([\d.]+) Gb/sec", read(port.folder / "rate"))
        return float(rate[1]) if rate else None
    speed = read(net / "speed")
    return int(speed) / 1000 if speed.isdecimal() and int(speed) > 0 else None


def nic_counters(baseline: Baseline, root: Path = ROOT) -> Outcome:
    """How often the link went down, and errors of the wire."""

    def look(port: Port) -> tuple[Problems, list[Number]]:
        net = root / "sys/class/net" / (port.net or "-")
        downs = _count(port.folder / "counters/link_downed") if port.rdma else _count(net / "carrier_down_count")
        if port.rdma:
            errors = {name: _count(port.folder / "counters" / name) for name in _RDMA_ERRORS}
        else:
            errors = {name: _count(net / "statistics" / name) for name in ("rx_errors", "tx_errors", "rx_crc_errors")}
        problems: Problems = (
            [("warn", "the driver has no counters")] if downs is None and not any(c is not None for c in errors.values()) else []
        )
        if (downs or 0) > baseline.most_link_downs:
            problems.append(("fail", f"the link went down {downs} times, the baseline allows {baseline.most_link_downs}"))
        problems.extend(("fail", f"{count} {name}") for name, count in errors.items() if (count or 0) > baseline.most_errors)
        numbers = [Number(name="link downs", value=downs, unit="times", part=port.name)] if downs is not None else []
        return problems, numbers + [Number(name=n, value=c, unit="errors", part=port.name) for n, c in errors.items() if c]

    return _on_ports("nic_counters", baseline, root, look)


def _count(file: Path) -> int | None:
    text = read(file)
    return int(text) if text.isdecimal() else None


def nic_settings(baseline: Baseline, root: Path = ROOT, run: Run = run_tool) -> Outcome:
    """Adaptive retransmission, ECN and PFC of RoCE ports. What no tool tells is ``not_run``, whatever else is fine."""
    roce = [port for port in ports(baseline, root) if port.is_roce]
    if not roce:
        return not_run("nic_settings", "no RoCE NIC here")
    priority, problems = baseline.roce_priority, []
    for port in roce:
        for name, wanted, found in (
            ("adaptive retransmission", baseline.adaptive_retransmission, lambda port=port: _adaptive(port, root, run)),
            (f"ECN of priority {priority}", baseline.ecn, lambda port=port: _ecn(port, priority, root)),
            (f"PFC of priority {priority}", baseline.pfc, lambda port=port: _pfc(port, priority, run)),
        ):
            if wanted is None:
                continue
            is_on = found()
            if is_on is None:
                problems.append(("not_run", f"{port.name}: {name} cannot be read here"))
            elif is_on != wanted:
                problems.append(("fail", f"{port.name}: {name} is {'on' if is_on else 'off'}"))
    return outcome("nic_settings", problems, [Number(name="RoCE ports", value=len(roce), unit="ports")])


def _adaptive(port: Port, root: Path, run: Run) -> bool | None:
    try:
        address = (root / "sys/class/infiniband" / (port.rdma or "-") / "device").resolve(strict=True).name
    except OSError:
        return None
    shown = re.search(
        r"^roce_adp_retrans_en\s*\|\s*0x([0-9a-f]+)", run(["mlxreg", "-d", address, "--reg_name", "ROCE_ACCL", "--get"]) or "", re.M
    )
    return int(shown[1], 16) == 1 if shown else None


def _ecn(port: Port, priority: int, root: Path) -> bool | None:
    """On only if both ends of DCQCN are: the one that notices marks, and the one that slows down."""
    folder = root / "sys/class/net" / (port.net or "-") / "ecn"
    values = [read(folder / role / "enable" / str(priority)) for role in ("roce_np", "roce_rp")]
    return all(value == "1" for value in values) if all(values) else None


def _pfc(port: Port, priority: int, run: Run) -> bool | None:
    if port.net is None:
        return None
    shown = re.search(r"PFC configuration:\s*priority\s+([\d ]+)\s*enabled\s+([\d ]+)", run(["mlnx_qos", "-i", port.net]) or "")
    if shown:
        return dict(zip(shown[1].split(), shown[2].split(), strict=False)).get(str(priority)) == "1"
    shown = re.search(rf"\b{priority}:(on|off)", run(["dcb", "pfc", "show", "dev", port.net, "prio-pfc"]) or "")
    return shown[1] == "on" if shown else None

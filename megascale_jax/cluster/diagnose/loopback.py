"""Traffic inside a host: each RDMA NIC to each memory node and GPU, NIC to NIC, and TCP to each NIC's own address.

RDMA goes through `ib_write_bw` of perftest, which loops through the NIC. TCP to an own address stays in the kernel: it proves address and
protocol stack, and nothing of the wire, so it is a check with a name of its own. ``root``: the file system's root, another one in tests.
"""

import hashlib
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from megascale_jax.cluster.diagnose.checks import Number, Outcome, Status, not_run, outcome
from megascale_jax.cluster.diagnose.nic import ROOT, Baseline, ports, read

SECONDS = 2
START_LIMIT_S, PERFTEST_LIMIT_S = 0.5, 30
TRIAL_BYTES = 32 << 20
_RESULT = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", re.MULTILINE)
"""Row of perftest's table: bytes, iterations, peak, average, message rate."""

type Measure = Callable[[Sequence[str], Sequence[str]], str]
"""Output of a client (second) that talks to a server (first). Raises OSError."""


def nic_tcp(baseline: Baseline, root: Path = ROOT, addresses: Mapping[str, str] | None = None) -> Outcome:
    """Send through a socket bound to each NIC's address, and compare what arrives."""
    own = _addresses() if addresses is None else addresses
    names = dict.fromkeys(port.net for port in ports(baseline, root) if port.net in own)
    if not names:
        return not_run("nic_tcp", "no NIC with an IPv4 address is up")
    problems: list[tuple[Status, str]] = []
    numbers = []
    for name in names:
        address = own[str(name)]
        try:
            seconds = _send_to_self(address)
        except OSError as error:
            problems.append(("fail", f"{name} ({address}): {error}"))
            continue
        numbers.append(Number(name="to itself over TCP", value=TRIAL_BYTES / seconds / 1e9, unit="GB/s", part=str(name)))
    return outcome("nic_tcp", problems, numbers)


def _addresses() -> dict[str, str]:
    found = {name: [a.address for a in addresses if a.family == socket.AF_INET] for name, addresses in psutil.net_if_addrs().items()}
    return {name: addresses[0] for name, addresses in found.items() if addresses}


def _send_to_self(address: str, limit_s: float = 10) -> float:
    """Seconds for `TRIAL_BYTES`. Raises OSError when they do not arrive, or arrive changed."""
    content = os.urandom(TRIAL_BYTES)
    with socket.create_server((address, 0)) as server:
        server.settimeout(limit_s)
        failures: list[OSError] = []

        def send() -> None:
            try:
                with socket.create_connection(server.getsockname(), timeout=limit_s, source_address=(address, 0)) as client:
                    client.sendall(content)
            except OSError as error:
                failures.append(error)

        sender = threading.Thread(target=send, daemon=True)
        began_s = time.monotonic()
        sender.start()
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as stream:
            connection.settimeout(limit_s)
            arrived = stream.read()
        seconds = time.monotonic() - began_s
        sender.join(limit_s)
    if failures:
        raise failures[0]
    if hashlib.blake2b(arrived).digest() != hashlib.blake2b(content).digest():
        raise OSError(f"{len(arrived)} bytes arrived, not those {len(content)} that were sent")
    return max(seconds, 1e-6)


def measure_perftest(server: Sequence[str], client: Sequence[str]) -> str:
    """Run a server and its client on this host."""
    with subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as waiting:
        try:
            deadline_s = time.monotonic() + PERFTEST_LIMIT_S
            while True:
                time.sleep(START_LIMIT_S)  # the server needs a moment until it listens
                done = subprocess.run(
                    client, capture_output=True, text=True, timeout=PERFTEST_LIMIT_S, check=False, stdin=subprocess.DEVNULL
                )
                if done.returncode == 0:
                    return done.stdout
                if waiting.poll() is not None or time.monotonic() > deadline_s:
                    raise OSError(f"{client[0]} ended with code {done.returncode}: {done.stderr.strip()[-200:]}")
        except subprocess.TimeoutExpired as error:
            raise OSError(f"{client[0]} did not end within {PERFTEST_LIMIT_S} s") from error
        finally:
            waiting.kill()


def nic_loopback(
    baseline: Baseline,
    root: Path = ROOT,
    measure: Measure = measure_perftest,
    find: Callable[[str], str | None] = shutil.which,
) -> Outcome:
    """Each RDMA NIC to each memory node and each GPU."""
    devices = _rdma_devices(baseline, root)
    if missing := _missing("nic_loopback", devices, 1, find):
        return missing
    nodes = _memory_nodes(root)
    gpus = sorted((path.name.removeprefix("nvidia") for path in (root / "dev").glob("nvidia[0-9]*")), key=int)
    problems: list[tuple[Status, str]] = []
    if len(nodes) > 1 and find("numactl") is None:
        problems.append(("not_run", f"memory nodes {', '.join(nodes)} were not told apart: no numactl"))
        nodes = ["any"]
    prefixes = {f"memory node {node}": ["numactl", f"--membind={node}"] if len(nodes) > 1 else [] for node in nodes}
    trials = [(f"{device} to {place}", device, device, prefix, []) for device in devices for place, prefix in prefixes.items()]
    trials += [(f"{device} to GPU {gpu}", device, device, [], [f"--use_cuda={gpu}"]) for device in devices for gpu in gpus]
    return _measure_all("nic_loopback", trials, problems, measure)


def nic_to_nic(
    baseline: Baseline, root: Path = ROOT, measure: Measure = measure_perftest, find: Callable[[str], str | None] = shutil.which
) -> Outcome:
    """Each RDMA NIC to the next one of the host."""
    devices = _rdma_devices(baseline, root)
    if missing := _missing("nic_to_nic", devices, 2, find):
        return missing
    trials = [(f"{one} to {other}", one, other, [], []) for one, other in zip(devices, [*devices[1:], devices[0]], strict=True)]
    return _measure_all("nic_to_nic", trials, [], measure)


def _rdma_devices(baseline: Baseline, root: Path) -> list[str]:
    return list(dict.fromkeys(port.rdma for port in ports(baseline, root) if port.rdma is not None))


def _memory_nodes(root: Path) -> list[str]:
    text = read(root / "sys/devices/system/node/has_memory") or "0"
    spans = [part.partition("-") for part in text.split(",")]
    return [str(node) for first, _, last in spans for node in range(int(first), int(last or first) + 1)]


def _missing(check: str, devices: Sequence[str], wanted: int, find: Callable[[str], str | None]) -> Outcome | None:
    if len(devices) < wanted:
        return not_run(check, f"{len(devices)} RDMA NICs here, {wanted} needed")
    return None if find("ib_write_bw") else not_run(check, "ib_write_bw (perftest) is not installed")


def _measure_all(
    check: str,
    trials: Sequence[tuple[str, str, str, list[str], list[str]]],
    problems: list[tuple[Status, str]],
    measure: Measure,
) -> Outcome:
    """Trials: name, device of the server, of the client, what both start with, what both end with. One after the other."""
    numbers = []
    for index, (name, server, client, prefix, options) in enumerate(trials):
        port = str(18600 + index % 1000)
        common = [*prefix, "ib_write_bw", "-F", "--report_gbits", "-D", str(SECONDS), "-p", port, *options]
        try:
            output = measure([*common, "-d", server], [*common, "-d", client, "127.0.0.1"])
        except OSError as error:
            # perftest that was built without CUDA does not know the option
            problems.append(("not_run" if options and "option" in str(error) else "fail", f"{name}: {error}"))
            continue
        if (shown := _RESULT.search(output)) is None:
            problems.append(("not_run", f"{name}: ib_write_bw's output is not understood"))
            continue
        rate = float(shown[1])
        numbers.append(Number(name=check, value=rate, unit="Gb/s", part=name))
    return outcome(check, problems, numbers)

"""What the control link costs the driver: executors that beat every second over TLS, on this machine.

    python benchmarks/bench_driver.py --json benchmarks/results/driver.json

The driver's end (`LinkServer`) runs in this process, with a handler that keeps the last beat of each node and answers it; beats are
validated as always. The executors are real `LinkClient`s in other processes. Once all are connected and settled, it measures

- **CPU**: user and system time of this process, as a share of one core;
- **handling**: from a frame that is complete, before it is parsed, to the end of the handler;
- **latency**: from before the executor builds a beat until it is handled: encryption, the kernel, the wait for the event loop included;
- **memory**: resident, every second; its growth is that of the last tenth's median over the first tenth's.

Executors and driver share this machine's cores, so latency includes waiting for a core. Nothing is asserted.
"""

import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Annotated, Any, cast

import psutil
import typer
import uvloop
from bench_step import ROOT
from driver_worker import Beat, Desired
from pydantic import BaseModel, TypeAdapter
from step_report import birth_certificate

from megascale_jax.cluster.link.certificates import make_folder
from megascale_jax.cluster.link.connection import Peer
from megascale_jax.cluster.link.security import Security, make_token
from megascale_jax.cluster.link.server import LinkServer
from megascale_jax.cluster.link.tokens import Role

SETTLE_S = 5.0
CONNECTING_S = 20
"""Over which the executors of each worker start to connect."""

CONNECT_LIMIT_S = 120.0
TARGETS = {"cpu_share": 0.20, "handling_p99_ms": 50.0}


class Timed:
    """A validator that notes when it began; stands in for the `TypeAdapter` inside it."""

    def __init__(self, inside: TypeAdapter[Any]):
        self.began_ns = 0
        self._inside = inside

    def validate_json(self, data: bytes) -> Any:
        self.began_ns = time.perf_counter_ns()
        return self._inside.validate_json(data)


class Fleet:
    """The handler: the last beat of each node. Its records are made whole at the start, so that they are no growth."""

    def __init__(self, adapter: Timed, room: int, answers: bool):
        self.nodes: dict[str, Beat] = {}
        self.connected_count = self.lost_count = self.beats = 0
        self.recording = False
        self.handling_ns, self.latency_ns = array("q", bytes(8 * room)), array("q", bytes(8 * room))
        self._adapter, self._answers = adapter, answers

    def connected(self, peer: Peer) -> None:
        self.connected_count += 1

    def received(self, peer: Peer, message: BaseModel) -> None:
        assert isinstance(message, Beat)
        self.nodes[peer.name] = message
        if self._answers:
            peer.send(Desired(attempt=message.attempt, what="train", coordinator="node-0:1234", ranks=len(self.nodes)))
        if self.recording and self.beats < len(self.handling_ns):
            self.handling_ns[self.beats] = time.perf_counter_ns() - self._adapter.began_ns
            self.latency_ns[self.beats] = time.monotonic_ns() - message.sent_ns
            self.beats += 1

    def lost(self, peer: Peer, why: str) -> None:
        self.lost_count += 1


def main(
    json_path: Annotated[Path, typer.Option("--json", help="file for every number")],
    executors: Annotated[int, typer.Option(min=1, help="simulated executors")] = 1536,
    seconds: Annotated[int, typer.Option(min=2, help="measured, after all are connected")] = 600,
    workers: Annotated[int, typer.Option(min=1, help="processes that the executors are in")] = 2,
    answers: Annotated[bool, typer.Option(help="answer every beat")] = True,
    loop: Annotated[str, typer.Option(help="event loop of the driver: uvloop or asyncio")] = "uvloop",
) -> None:
    """Measure, print and write JSON."""
    options = f"--executors {executors} --seconds {seconds} --workers {workers} {'--answers' if answers else '--no-answers'} --loop {loop}"
    record: dict[str, Any] = birth_certificate(ROOT, f"python benchmarks/bench_driver.py --json PATH {options}")
    record["hardware"] = record["hardware"].removesuffix(", virtual CPU devices")
    record["targets"] = TARGETS
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with tempfile.TemporaryDirectory() as folder:
        certificates(Path(folder), executors)
        with asyncio.Runner(loop_factory=factory) as runner:
            record |= runner.run(measure(Path(folder), executors, seconds, workers, answers))
    record["load_after"] = os.getloadavg()
    json_path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['beats']:,} beats of {record['beat_bytes']} bytes in {record['wall_s']:.0f} s; {record['lost']} connections lost")
    print(f"all {executors} connected in {record['connected_in_s']:.1f} s; {len(record['audit_lines'])} lines in the audit log")
    print(f"CPU: {record['cpu_share']:.1%} of a core ({record['cpu_us_per_beat']:.0f} us a beat)")
    for what in ("handling", "latency"):
        p50, p99, longest = (record[f"{what}_{name}_ms"] for name in ("p50", "p99", "max"))
        print(f"{what}: p50 {p50:.3f} ms, p99 {p99:.3f} ms, longest {longest:.1f} ms")
    memory = (record[f"rss_{when}_mib"] for when in ("before", "first", "last"))
    print("memory: {:.1f} MiB before the first connection, {:.1f} MiB at first, {:.1f} MiB at last".format(*memory))


def certificates(folder: Path, executors: int) -> None:
    """Certificates, and a token for each node."""
    make_folder(folder, [], job="bench", force=True)
    security = Security.load(folder, role="driver")
    for number in range(executors):
        make_token(security, f"node-{number}", Role.NODE, days=1, path=folder / f"node-{number}.token")


async def measure(folder: Path, executors: int, seconds: int, workers: int, answers: bool) -> dict[str, Any]:
    """Run the driver's end and the executors; the numbers."""
    adapter = Timed(TypeAdapter(Beat))
    fleet = Fleet(adapter, int(executors * seconds * 1.2), answers)
    audited: list[tuple[str, dict[str, Any]]] = []
    resident_before = psutil.Process().memory_info().rss
    security, incoming = Security.load(folder, role="driver"), cast(Any, adapter)
    server = LinkServer(security, "bench", incoming, fleet, audit=lambda action, details: audited.append((action, details)))
    port = await server.start("127.0.0.1", 0)
    began = time.monotonic()
    processes = start_executors(folder, port, executors, workers)
    try:
        while len(fleet.nodes) < executors:
            if time.monotonic() - began > CONNECT_LIMIT_S or any(process.poll() is not None for process in processes):
                raise SystemExit(f"{len(fleet.nodes)} of {executors} executors beat after {CONNECT_LIMIT_S:g} s; audit: {audited[-3:]}")
            await asyncio.sleep(0.1)
        connected_in = time.monotonic() - began
        await asyncio.sleep(SETTLE_S)
        result = await record(fleet, seconds)
    finally:
        for process in processes:
            process.communicate(timeout=30)
    await server.close()
    size = len(next(iter(fleet.nodes.values())).model_dump_json())
    return {
        "executors": executors,
        "answers": answers,
        "connected_in_s": connected_in,
        "beat_bytes": size,
        "rss_before_mib": resident_before / 2**20,
        "audit_lines": audited,
        **result,
    }


def start_executors(folder: Path, port: int, executors: int, workers: int) -> list[subprocess.Popen[str]]:
    """Processes with a share of the executors each."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    bounds = [executors * worker // workers for worker in range(workers + 1)]
    return [
        subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "benchmarks/driver_worker.py"),
                str(folder),
                str(port),
                str(low),
                str(high - low),
                str(CONNECTING_S),
            ],
            env=environment,
            stdin=subprocess.PIPE,
            text=True,
        )
        for low, high in itertools.pairwise(bounds)
    ]


async def record(fleet: Fleet, seconds: int) -> dict[str, Any]:
    """The measured time."""
    process = psutil.Process()
    memory: list[int] = []
    lost_before = fleet.lost_count
    fleet.recording = True
    began, before = time.monotonic(), process.cpu_times()
    for second in range(seconds):
        await asyncio.sleep(max(0.0, began + second + 1 - time.monotonic()))
        memory.append(process.memory_info().rss)
    wall, after = time.monotonic() - began, process.cpu_times()
    fleet.recording = False
    cpu = after.user + after.system - before.user - before.system
    tenth = max(1, seconds // 10)
    numbers: dict[str, Any] = {
        "wall_s": wall,
        "beats": fleet.beats,
        "lost": fleet.lost_count - lost_before,
        "cpu_s": cpu,
        "cpu_user_s": after.user - before.user,
        "cpu_share": cpu / wall,
        "cpu_us_per_beat": 1e6 * cpu / fleet.beats,
        "rss_first_mib": statistics.median(memory[:tenth]) / 2**20,
        "rss_last_mib": statistics.median(memory[-tenth:]) / 2**20,
        "rss_max_mib": max(memory) / 2**20,
    }
    for what, values in (("handling", fleet.handling_ns), ("latency", fleet.latency_ns)):
        ordered = sorted(values[: fleet.beats])
        numbers |= {f"{what}_p50_ms": ordered[len(ordered) // 2] / 1e6, f"{what}_p99_ms": ordered[len(ordered) * 99 // 100] / 1e6}
        numbers[f"{what}_max_ms"] = ordered[-1] / 1e6
    return numbers


if __name__ == "__main__":
    typer.run(main)

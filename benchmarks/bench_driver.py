"""What a driver costs: executors that beat every second over TLS, on this machine.

    python benchmarks/bench_driver.py --json benchmarks/results/driver.json

The driver (`Control`, `Driver`, `LinkServer`: what `megascale drive` runs, its journal on a disk) is in this process. The executors are
real `LinkClient`s in other processes and say what a training node says. Once all have a seat and train, and the driver has settled,
it measures

- **CPU**: user and system time of this process, as a share of one core;
- **handling**: from a frame that is complete, before it is parsed, to the end of the handler;
- **tick**: one look of the driver at everything;
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
from collections import deque
from pathlib import Path
from typing import Annotated, Any, cast

import psutil
import typer
import uvloop
from bench_step import ROOT
from pydantic import BaseModel, TypeAdapter
from step_report import birth_certificate

from megascale_jax.cluster.anomaly import Watcher
from megascale_jax.cluster.driver import Driver
from megascale_jax.cluster.driver_process import TICK_S, Control, permits
from megascale_jax.cluster.journal import Journal, JournalClock
from megascale_jax.cluster.lifecycle import Phase
from megascale_jax.cluster.limits import Limits
from megascale_jax.cluster.link.audit import AuditLog
from megascale_jax.cluster.link.certificates import make_folder
from megascale_jax.cluster.link.connection import Peer
from megascale_jax.cluster.link.operators import Rule
from megascale_jax.cluster.link.security import Security, make_token
from megascale_jax.cluster.link.server import LinkServer
from megascale_jax.cluster.link.tokens import Role
from megascale_jax.cluster.messages import Beat, FromNode
from megascale_jax.cluster.state import Shape
from megascale_jax.config.cluster import ClusterConfig

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


class Fleet(Control):
    """The driver's handler, with times. Its records are made whole at the start, so that they are no growth."""

    def __init__(self, folder: Path, adapter: Timed, room: int):
        super().__init__(AuditLog(folder / "audit.jsonl"), Rule(), list)
        self.connected_count = self.lost_count = self.beats = self.ticks = 0
        self.recording = False
        self.handling_ns, self.latency_ns, self.tick_ns = (array("q", bytes(8 * room)) for _ in range(3))
        self._adapter = adapter

    def connected(self, peer: Peer) -> None:
        super().connected(peer)
        self.connected_count += 1

    def received(self, peer: Peer, message: BaseModel) -> None:
        super().received(peer, message)
        if self.recording and isinstance(message, Beat) and self.beats < len(self.handling_ns):
            self.handling_ns[self.beats] = time.perf_counter_ns() - self._adapter.began_ns
            self.latency_ns[self.beats] = time.monotonic_ns() - round(1e3 * message.counters["bench.sent_us"])
            self.beats += 1

    def lost(self, peer: Peer, why: str) -> None:
        super().lost(peer, why)
        self.lost_count += 1

    async def tick(self) -> None:
        """As `driver_process.drive` does."""
        assert self.driver is not None, "made before"
        while True:
            began = time.perf_counter_ns()
            self.driver.tick()
            if self.recording and self.ticks < len(self.tick_ns):
                self.tick_ns[self.ticks] = time.perf_counter_ns() - began
                self.ticks += 1
            await asyncio.sleep(TICK_S)


class Elsewhere:
    """A backend whose nodes are started by somebody else."""

    def ensure(self, name: str) -> None:
        """Somebody does."""

    def is_alive(self, name: str) -> bool | None:
        """Beats tell."""
        return None

    def remove(self, name: str, machine: str, reason: str) -> None:
        """Nothing to do."""

    def switch(self, machine: str) -> str | None:
        """Nodes say it themselves."""
        return None

    def restore(self, name: str, machine: str) -> None:
        """Nothing to do."""

    def taken_back(self) -> dict[str, str]:
        """None."""
        return {}

    def release(self, name: str) -> None:
        """Nothing to do."""

    def facts(self) -> dict[str, str]:
        """None."""
        return {}


def main(
    json_path: Annotated[Path, typer.Option("--json", help="file for every number")],
    executors: Annotated[int, typer.Option(min=1, help="simulated executors")] = 1536,
    seconds: Annotated[int, typer.Option(min=2, help="measured, after all are connected")] = 600,
    workers: Annotated[int, typer.Option(min=1, help="processes that the executors are in")] = 2,
    loop: Annotated[str, typer.Option(help="event loop of the driver: uvloop or asyncio")] = "uvloop",
) -> None:
    """Measure, print and write JSON."""
    options = f"--executors {executors} --seconds {seconds} --workers {workers} --loop {loop}"
    record: dict[str, Any] = birth_certificate(ROOT, f"python benchmarks/bench_driver.py --json PATH {options}")
    record["hardware"] = record["hardware"].removesuffix(", virtual CPU devices")
    record["targets"] = TARGETS
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with tempfile.TemporaryDirectory() as folder:
        certificates(Path(folder), executors)
        with asyncio.Runner(loop_factory=factory) as runner:
            record |= runner.run(measure(Path(folder), executors, seconds, workers))
    record["load_after"] = os.getloadavg()
    json_path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['beats']:,} beats of {record['beat_bytes']} bytes in {record['wall_s']:.0f} s; {record['lost']} connections lost")
    print(f"all {executors} connected in {record['connected_in_s']:.1f} s; {len(record['audit_lines'])} lines in the audit log")
    print(f"CPU: {record['cpu_share']:.1%} of a core ({record['cpu_us_per_beat']:.0f} us a beat)")
    for what in ("handling", "tick", "latency"):
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


async def measure(folder: Path, executors: int, seconds: int, workers: int) -> dict[str, Any]:
    """Run the driver's end and the executors; the numbers."""
    adapter = Timed(TypeAdapter(FromNode))
    fleet = Fleet(folder, adapter, int(executors * seconds * 1.2))
    audited: list[tuple[str, dict[str, Any]]] = []
    resident_before = psutil.Process().memory_info().rss
    security, incoming = Security.load(folder, role="driver"), cast(Any, adapter)
    config, names = ClusterConfig(), tuple(f"node-{number}" for number in range(executors))
    journal, watcher = Journal(folder / "journal.sqlite"), Watcher(config, Limits.of(config))
    sized, clock, said = (Shape(num_nodes=executors),), JournalClock(0.0), deque[str](maxlen=20)
    driver = Driver(journal, config, sized, names, 1 << 40, Elsewhere(), watcher, clock, fleet.send, said.append)
    fleet.driver = driver
    server = LinkServer(
        security, "bench", incoming, fleet, audit=lambda action, details: audited.append((action, details)), permits=permits
    )
    port = await server.start("127.0.0.1", 0)
    began = time.monotonic()
    ticking = asyncio.create_task(fleet.tick())
    processes = start_executors(folder, port, executors, workers)
    try:
        while driver.state.phase != Phase.RUNNING:
            if time.monotonic() - began > CONNECT_LIMIT_S or any(process.poll() is not None for process in processes) or ticking.done():
                raise SystemExit(f"{len(driver.beats)} of {executors} executors beat after {CONNECT_LIMIT_S:g} s; {said}; {audited[-3:]}")
            await asyncio.sleep(0.1)
        connected_in = time.monotonic() - began
        await asyncio.sleep(SETTLE_S)
        result = await record(fleet, seconds)
        assert driver.state.phase == Phase.RUNNING and not driver.state.incidents, said
    finally:
        ticking.cancel()
        for process in processes:
            process.communicate(timeout=30)
    await server.close()
    size = len(next(iter(driver.beats.values())).model_dump_json())
    journal.close()
    return {
        "executors": executors,
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
    for what, values, count in (
        ("handling", fleet.handling_ns, fleet.beats),
        ("latency", fleet.latency_ns, fleet.beats),
        ("tick", fleet.tick_ns, fleet.ticks),
    ):
        ordered = sorted(values[:count])
        numbers |= {f"{what}_p50_ms": ordered[len(ordered) // 2] / 1e6, f"{what}_p99_ms": ordered[len(ordered) * 99 // 100] / 1e6}
        numbers[f"{what}_max_ms"] = ordered[-1] / 1e6
    return numbers


if __name__ == "__main__":
    typer.run(main)

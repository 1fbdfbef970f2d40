"""Simulated executors of `bench_driver.py`, many in one process: each a real `LinkClient` that beats once a second over TLS.

    python driver_worker.py FOLDER PORT FIRST COUNT START_S

``FOLDER`` holds the certificates and a token for each node; executor number ``FIRST`` + i connects after its share of ``START_S``
seconds, and beats at its own moment of every second, so that beats are spread as those of real nodes are. Ends when its standard
input does.
"""

import asyncio
import sys
import time
from pathlib import Path

import uvloop
from pydantic import TypeAdapter

from megascale_jax.cluster.link.client import LinkClient
from megascale_jax.cluster.link.security import Security
from megascale_jax.cluster.messages import Answer, Beat, Desired, Hello, ToNode
from megascale_jax.cluster.reports import ProcessReport

STEP_S = 6.34


class Node:
    """What one executor would say: it trains whatever it is told to, in step with all others."""

    def __init__(self, name: str):
        self.name, self.attempt, self.rank = name, 0, None

    def heard(self, message: Desired | Answer) -> None:
        """Begin what is wanted."""
        if isinstance(message, Desired) and message.assignment is not None:
            self.attempt, self.rank = message.assignment.attempt, message.assignment.rank

    def hello(self) -> Hello:
        """Its first words on a connection."""
        software = {"jax": "0.11.2", "nvidia driver": "580.65.06", "kernel": "6.8.0", "python": "3.12.1"}
        return Hello(node=self.name, incarnation=f"{self.name}-1", address="10.0.0.1", ports=tuple(range(20000, 20016)), software=software)

    def beat(self) -> Beat:
        """A beat of a node that trains, about 900 bytes of JSON; ``bench.sent_us``: the host's monotonic clock."""
        counters = {f"gpu.{gpu}.utilisation": 0.97 for gpu in range(4)} | {f"nic.mlx5_{nic}.tx_bytes": 1.5e12 + nic for nic in range(4)}
        counters["bench.sent_us"] = time.monotonic_ns() / 1e3
        return Beat(attempt=self.attempt, is_idle=self.rank is None, processes=self._processes(), counters=counters)

    def _processes(self) -> tuple[ProcessReport, ...]:
        if self.rank is None:
            return ()
        step, in_section_s = divmod(time.monotonic(), STEP_S)
        return (
            ProcessReport(
                rank=self.rank,
                pid=4711,
                state="running",
                exit_code=None,
                signal=None,
                step=int(step),
                section="step",
                in_section_s=in_section_s,
                longest_s={"compile": 61.3, "restore": 12.1, "step": 6.41},
                passes={"compile": 1, "restore": 1, "data": int(step), "step": int(step)},
                loss=2.1834,
                non_finite_in_a_row=0,
                saved_step=int(step) - int(step) % 100,
                durable_step=int(step) - int(step) % 100,
                step_s=STEP_S,
                cpu_s=12345.6,
                rss_bytes=64 << 30,
                log=(f"step {int(step):,}  loss 2.1834  6.34 s  55.2% MFU",),
                keywords=(),
                is_secondary=None,
                silent_s=0.4,
            ),
        )


async def executor(folder: Path, port: int, number: int, start_s: float) -> None:
    """One node: connects after ``start_s``, then beats every second, for ever."""
    security = Security(
        ca=folder / "ca.pem",
        certificate=folder / "client.pem",
        key=folder / "client.key",
        job="bench",
        token=folder / f"node-{number}.token",
    )
    await asyncio.sleep(start_s)
    node = Node(f"node-{number}")
    client = LinkClient(
        security, ("127.0.0.1", port), TypeAdapter(ToNode), received=node.heard, connected=lambda: (client.send(node.hello()), None)[1]
    )
    running = asyncio.create_task(client.run())
    due = asyncio.get_running_loop().time()
    while not running.done():
        client.send(node.beat())
        due += 1.0
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
    running.result()


async def main(folder: Path, port: int, first: int, count: int, start_s: float) -> None:
    """All executors of this process, until the parent ends it."""
    tasks = [asyncio.create_task(executor(folder, port, first + i, start_s * i / count)) for i in range(count)]
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    first_of_these, count_of_these = int(sys.argv[3]), int(sys.argv[4])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(Path(sys.argv[1]), int(sys.argv[2]), first_of_these, count_of_these, float(sys.argv[5])))

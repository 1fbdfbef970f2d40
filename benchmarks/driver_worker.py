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
from typing import Literal

import uvloop
from pydantic import BaseModel, ConfigDict, TypeAdapter

from megascale_jax.cluster.link.client import LinkClient
from megascale_jax.cluster.link.security import Security


class Message(BaseModel):
    """As strict as the driver's own messages."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Beat(Message):
    """Liveness and progress of a node, about 600 bytes of JSON. ``sent_ns``: the host's monotonic clock."""

    kind: Literal["beat"] = "beat"
    attempt: int
    step: int
    phase: Literal["compiling", "training", "saving"]
    section: str
    in_section_s: float
    sent_ns: int
    step_time_s: float
    loss: float
    counters: dict[str, float]
    lines: tuple[str, ...]
    software: str


class Desired(Message):
    """What the driver answers."""

    kind: Literal["desired"] = "desired"
    attempt: int
    what: Literal["train", "idle"]
    coordinator: str
    ranks: int


def beat(step: int) -> Beat:
    """A beat of a node that trains."""
    return Beat(
        attempt=3,
        step=step,
        phase="training",
        section="step",
        in_section_s=0.4812,
        sent_ns=time.monotonic_ns(),
        step_time_s=6.3407,
        loss=2.1834,
        counters={f"gpu{gpu}_utilisation": 0.97 for gpu in range(4)} | {f"mlx5_{nic}_sent_bytes": 1.5e12 + step for nic in range(4)},
        lines=(f"step {step:,}  loss 2.1834  6.34 s  55.2% MFU", "checkpoint of step 12,000 written in 41.2 s"),
        software="9f82587e0c1d3c561303b00",
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
    client = LinkClient(security, ("127.0.0.1", port), TypeAdapter(Desired), received=lambda message: None)
    running = asyncio.create_task(client.run())
    step = 0
    due = asyncio.get_running_loop().time()
    while not running.done():
        client.send(beat(step))
        step += 1
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

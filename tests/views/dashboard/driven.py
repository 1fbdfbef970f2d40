"""Runs under a driver: a journal with incidents behind it, and a driver that answers while a page asks."""

import asyncio
import json
import threading
from contextlib import contextmanager

from pydantic import TypeAdapter

from megascale_jax.cluster.driver_process import DRIVER_FILE, Control, permits
from megascale_jax.cluster.job import job_folder, secure, terms_text
from megascale_jax.cluster.link.audit import AuditLog
from megascale_jax.cluster.link.operators import Rule
from megascale_jax.cluster.link.security import Security, make_token
from megascale_jax.cluster.link.server import LinkServer
from megascale_jax.cluster.link.tokens import Role
from megascale_jax.cluster.messages import FromNode
from megascale_jax.cluster.state import Ordered
from megascale_jax.config.cluster import ClusterConfig
from megascale_jax.parallel.pipeline.schedule import Schedule
from tests.cluster.simulated import World
from tests.views.dashboard.runs import HOSTILE
from tests.views.fake_run import make_run
from tests.views.fake_steps import stamps_of, write_steps

CONFIG = ClusterConfig(lost_after_s=5.0, grace_s=5.0, wait_s=60.0, diagnose_s=30.0)
GRID = (4, 2, 8, 1)
"""Stages, chunks a stage, micro-batches, backward delay."""


def trained(folder, *, grid=GRID, tensor=2, steps=range(1, 10)):
    """A run whose steps have details."""
    make_run(folder, steps=200, evaluate_every=20)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "train":
            line |= {"tokens_per_s": 21000.0 + line["step"] % 7, "mfu": 0.412, "tokens": 1024 * line["step"]}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_steps(folder, stamps_of(Schedule(*grid), tensor=tensor), (grid[0], 1, tensor), steps, ranks=grid[0])
    return folder


def world_of(folder, *, is_hostile=False):
    """A driven job: one process was killed, one node evicted by two admins, one cordoned; its driver is still there."""
    place = job_folder(folder)
    place.mkdir(parents=True)
    world = World(place, CONFIG)
    world.journal.keep("terms", terms_text(world.shapes, CONFIG))
    world.until_step(12)
    world.crash("node-2")
    world.until_step(20)
    admins = HOSTILE[:60] if is_hostile else "anna and ben"
    world.driver.record(Ordered(at_s=world.now, action="evict", node="node-1", by=admins, step=20))
    world.until_step(30)
    world.driver.record(Ordered(at_s=world.now, action="cordon", node="node-3", by=admins, step=30))
    for attempt in (1, 2):
        log = place / "nodes" / "node-2" / f"attempt-{attempt:04}" / "rank-2.log"
        log.parent.mkdir(parents=True)
        log.write_text(
            f"step 11: loss 2.31\nRuntimeError: {HOSTILE}\n\x1b[31mjavascript:alert(1)\n" if is_hostile else "step 11: loss 2.3\nKilled\n"
        )
    return world


def driven(folder, *, is_hostile=False, **trained_as):
    """A run whose driver is gone: what it went through is in its journal."""
    trained(folder, **trained_as)
    world_of(folder, is_hostile=is_hostile).journal.close()
    return folder


@contextmanager
def answering(folder, world):
    """The driver of ``world`` answers on a control link, as that of the run in ``folder``; tokens by name and role."""
    place = job_folder(folder)
    security = Security.load(secure(place, world.names), role="driver")
    control = Control(AuditLog(place / "audit.jsonl"), Rule(), saved=lambda: [10, 20])
    control.driver = world.driver
    loop, ready = asyncio.new_event_loop(), threading.Event()
    server = LinkServer(security, security.job, TypeAdapter(FromNode), control, audit=lambda what, details: None, permits=permits)

    async def start():
        port = await server.start("127.0.0.1", 0)
        (place / DRIVER_FILE).write_text(json.dumps({"host": "127.0.0.1", "port": port, "pid": 1}))
        ready.set()

    thread = threading.Thread(target=lambda: (loop.create_task(start()), loop.run_forever()), daemon=True)
    thread.start()
    assert ready.wait(20)

    def token(name, role):
        path = place / f"{name}.token"
        make_token(security, name, Role(role), days=1, path=path, force=True)
        return path.read_text().strip()

    try:
        yield token
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        (place / DRIVER_FILE).unlink()

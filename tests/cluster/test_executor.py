"""An executor makes its node what the driver wants, whatever is said twice, late or not at all."""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from megascale_jax.cluster.counters import AGE
from megascale_jax.cluster.executor import Executor
from megascale_jax.cluster.messages import Assignment, Beat, Desired, Diagnosis, DiagnosisOrder, Hello, Message
from megascale_jax.cluster.processes import TrainingProcesses

LIMIT_S = 20.0
SLEEPS = (sys.executable, "-c", "import time; time.sleep(600)")


class Driver:
    """The other end of the link: hears all, and may be away."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.is_away = False

    def send(self, message: Message) -> bool:
        if not self.is_away:
            self.heard.append(message)
        return not self.is_away

    @property
    def beat(self) -> Beat:
        return next(message for message in reversed(self.heard) if isinstance(message, Beat))


class Node:
    """One executor with real processes."""

    def __init__(
        self,
        folder: Path,
        command: tuple[str, ...] = SLEEPS,
        orphan_s: float = 600.0,
        counters: Callable[[], dict[str, float]] = dict,
    ):
        self.driver, self.examined = Driver(), []
        hello = Hello(node="node-0", incarnation="x", address="127.0.0.1", ports=(1,), software={})

        def examine(order: DiagnosisOrder) -> list[dict[str, object]]:
            self.examined.append(order.round)
            return [{"check": "disk", "status": "pass"}]

        args = (hello, command, {"PATH": "/usr/bin:/bin"}, TrainingProcesses(), self.driver, examine, counters, folder)
        self.executor = Executor(*args, orphan_s=orphan_s)

    def want(self, attempt: int | None = None, **values: object) -> None:
        order = None if attempt is None else Assignment(attempt=attempt, rank=1, num_ranks=2, coordinator="127.0.0.1:1")
        self.executor.received(Desired.model_validate({"beat_s": 0.05, "assignment": order, **values}))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.02)


def play(folder: Path, story: Callable[[Node], Awaitable[None]], **values: object) -> Node:
    """Run an executor beside a story, and end it."""
    node = Node(folder, **values)

    async def both() -> None:
        running = asyncio.create_task(node.executor.run())
        try:
            await node.until(lambda: bool(node.driver.heard))
            await story(node)
            node.want(leave=True)
        finally:
            async with asyncio.timeout(LIMIT_S):
                await running

    asyncio.run(both())
    return node


def test_it_starts_an_attempt_once_and_ends_it_when_told(tmp_path) -> None:
    async def story(node: Node) -> None:
        for _ in range(3):
            node.want(1)
        await node.until(lambda: bool(node.driver.beat.processes))
        first = node.driver.beat.processes[0]
        assert (first.rank, first.state, node.driver.beat.is_idle) == (1, "running", False)
        node.want()
        await node.until(lambda: node.driver.beat.is_idle)
        node.want(1)  # late: that attempt is over
        await asyncio.sleep(0.3)
        assert node.driver.beat.is_idle
        node.want(2)
        await node.until(lambda: not node.driver.beat.is_idle)
        assert node.driver.beat.processes[0].pid != first.pid

    play(tmp_path, story)


def test_a_process_that_ends_is_told_at_once_and_not_started_again(tmp_path) -> None:
    async def story(node: Node) -> None:
        node.want(1)
        await node.until(lambda: [process.exit_code for process in node.driver.beat.processes] == [7])
        await asyncio.sleep(0.3)
        assert len({process.pid for message in node.driver.heard if isinstance(message, Beat) for process in message.processes}) == 1

    play(tmp_path, story, command=(sys.executable, "-c", "raise SystemExit(7)"))


@pytest.mark.parametrize("hangs", [True, False])
def test_counters_that_hang_or_fail_stop_neither_beats_nor_orders(tmp_path, hangs) -> None:
    ended = threading.Event()

    def counters() -> dict[str, float]:
        if hangs:
            ended.wait(LIMIT_S)
        raise OSError("dead file system")

    async def story(node: Node) -> None:
        node.want(1)
        await node.until(lambda: bool(node.driver.beat.processes))
        assert set(node.driver.beat.counters) == {AGE}
        count = len(node.driver.heard)
        await node.until(lambda: len(node.driver.heard) > count + 2)
        ended.set()

    play(tmp_path, story, counters=counters)


def test_while_the_driver_is_away_all_goes_on(tmp_path) -> None:
    async def story(node: Node) -> None:
        node.want(1)
        await node.until(lambda: not node.driver.beat.is_idle)
        pid = node.driver.beat.processes[0].pid
        node.driver.is_away = True
        await asyncio.sleep(0.3)
        node.driver.is_away, node.driver.heard = False, []
        node.executor.connected()
        await node.until(lambda: any(isinstance(message, Beat) for message in node.driver.heard))
        hello = node.driver.heard[0]
        assert isinstance(hello, Hello) and hello.attempt == 1
        assert node.driver.beat.processes[0].pid == pid

    play(tmp_path, story)


def test_a_driver_that_never_comes_back_is_not_waited_for_for_ever(tmp_path) -> None:
    node = Node(tmp_path, orphan_s=0.3)
    asyncio.run(asyncio.wait_for(node.executor.run(), LIMIT_S))
    assert node.driver.beat.is_idle


def test_a_diagnosis_is_made_once_and_told_again_after_a_break(tmp_path) -> None:
    async def story(node: Node) -> None:
        order = DiagnosisOrder(round=3, checks=("disk",), limit_s=5.0)
        for _ in range(3):
            node.want(diagnosis=order)
        await node.until(lambda: any(isinstance(message, Diagnosis) for message in node.driver.heard))
        node.driver.heard = []
        node.executor.connected()
        assert any(isinstance(message, Diagnosis) for message in node.driver.heard)
        assert node.examined == [3]

    play(tmp_path, story)


@pytest.mark.parametrize("is_let_go", [True, False])
def test_nothing_is_left_when_it_leaves(tmp_path, is_let_go) -> None:
    async def story(node: Node) -> None:
        node.want(1)
        await node.until(lambda: not node.driver.beat.is_idle)
        if not is_let_go:
            node.executor.leaving = True

    node = play(tmp_path, story)
    assert node.driver.beat.is_idle


def test_a_waiting_process_becomes_the_next_attempt(tmp_path) -> None:
    """The command is the one that it can become; what it prints shows that it is the process that waited."""
    processes = TrainingProcesses()
    processes.warm_up({"PATH": "/usr/bin:/bin"}, tmp_path / "warm.log")
    waiting = processes._warm
    assert waiting is not None
    from megascale_jax.cluster.processes import Launch

    processes.start(
        1, [Launch(0, (sys.executable, "-m", "megascale_jax.cli.main", "config", "nonsense"), {"PATH": "/usr/bin:/bin"})], tmp_path
    )

    async def ended() -> None:
        async with asyncio.timeout(60):
            while processes.poll()[0].state != "exited":
                await asyncio.sleep(0.05)

    asyncio.run(ended())
    (report,) = processes.poll()
    assert (report.pid, report.exit_code) == (waiting.pid, 2)
    assert "nonsense" in (tmp_path / "attempt-0001" / "rank-0.log").read_text()
    processes.stop(0.0)


def test_only_the_end_of_the_run_is_an_end_for_whoever_runs_executors(tmp_path) -> None:
    """An eviction, a signal and an absent driver leave something to replace: exit code 75 of the process, not 0."""

    async def evicted(node: Node) -> None:
        node.want(leave=True)

    async def over(node: Node) -> None:
        node.want(leave=True, is_over=True)
        await node.until(lambda: node.executor.leaving)

    assert not play(tmp_path, evicted).executor.is_over
    node = Node(tmp_path)

    async def end() -> None:
        running = asyncio.create_task(node.executor.run())
        await over(node)
        await asyncio.wait_for(running, LIMIT_S)

    asyncio.run(end())
    assert node.executor.is_over


@pytest.mark.parametrize("has_peers", [True, False])
def test_without_a_driver_a_process_whose_peers_are_gone_is_ended(tmp_path, monkeypatch, has_peers) -> None:
    """Nobody can tell this node to end it, and it may hold what its successor elsewhere needs."""
    monkeypatch.setattr("megascale_jax.cluster.executor.CUT_OFF_S", 0.3)
    words = "step 7" if has_peers else "Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:4711"

    async def story(node: Node) -> None:
        node.want(1)
        await node.until(lambda: any(process.log for process in node.driver.beat.processes))
        if has_peers:
            await asyncio.sleep(0.8)
            assert not node.driver.beat.is_idle, "it goes on as it was last wanted"
        else:
            await node.until(lambda: node.driver.beat.is_idle)

    command = (sys.executable, "-c", f"import time; print({words!r}, flush=True); time.sleep(600)")
    play(tmp_path, story, command=command)

"""The driver as a process: the control link, the tick, operators' commands, files that say where it is.

In the job's folder: ``journal.sqlite``, ``audit.jsonl``, ``driver.json`` (where it listens), ``security/`` (unless given), ``nodes/``.
A second driver on one folder is refused; a driver that was killed is started again with the same command and goes on.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, TypeAdapter

from megascale_jax.cluster.driver import Driver
from megascale_jax.cluster.lifecycle import ENDS, NodeStatus, Phase
from megascale_jax.cluster.link import operators
from megascale_jax.cluster.link.audit import AuditLog, records
from megascale_jax.cluster.link.connection import Peer
from megascale_jax.cluster.link.security import Security
from megascale_jax.cluster.link.server import LinkServer
from megascale_jax.cluster.link.tokens import Role
from megascale_jax.cluster.messages import Answer, Beat, Command, Desired, Diagnosis, FromNode, Hello
from megascale_jax.cluster.state import Ordered, Rewind
from megascale_jax.cluster.status import status_of
from megascale_jax.config.cluster import DRIVER_LOCK
from megascale_jax.errors import JournalError, RunFolderError, StorageError, UsageError
from megascale_jax.observe.report import replace_file

TICK_S = 0.1
LEAVE_S = 15.0
"""Longest that the driver waits at the end for its executors to hear that it is over."""
DRIVER_FILE = "driver.json"
_PROGRESS_S = 10.0
_AGAIN_S = 2.0
_NUMBER = "number"
"""Of a request, in the details of an audit line."""


class Control:
    """Hears nodes and operators; speaks to them for the driver.

    Every command that may change something is in the audit log twice: that it was asked for, before, and what became of it. `status`
    changes nothing, may be asked each second, and is not in it.
    """

    def __init__(self, audit: AuditLog, rule: operators.Rule, saved: Callable[[], list[int]]):
        """``saved``: steps of the checkpoints on storage. Raises OSError when that cannot be asked."""
        self._saved = saved
        self.driver: Driver | None = None
        self._audit, self._rule = audit, rule
        self._requests = operators.Requests(used=_used_numbers(audit.path))
        self._nodes: dict[str, Peer] = {}

    def send(self, name: str, message: Desired) -> None:
        """To a node, if it is connected."""
        if (peer := self._nodes.get(name)) is not None:
            peer.send(message)

    def connected(self, peer: Peer) -> None:
        """A node is known once it says hello."""
        if peer.role == Role.NODE:
            self._nodes[peer.name] = peer

    def lost(self, peer: Peer, why: str) -> None:
        """A node without a connection is lost when its beats are missed, not before."""
        if self._nodes.get(peer.name) is peer:
            del self._nodes[peer.name]

    def received(self, peer: Peer, message: BaseModel) -> None:
        """A message that fits the schema and the sender's role."""
        assert self.driver is not None, "the link opens after the driver is there"
        if isinstance(message, Hello) and message.node != peer.name:
            self._audit.append("driver", "system", "refused", {"node": message.node, "connection": peer.name})
            peer.close("its token is for another node")
        elif isinstance(message, Hello | Beat | Diagnosis):
            self.driver.heard(peer.name, message)
        elif isinstance(message, Command):
            peer.send(self._obey(peer, message))

    def _obey(self, peer: Peer, command: Command) -> Answer:
        driver = self.driver
        assert driver is not None, "the link opens after the driver is there"
        if command.action == "status":
            status = status_of(driver) | {"requests": self._waiting(driver.clock.now())}
            return Answer(is_done=True, text=driver.state.phase.value, status=json.loads(json.dumps(status)))
        try:  # before anything is done
            self._audit.append(peer.name, peer.role, "asked", {"command": command.action, "node": command.node})
        except StorageError as error:
            return Answer(is_done=False, text=f"nothing was done, since it could not be put on record: {error}")
        now, action, number = driver.clock.now(), operators.Command(command.action), command.number
        if action is operators.Command.CONFIRM:
            self._requests, outcome = operators.confirm(self._requests, number or 0, peer.name, peer.role, now)
        else:
            target, node = command.node or "", driver.state.nodes.get(command.node or "")
            is_evicted = node is not None and node.status == NodeStatus.EVICTED
            self._requests, outcome = operators.submit(
                self._requests, action, target, peer.name, peer.role, now, self._rule, is_evicted=is_evicted
            )
        answer = self._carried_out(outcome, command.rewind)
        details: dict[str, Any] = {"node": command.node} if command.rewind is None else {"rewind": list(command.rewind)}
        if isinstance(outcome, operators.Wait):
            details[_NUMBER] = outcome.request.number
        elif number is not None:
            details = {"node": outcome.target if isinstance(outcome, operators.Execute) else None, _NUMBER: number}
        try:
            self._audit.append(peer.name, peer.role, action, {**details, "done": answer.is_done, "answer": answer.text})
        except (StorageError, UsageError) as error:  # it is done, or not, whatever the disk takes
            return answer.model_copy(update={"text": f"{answer.text}; the audit log could not take this outcome: {error}"})
        return answer

    def _waiting(self, now: float) -> list[dict[str, Any]]:
        """What waits for a second admin; seconds that are left."""
        waiting = operators.expire(self._requests, now).waiting
        return [
            {"number": one.number, "command": one.command.value, "node": one.target, "by": one.by, "left_s": one.expires - now}
            for one in waiting
        ]

    def _carried_out(self, outcome: operators.Outcome, rewind: Rewind | None) -> Answer:
        driver = self.driver
        assert driver is not None, "the link opens after the driver is there"
        match outcome:
            case operators.Refuse():
                return Answer(is_done=False, text=outcome.why)
            case operators.Wait():
                number = outcome.request.number
                return Answer(is_done=True, text=f"another admin must confirm it: megascale job confirm RUN {number}")
            case operators.Execute():
                by = f"{outcome.by} and {outcome.confirmed_by}" if outcome.confirmed_by else outcome.by
                node = outcome.target or None
                if node is not None and node not in driver.state.nodes:
                    return Answer(is_done=False, text=f"no node {node}; there are {', '.join(sorted(driver.state.nodes))}")
                values = {
                    "at_s": driver.clock.now(),
                    "action": outcome.command.value,
                    "node": node,
                    "by": by,
                    "step": driver.step,
                    "rewind": rewind,
                }
                if outcome.command is operators.Command.REWIND and (rewind is None or rewind[1] >= rewind[2]):
                    return Answer(
                        is_done=False, text="expected a step and a range of samples, such as --to-step 100 --skip-samples 3200:3840"
                    )
                if rewind is not None and (problem := self._cannot_rewind(rewind[0])):
                    return Answer(is_done=False, text=problem)
                before = driver.state
                try:
                    driver.record(Ordered.model_validate({**values, "at_s": driver.clock.now()}))
                except JournalError as error:
                    return Answer(is_done=False, text=str(error))
                done = driver.state != before
                return Answer(is_done=done, text=f"{outcome.command} {outcome.target}: {'done' if done else 'changes nothing now'}")

    def _cannot_rewind(self, step: int) -> str:
        """Why the job cannot go back to a step; empty when it can. Without such a check it would be given up, and end."""
        try:
            steps = self._saved()
        except OSError as error:
            return f"nothing was done: the checkpoints cannot be listed ({error})"
        if any(saved <= step for saved in steps):
            return ""
        there = ", ".join(map(str, steps)) or "none"
        return f"no checkpoint of step {step} or before is on storage, only of {there}; choose a later --to-step"


def _used_numbers(audit: Path) -> frozenset[int]:
    """Numbers of all requests in the log of a job; of a log that is damaged, those before the damage."""
    found: set[int] = set()
    with contextlib.suppress(UsageError):
        for record in records(audit):
            if isinstance(number := record.details.get(_NUMBER), int):
                found.add(number)
    return frozenset(found)


def permits(role: Role, message: BaseModel) -> bool:
    """Nodes speak as nodes, people give commands; which ones is for `operators.py` to say."""
    return isinstance(message, Command) != (role == Role.NODE)


class _Signals:
    """SIGTERM and Ctrl-C: the first stops the job with a save, a second has the driver leave; with ``leaves`` SIGTERM does that at once."""

    def __init__(self, driver: Driver, audit: AuditLog, say: Callable[[str], None], *, leaves: bool):
        self._driver, self._audit, self._say = driver, audit, say
        self._asked, self._is_leaving = 0, False
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGTERM, self._leave if leaves else self._stop)
        self._loop.add_signal_handler(signal.SIGINT, self._stop)

    def are_urgent(self) -> bool:
        """Whether the driver is to leave now."""
        return self._asked > 1 or self._is_leaving

    def _leave(self) -> None:
        self._is_leaving = True
        self._put_on_record("leave")

    def _stop(self) -> None:
        self._asked += 1
        self._order_stop()

    def _order_stop(self) -> None:
        driver = self._driver
        try:
            driver.record(Ordered(at_s=driver.clock.now(), action="stop", by="signal", step=driver.step))
        except JournalError as error:
            self._say(f"not stopped yet: {error}")
            self._loop.call_later(_AGAIN_S, self._order_stop)
            return
        self._put_on_record("stop")

    def _put_on_record(self, action: str) -> None:
        try:
            self._audit.append("signal", "system", action, {})
        except StorageError as error:
            self._say(f"{action}: done; the audit log could not take it: {error}")


async def drive(
    folder: Path,
    security: Security,
    listen: tuple[str, int],
    make_driver: Callable[[Callable[[str, Desired], None]], Driver],
    rule: operators.Rule,
    say: Callable[[str], None],
    *,
    saved: Callable[[], list[int]],
    leaves: bool = False,
) -> Driver:
    """Drive the job to its end; SIGTERM and Ctrl-C stop it with a save, after a second one the driver leaves at once.

    The caller holds the job's folder (`held`). ``saved``: steps of the checkpoints on storage, which a rewind needs. ``leaves``: SIGTERM
    says that another driver will follow, so this one leaves and the job goes on. Raises OSError when the address is taken.
    """
    audit = AuditLog(folder / "audit.jsonl")
    control = Control(audit, rule, saved)
    driver = control.driver = make_driver(control.send)

    def note(what: str, details: dict[str, Any]) -> None:
        audit.append("link", "system", what, details)

    server = LinkServer(
        security,
        security.job,
        TypeAdapter(FromNode),
        control,
        audit=note,
        permits=permits,
    )
    port = await server.start(*listen)
    replace_file(folder / DRIVER_FILE, json.dumps({"host": listen[0], "port": port, "pid": os.getpid()}).encode())
    signals = _Signals(driver, audit, say, leaves=leaves)
    try:
        await _tick(driver, signals.are_urgent, say)
    finally:
        await server.close()
        (folder / DRIVER_FILE).unlink(missing_ok=True)
    return driver


async def _tick(driver: Driver, is_hurried: Callable[[], bool], say: Callable[[str], None]) -> None:
    ended_at: float | None = None
    progress = (0, time.monotonic())
    while not is_hurried():
        driver.tick()
        now = time.monotonic()
        if driver.state.phase in ENDS:
            ended_at = ended_at or now
            if driver.is_over or now > ended_at + LEAVE_S:
                driver.supply.release()
                return
        elif driver.state.phase == Phase.RUNNING and driver.step != progress[0] and now > progress[1] + _PROGRESS_S:
            progress = (driver.step, now)
            say(f"step {driver.step} of {driver.total_steps}")
        await asyncio.sleep(TICK_S)


@contextlib.contextmanager
def held(folder: Path) -> Any:
    """The run folder for this driver alone. Raises RunFolderError when there is another."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / DRIVER_LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise RunFolderError(f"another driver drives {folder}; see `megascale job status {folder}`") from error
    try:
        yield
    finally:
        lock.release()


def address_of(folder: Path) -> tuple[str, int]:
    """Where the driver of a job's folder listens. Raises RunFolderError when there is none."""
    found = _driver_file(folder)
    return str(found["host"]), int(found["port"])


def driver_pid(folder: Path) -> int:
    """The process that drives a job's folder. Raises RunFolderError when there is none."""
    return int(_driver_file(folder)["pid"])


def _driver_file(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / DRIVER_FILE).read_text())
        return {name: found[name] for name in ("host", "port", "pid")}
    except (OSError, ValueError, KeyError) as error:
        raise RunFolderError(
            f"no driver has {folder.parent}; start one with `megascale drive EXPERIMENT --run-folder {folder.parent}`"
        ) from error

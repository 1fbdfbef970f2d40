"""Driver and executor as processes: what a signal means, and what a launch that has ended is to the next driver."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from random import Random
from typing import Any

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from megascale_jax.cli.job import app
from megascale_jax.cluster.anomaly import Watcher
from megascale_jax.cluster.driver import Driver
from megascale_jax.cluster.driver_process import Control, drive, permits
from megascale_jax.cluster.executor_process import EXIT_LEFT
from megascale_jax.cluster.job import ended_under, keep_launch, open_journal, secure, token_file
from megascale_jax.cluster.journal import JournalClock
from megascale_jax.cluster.lifecycle import NodeStatus, Phase
from megascale_jax.cluster.limits import Limits
from megascale_jax.cluster.link import operators
from megascale_jax.cluster.link.audit import AuditLog
from megascale_jax.cluster.link.operators import Rule
from megascale_jax.cluster.link.security import Security, make_token
from megascale_jax.cluster.link.server import LinkServer
from megascale_jax.cluster.link.tokens import Role
from megascale_jax.cluster.messages import Answer, Command, FromNode, Hello
from megascale_jax.cluster.state import Ordered, Shape
from megascale_jax.config.cluster import ClusterConfig
from megascale_jax.errors import StorageError, UsageError

CONFIG = ClusterConfig()
SHAPES = (Shape(num_nodes=1),)


class Nobody:
    """A backend whose nodes never come."""

    def ensure(self, name: str) -> None:
        pass

    def release(self, name: str) -> None:
        pass

    def taken_back(self) -> dict[str, str]:
        return {}

    def facts(self) -> dict[str, str]:
        return {}


@pytest.mark.parametrize(("leaves", "phase", "word"), [(False, Phase.STOPPED, "stop"), (True, Phase.REPLACING, "leave")])
def test_sigterm_stops_the_job_unless_another_driver_follows(tmp_path, leaves, phase, word) -> None:
    security = Security.load(secure(tmp_path, ("node-0",)), role="driver")
    with open_journal(tmp_path, SHAPES, CONFIG) as journal:

        def make(send) -> Driver:
            watcher, clock = Watcher(CONFIG, Limits.of(CONFIG, None)), JournalClock(0.0)
            return Driver(journal, CONFIG, SHAPES, ("node-0",), 10, Nobody(), watcher, clock, send, lambda line: None)

        async def story() -> Driver:
            asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), signal.SIGTERM)
            return await drive(tmp_path, security, ("127.0.0.1", 0), make, Rule(), lambda line: None, saved=list, leaves=leaves)

        driver = asyncio.run(asyncio.wait_for(story(), 20))
    assert driver.state.phase == phase
    assert word in [json.loads(line).get("action") for line in (tmp_path / "audit.jsonl").read_text().splitlines()]


def test_a_second_admin_who_cannot_read_the_run_folder_gives_orders(tmp_path) -> None:
    """As docs/runbook.md says: four files of the certificates, a token, and where the driver listens."""
    place = secure(tmp_path / "run", ("node-0",))
    own = Security.load(place, role="driver")
    ada = tmp_path / "ada"
    ada.mkdir(mode=0o700)
    for name in ("ca.pem", "client.pem", "client.key", "job"):
        shutil.copy(place / name, ada / name)
    make_token(own, "ada", Role.ADMIN, days=1, path=ada / "ada.token")
    nowhere = tmp_path / "not-to-be-read"

    def ask(port: int, *words: str) -> Any:
        options = ["--driver", f"127.0.0.1:{port}", "--security", str(ada)]
        return CliRunner().invoke(app, [words[0], str(nowhere), *words[1:], *options])

    async def story() -> None:
        control = Control(AuditLog(tmp_path / "audit.jsonl"), Rule(), list)
        with open_journal(tmp_path, SHAPES, CONFIG) as journal:
            watcher, clock = Watcher(CONFIG, Limits.of(CONFIG, None)), JournalClock(0.0)
            control.driver = Driver(journal, CONFIG, SHAPES, ("node-0",), 10, Nobody(), watcher, clock, control.send, lambda line: None)
            hello = Hello(node="node-0", incarnation="a", address="10.0.0.1", ports=(20000,), software={})
            control.driver.heard("node-0", hello)
            server = LinkServer(own, own.job, TypeAdapter(FromNode), control, audit=lambda *_: None, permits=permits)
            port = await server.start("127.0.0.1", 0)
            number = number_of(Operator(control, "owner").ask("evict", node="node-0"))
            status, shown = [await asyncio.to_thread(ask, port, "status", *words) for words in (["--json"], [])]
            confirmed = await asyncio.to_thread(ask, port, "confirm", str(number))
            after = await asyncio.to_thread(ask, port, "status", "--json")
            await server.close()
        assert json.loads(status.output)["nodes"]["node-0"]["status"] == "assigned"
        assert "waiting for another admin: evict node-0, asked for by owner" in shown.output
        assert f"job confirm RUN {number}" in shown.output and json.loads(after.output)["requests"] == []
        assert confirmed.exit_code == 0 and "evict node-0: done" in confirmed.output
        assert audited(tmp_path, "confirm")[0]["number"] == number

    asyncio.run(asyncio.wait_for(story(), 20))
    result = CliRunner().invoke(app, ["stop", str(nowhere), "--driver", "127.0.0.1:1"])
    assert isinstance(result.exception, UsageError) and "--driver without --security" in str(result.exception)


class Operator:
    """The other end of a connection, as `Control` sees it."""

    def __init__(self, control: Control, name: str, role: Role = Role.ADMIN):
        self._control, self.name, self.role = control, name, role
        self.answers: list[Answer] = []

    def send(self, answer: Answer) -> None:
        self.answers.append(answer)

    def ask(self, action: str, **values: object) -> Answer:
        self._control.received(self, Command.model_validate({"action": action, **values}))
        return self.answers[-1]


@pytest.fixture
def opened(tmp_path):
    """Makes a `Control` of one job with two nodes, again for each new start of its driver."""
    with open_journal(tmp_path, SHAPES, CONFIG) as journal:

        def start() -> Control:
            control = Control(AuditLog(tmp_path / "audit.jsonl"), Rule(), list)
            watcher, clock = Watcher(CONFIG, Limits.of(CONFIG, None)), JournalClock(0.0)
            nodes = ("node-0", "node-1")
            control.driver = Driver(journal, CONFIG, SHAPES, nodes, 10, Nobody(), watcher, clock, control.send, lambda line: None)
            for node in nodes:
                hello = Hello(node=node, incarnation="a", address="10.0.0.1", ports=(20000,), software={})
                control.driver.heard(node, hello)
            return control

        yield start


def audited(folder, action):
    return [found["details"] for found in map(json.loads, (folder / "audit.jsonl").read_text().splitlines()) if found["action"] == action]


def number_of(answer):
    return int(answer.text.split()[-1])


def test_a_confirmation_of_before_a_new_start_meets_no_other_eviction(tmp_path, opened, monkeypatch) -> None:
    monkeypatch.setattr(operators.secrets, "SystemRandom", lambda: Random(1))
    old = number_of(Operator(opened(), "ada").ask("evict", node="node-0"))
    control = opened()
    new = number_of(Operator(control, "ada").ask("evict", node="node-1"))
    assert new != old
    assert f"no request {old} waits" in Operator(control, "bob").ask("confirm", number=old).text
    assert {node.status for node in control.driver.state.nodes.values()}.isdisjoint({NodeStatus.EVICTED})
    assert Operator(control, "bob").ask("confirm", number=new).is_done
    assert [(details["node"], details["number"]) for details in audited(tmp_path, "evict")] == [("node-0", old), ("node-1", new)]
    assert [(details["node"], details["number"]) for details in audited(tmp_path, "confirm")] == [(None, old), ("node-1", new)]


def test_an_evicted_node_is_taken_back_by_an_admin_only(opened) -> None:
    control = opened()
    ada, bob, eve = Operator(control, "ada"), Operator(control, "bob"), Operator(control, "eve", Role.OPERATE)
    assert bob.ask("confirm", number=number_of(ada.ask("evict", node="node-1"))).is_done
    assert "needs the role admin" in eve.ask("uncordon", node="node-1").text
    assert control.driver.state.nodes["node-1"].status == NodeStatus.EVICTED
    assert ada.ask("uncordon", node="node-1").is_done
    assert eve.ask("cordon", node="node-1").is_done and eve.ask("uncordon", node="node-1").is_done


def test_an_order_that_was_carried_out_says_so_though_the_log_cannot_take_it(tmp_path, opened, monkeypatch) -> None:
    control, append = opened(), AuditLog.append

    def full(log, actor, role, action, details):
        if action != "asked":
            raise StorageError("audit log is full")
        return append(log, actor, role, action, details)

    monkeypatch.setattr(AuditLog, "append", full)
    answer = Operator(control, "ada").ask("cordon", node="node-1")
    assert answer.is_done and answer.text == "cordon node-1: done; the audit log could not take this outcome: audit log is full"
    assert control.driver.state.nodes["node-1"].status == NodeStatus.CORDONED


def test_what_has_ended_under_a_launch_is_not_begun_anew_under_it(tmp_path) -> None:
    assert ended_under(tmp_path, "launch-1", SHAPES, CONFIG) is None
    with open_journal(tmp_path, SHAPES, CONFIG) as journal:
        keep_launch(journal, "launch-1")
    assert ended_under(tmp_path, "launch-1", SHAPES, CONFIG) is None, "it is under way"
    with open_journal(tmp_path, SHAPES, CONFIG) as journal:
        journal.append(Ordered(at_s=1.0, action="stop", by="ada", step=0))
    ended = ended_under(tmp_path, "launch-1", SHAPES, CONFIG)
    assert ended is not None
    assert ended.phase == Phase.STOPPED
    assert ended_under(tmp_path, "launch-2", SHAPES, CONFIG) is None, "applied anew"
    assert ended_under(tmp_path, "", SHAPES, CONFIG) is None, "nothing starts it again by itself"


def test_an_executor_that_is_told_to_end_has_not_finished(tmp_path) -> None:
    """Exit code 0 would complete its index of a Kubernetes Job, and no other pod would be made."""
    place = secure(tmp_path, ("node-0",))
    token = token_file(place, "node-0").rename(tmp_path / "token")
    options = ["--driver", "127.0.0.1:1", "--security", str(place), "--token", str(token), "--node", "node-0", "--machine", "machine-1"]
    command = [sys.executable, "-m", "megascale_jax.cluster.executor_process", *options, "--folder", str(tmp_path / "node"), "--", "true"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as executor:
        assert executor.stderr is not None
        try:
            assert any("is tried again" in line for line in executor.stderr or ())
            executor.terminate()
            assert executor.wait(60) == EXIT_LEFT
        finally:
            executor.kill()

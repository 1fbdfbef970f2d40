"""Driver and executor as processes: what a signal means, and what a launch that has ended is to the next driver."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

from megascale_jax.cluster.anomaly import Watcher
from megascale_jax.cluster.driver import Driver
from megascale_jax.cluster.driver_process import drive
from megascale_jax.cluster.executor_process import EXIT_LEFT
from megascale_jax.cluster.job import ended_under, keep_launch, open_journal, secure, token_file
from megascale_jax.cluster.journal import JournalClock
from megascale_jax.cluster.lifecycle import Phase
from megascale_jax.cluster.limits import Limits
from megascale_jax.cluster.link.operators import Rule
from megascale_jax.cluster.link.security import Security
from megascale_jax.cluster.state import Ordered, Shape
from megascale_jax.config.cluster import ClusterConfig

CONFIG = ClusterConfig()
SHAPES = (Shape(num_nodes=1),)


class Nobody:
    """A backend whose nodes never come."""

    def ensure(self, name: str) -> None:
        pass

    def release(self, name: str) -> None:
        pass


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
        assert "is tried again" in executor.stderr.readline()
        executor.terminate()
        assert executor.wait(60) == EXIT_LEFT

"""Processes that live and do nothing."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megascale_jax.cluster import freezer
from megascale_jax.errors import UsageError

COUNTS = "import sys\nwhile True: print(1, flush=True)"


@pytest.fixture
def counter():
    if freezer.freezer_root() is None:
        pytest.skip("processes can only be frozen where this user may make groups of cgroup v2")
    with subprocess.Popen([sys.executable, "-c", COUNTS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(2)
        os.set_blocking(process.stdout.fileno(), False)
        yield process
        process.kill()


def drained(process) -> int:
    return sum(len(piece) for piece in iter(lambda: process.stdout.read(1 << 20), None))


def test_a_frozen_process_does_nothing_is_not_stopped_and_can_be_killed(counter):
    with freezer.frozen(counter.pid):
        time.sleep(0.2)
        drained(counter)
        time.sleep(0.2)
        assert drained(counter) == 0
        assert psutil.Process(counter.pid).status() != psutil.STATUS_STOPPED
        counter.kill()
        assert counter.wait(5.0) == -signal.SIGKILL


def test_a_process_goes_on_where_it_was_frozen_or_slowed(counter):
    for hold in (freezer.frozen(counter.pid), freezer.slowed(counter.pid, 0.3)):
        with hold:
            time.sleep(0.1)
        drained(counter)
        limit = time.monotonic() + 10.0
        while not drained(counter):
            assert time.monotonic() < limit
            time.sleep(0.01)


def test_where_there_is_no_freezer_it_is_said(monkeypatch):
    monkeypatch.setattr(freezer, "freezer_root", lambda: None)
    with pytest.raises(UsageError, match="run the drill as root"), freezer.frozen(os.getpid()):
        pass

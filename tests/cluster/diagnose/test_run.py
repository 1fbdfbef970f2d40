"""Probes that hang, crash, lie or leave early: each check gets an outcome, and those behind it still run."""

import json
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from megascale_jax.cluster.diagnose import checks, run
from megascale_jax.cluster.diagnose.checks import Number, Outcome, outcome
from megascale_jax.cluster.diagnose.request import Options, PairTask
from megascale_jax.errors import UsageError


@pytest.fixture
def probe(tmp_path):
    """A command that answers the checks named in its code by ``DEEDS``, all others with a pass."""

    def make(**deeds):
        file = tmp_path / "probe.py"
        file.write_text(
            textwrap.dedent(
                """
                import argparse, faulthandler, json, os, signal, subprocess, sys, time
                parser = argparse.ArgumentParser()
                for name in ("--options", "--limit-s"):
                    parser.add_argument(name)
                parser.add_argument("--check", action="append")
                parser.add_argument("--json", action="store_true")
                given = parser.parse_args()
                def hang_inside():
                    faulthandler.dump_traceback_later(0.05, exit=True)
                    time.sleep(60)
                def leave_a_child():
                    child = subprocess.Popen(["sleep", "60"])
                    open(sys.argv[0] + ".child", "w").write(str(child.pid))
                    time.sleep(60)
                deeds = {
                    "hang": lambda: time.sleep(60), "kill": lambda: os.kill(os.getpid(), signal.SIGSEGV), "raise": lambda: 1 / 0,
                    "leave": lambda: os._exit(0),
                    "lie": lambda: print('{"check": "other", "status": "pass"}', flush=True) or time.sleep(60),
                    "flood": lambda: print("x" * (2 << 20), flush=True), "inside": hang_inside, "child": leave_a_child,
                }
                for name in given.check:
                    deeds.get(json.loads(sys.argv[0] and open(sys.argv[0] + ".deeds").read()).get(name), lambda: None)()
                    print(json.dumps({"check": name, "status": "pass"}), flush=True)
                """
            )
        )
        (tmp_path / "probe.py.deeds").write_text(json.dumps(deeds))
        return [sys.executable, str(file)]

    return make


@pytest.mark.parametrize(
    ("deed", "status", "reason"),
    [
        ("hang", "fail", "did not end within 3 s"),
        ("inside", "fail", "it hung in hang_inside (probe.py"),
        ("kill", "fail", "was ended by SIGSEGV"),
        ("raise", "not_run", "ZeroDivisionError"),
        ("leave", "not_run", "ended with code 0"),
        ("lie", "fail", "did not end within"),
        ("flood", "fail", "did not end within"),
    ],
)
def test_a_probe_that_fails_costs_one_check(probe, monkeypatch, deed, status, reason):
    monkeypatch.setattr(run, "GRACE_S", 0.4)
    found = list(run.run_checks(["memory", "clock", "disk"], Options(), limit_s=3, command=probe(clock=deed)))
    assert [one.check for one in found] == ["memory", "clock", "disk"]
    assert [one.status for one in found] == ["pass", status, "pass"] and reason in found[1].reason


def test_what_a_hanging_probe_started_ends_with_it(probe, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "GRACE_S", 1.0)
    list(run.run_checks(["clock"], Options(), limit_s=3, command=probe(clock="child")))
    child = int((tmp_path / "probe.py.child").read_text())
    limit = time.monotonic() + 5.0
    while (state := _state(child)) not in ("gone", "Z") and time.monotonic() < limit:  # a kill takes effect when the kernel has time
        time.sleep(0.01)
    if state not in ("gone", "Z"):
        os.kill(child, signal.SIGKILL)
    assert state in ("gone", "Z")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def test_a_pair_that_hangs_still_says_who_met_whom(probe, monkeypatch):
    monkeypatch.setattr(run, "GRACE_S", 0.1)
    task = PairTask(round=2, index=0, peer="node-7", coordinator="127.0.0.1:1")
    (found,) = run.run_checks(["pair"], Options(pair=task), limit_s=0.2, command=probe(pair="hang"))
    assert found.status == "fail" and found.facts == {"round": "2", "peer": "node-7"}


def test_the_real_probe_runs_checks_and_keeps_to_its_arguments(tmp_path):
    options = Options(folders=(str(tmp_path),), clock_offset_s=0.25)
    found = {one.check: one for one in run.run_checks(["disk", "clock", "software"], options, limit_s=60)}
    assert found["disk"].status == "pass" and found["disk"].numbers[0].part == str(tmp_path)
    assert found["clock"].numbers[0] == Number(name="offset", value=250.0, unit="ms")
    (found,) = run.run_checks(["pair"], Options())
    assert found.status == "not_run" and "needs a pair" in found.reason


def test_an_outcome_says_why():
    for status in ("fail", "warn", "not_run"):
        with pytest.raises(ValidationError, match="without a reason"):
            Outcome(check="disk", status=status)
    with pytest.raises(ValidationError):
        Outcome.model_validate_json('{"check": "disk", "status": "fine"}')
    with pytest.raises(ValidationError):
        Outcome.model_validate_json('{"check": "disk", "status": "pass", "more": 1}')


def test_the_worst_problem_decides_and_only_its_kind_is_told():
    problems = [("warn", "a"), ("fail", "b"), ("not_run", "c"), ("fail", "b")]
    assert outcome("disk", problems) == Outcome(check="disk", status="fail", reason="b")
    assert outcome("disk", problems[2:3]).status == "not_run" and outcome("disk").status == "pass"
    assert len(outcome("disk", [("fail", "x" * 9999)]).reason) == checks.LONGEST_REASON


def test_groups_are_parsed_in_order():
    assert checks.parse_groups("nic, host") == ("host", "nic")
    for text in ("", "host,disk"):
        with pytest.raises(UsageError, match="known: host, gpu"):
            checks.parse_groups(text)
    assert "pair" not in checks.alone()

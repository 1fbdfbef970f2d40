"""launch/slurm-drive.sbatch with a small script in place of `megascale`."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch/slurm-drive.sbatch"
# One line of a plan for each start: exit:CODE, kill (itself), or wait (for SIGTERM, then saves for a moment and ends well).
FAKE = """#!/usr/bin/env bash
echo "$*" >>starts
step=$(sed -n "$(wc -l <starts)p" plan)
case $step in
    kill) kill -KILL $$ ;;
    wait) trap 'sleep 0.3; echo saved >>starts; exit 0' TERM; touch ready; while true; do sleep 0.05; done ;;
    *) exit "${step#exit:}" ;;
esac
"""
ARGUMENTS = ("quickstart", "a b", "--fresh")
SHORT = {"SLURM_SUBMIT_DIR": "/nonexistent"}


@pytest.fixture
def launch(tmp_path, started):
    """Starts the script with a plan; it is ended after the test."""
    (tmp_path / "megascale").write_text(FAKE)
    (tmp_path / "megascale").chmod(0o755)
    (tmp_path / "sleep").write_text('#!/bin/sh\nexec /bin/sleep "$(echo "$1" | sed s/^1$/0.01/)"\n')
    (tmp_path / "sleep").chmod(0o755)

    def start(plan: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        (tmp_path / "plan").write_text(plan.replace(" ", "\n") + "\n")
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | SHORT | environment
        command = ["bash", str(SCRIPT), *(arguments or ARGUMENTS)]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    return start


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().splitlines()


@pytest.mark.parametrize("code", [0, 1, 2, 20, 21])
def test_a_driver_that_ends_by_itself_is_not_started_again(launch, tmp_path, code):
    assert launch(f"exit:{code}").wait(20) == code
    assert starts(tmp_path) == ["drive quickstart a b --fresh --backend slurm"]


def test_a_killed_driver_is_started_again_without_removing_its_run(launch, tmp_path):
    process = launch("kill kill exit:0")
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and "exit code 137" in out
    assert starts(tmp_path) == ["drive quickstart a b --fresh --backend slurm", *["drive quickstart a b --backend slurm"] * 2]


def test_a_job_that_was_queued_again_keeps_its_run(launch, tmp_path):
    assert launch("exit:0", SLURM_RESTART_COUNT="1").wait(20) == 0
    assert starts(tmp_path) == ["drive quickstart a b --backend slurm"]


def test_a_driver_that_is_always_killed_is_given_up(launch, tmp_path):
    assert launch("kill " * 10).wait(20) == 137
    assert len(starts(tmp_path)) == 6


def test_before_the_time_limit_the_run_saves_and_can_be_submitted_again(launch, tmp_path):
    process = launch("wait")
    limit = time.monotonic() + 20
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < limit
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 75 and "goes on" in out
    assert starts(tmp_path)[1:] == ["saved"], "it was waited for, and not started again"


def test_it_says_how_it_is_used(launch):
    process = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, timeout=20, check=False, env=os.environ | SHORT)
    assert process.returncode == 2 and "usage: sbatch" in process.stderr

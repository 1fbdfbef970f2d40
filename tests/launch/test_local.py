"""launch/local.sh with a small script in place of `megascale train`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LOCAL = Path(__file__).parents[2] / "launch/local.sh"

# Behaviour by first argument; every process leaves a file with its number, its environment and how it was ended.
FAKE = """
import os, signal, sys, time
from pathlib import Path
rank, folder, what = int(os.environ["MEGASCALE_PROCESS_ID"]), Path(sys.argv[1]), sys.argv[2]
def note(text):
    with (folder / f"{rank}.txt").open("a") as stream:
        stream.write(text + "\\n")
def save(number, frame):
    note(f"saved on {signal.Signals(number).name}")
    sys.exit(0)
if what == "stubborn" and rank != 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, save)
names = ("MEGASCALE_COORDINATOR", "MEGASCALE_NUM_PROCESSES", "MEGASCALE_PROCESS_ID")
note(" ".join([str(os.getpid()), *(os.environ[name] for name in names), *sys.argv[3:]]))
print(f"words of {rank}", flush=True)
if what in ("fail", "stubborn", "killed") and rank == 1:
    while len(list(folder.glob("*.txt"))) < int(os.environ["MEGASCALE_NUM_PROCESSES"]):
        time.sleep(0.01)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit("last words of 1") if what == "stubborn" else os._exit(7)
if what != "succeed":
    time.sleep(60)
"""


@pytest.fixture
def launch(tmp_path, started):
    """Starts local.sh; everything it left behind is ended after the test."""
    (tmp_path / "fake.py").write_text(FAKE, encoding="utf-8")
    (tmp_path / "notes").mkdir()
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {
        "MEGASCALE_COMMAND": f"{sys.executable} -S {tmp_path}/fake.py {tmp_path}/notes",
        "TMPDIR": str(tmp_path / "tmp"),
    }

    def start(*arguments: str) -> subprocess.Popen[str]:
        pipe, grace_s = subprocess.PIPE, "1" if "stubborn" in arguments else "15"
        own = environment | {"MEGASCALE_GRACE_S": grace_s}
        process = subprocess.Popen([str(LOCAL), *arguments], env=own, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        started.append(process)
        return process

    return start


def notes(tmp_path: Path, count: int) -> list[list[str]]:
    """Lines of every process's notes, in order of their numbers, once there are ``count``."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        files = [tmp_path / "notes" / f"{rank}.txt" for rank in range(count)]
        if all(file.exists() and file.stat().st_size for file in files):
            return [file.read_text(encoding="utf-8").splitlines() for file in files]
        time.sleep(0.01)
    raise AssertionError(f"not all of {count} processes started")


def alive(tmp_path: Path, count: int) -> list[int]:
    """Process ids that still run, after at most five seconds of waiting for their end."""
    pids = [int(lines[0].split()[0]) for lines in notes(tmp_path, count)]
    deadline = time.monotonic() + 5
    while (running := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return running


def test_each_process_gets_its_number_and_the_arguments_when_all_succeed(launch, tmp_path):
    process = launch("-n", "3", "succeed", "train.steps=3", "a b")
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "words of 0\n", "")
    first = [lines[0].split(maxsplit=1)[1] for lines in notes(tmp_path, 3)]
    address = first[0].split()[0]
    assert first == [f"{address} 3 {rank} train.steps=3 a b" for rank in range(3)]
    assert address.startswith("127.0.0.1:")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_others_are_ended_and_the_code_is_passed_on_when_one_fails(launch, tmp_path):
    process = launch("-n", "3", "fail")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 7
    assert "process 1 of 3 ended with code 7" in err
    assert [lines[1:] for lines in notes(tmp_path, 3)] == [["saved on SIGTERM"], [], ["saved on SIGTERM"]]
    assert alive(tmp_path, 3) == []


def test_others_are_killed_after_the_grace_period_when_they_do_not_end(launch, tmp_path):
    process = launch("-n", "3", "stubborn")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "last words of 1" in err.split("last lines of process 1")[1]
    assert alive(tmp_path, 3) == []


def test_a_killed_process_counts_as_failed(launch, tmp_path):
    process = launch("-n", "2", "killed")
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL
    assert alive(tmp_path, 2) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_reaches_every_process_once_and_all_may_finish(launch, tmp_path, number):
    process = launch("-n", "3", "wait")
    notes(tmp_path, 3)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert [lines[1:] for lines in notes(tmp_path, 3)] == [[f"saved on {number.name}"]] * 3
    assert alive(tmp_path, 3) == []


def test_no_process_is_left_when_the_launcher_is_killed(launch, tmp_path):
    process = launch("-n", "2", "wait")
    notes(tmp_path, 2)
    process.kill()
    process.wait(timeout=20)
    assert alive(tmp_path, 2) == []


@pytest.mark.parametrize("arguments", [[], ["quickstart"], ["-n", "0", "quickstart"], ["-n", "two", "quickstart"], ["-n", "2"], ["-x"]])
def test_usage_is_shown_and_nothing_started_when_arguments_are_wrong(launch, tmp_path, arguments):
    process = launch(*arguments)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (2, "")
    assert "usage: launch/local.sh -n PROCESSES EXPERIMENT" in err
    assert list((tmp_path / "notes").iterdir()) == []

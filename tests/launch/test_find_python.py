"""launch/find-python.sh with a PATH of small scripts in place of Pythons."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FIND = Path(__file__).parents[2] / "launch/find-python.sh"
MINOR = sys.version_info.minor


@pytest.fixture
def path(tmp_path) -> Path:
    """A folder for candidates, beside the few commands that the script itself needs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for command in ("bash", "dirname", "env"):
        (folder / command).symlink_to(shutil.which(command) or command)
    return folder


def candidate(folder: Path, name: str, line: str) -> None:
    file = folder / name
    file.write_text(f"#!/usr/bin/env bash\n{line}\n", encoding="utf-8")
    file.chmod(0o755)


def find(path: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    environment = {"PATH": str(path), "HOME": str(path), "MEGASCALE_FETCH": "no"} | variables
    done = subprocess.run([str(FIND), *arguments], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def real_python(folder: Path, name: str) -> None:
    candidate(folder, name, f'exec {sys.executable} "$@"')


def test_shim_that_fails_when_run_is_passed_over(path):
    candidate(path, "python3", 'echo "python3: command not found" >&2; exit 127')
    candidate(path, "python3.13", "exit 0")
    real_python(path, "python3.12")
    assert find(path) == (0, os.path.realpath(sys.executable), "") or find(path)[1] == sys.executable


def test_one_line_with_the_remedy_when_there_is_none(path):
    candidate(path, "python3", "exit 3")
    code, out, err = find(path)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "no Python from 3.12 to 3.14 found" in err
    assert "make PYTHON=" in err


def test_remedy_names_venv_when_a_python_lacks_it(path):
    candidate(path, "python3", "exit 4")
    code, _, err = find(path)
    assert (code, len(err.splitlines())) == (1, 1)
    assert "python3 has no venv or ensurepip module" in err
    assert "apt install python3-venv" in err


def test_given_python_is_judged_alone_when_it_is_unfit(path):
    real_python(path, "python3")
    candidate(path, "old", "exit 3")
    code, out, err = find(path, PYTHON=str(path / "old"))
    assert (code, out) == (1, "")
    assert f"PYTHON={path / 'old'} is no Python from 3.12 to 3.14" in err


def test_exact_version_is_found_and_another_is_not(path):
    real_python(path, "python3")
    assert find(path, str(MINOR))[0] == 0
    assert find(path, "99")[0] == 1


def test_python_of_pyenv_is_found_when_it_is_not_on_the_path(path, tmp_path):
    folder = tmp_path / ".pyenv/versions/3.12.9/bin"
    folder.mkdir(parents=True)
    real_python(folder, "python")
    assert find(path, HOME=str(tmp_path))[0] == 0


def test_uv_is_asked_when_nothing_else_is_there(path):
    candidate(path, "uv", f'[[ "$1 $2" == "python find" ]] && echo {sys.executable} || true')
    assert find(path, MEGASCALE_FETCH="yes")[0] == 0

import os
import subprocess
import sys
from pathlib import Path

from megascale_jax.config.load import list_experiments

POLICY = Path(__file__).with_name("skip_policy.py")

TESTS = """
import pytest
def test_runs(): pass
@pytest.mark.skip(reason="no such part here")
def test_skips(): pass
@pytest.mark.xfail(strict=True)
def test_expected(): assert False
"""


def run(folder: Path, allowed: str) -> tuple[int, list[str]]:
    """Exit code and lines of a pytest run of TESTS under the policy with that list."""
    (folder / "test_it.py").write_text(TESTS, encoding="utf-8")
    (folder / "allowed_skips.txt").write_text(allowed, encoding="utf-8")
    (folder / "policy_copy.py").write_text(POLICY.read_text(encoding="utf-8"), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-p", "policy_copy", "-p", "no:cacheprovider", "-q", "test_it.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip().splitlines()


def test_run_fails_and_names_the_skip_when_the_list_lacks_it(tmp_path):
    code, lines = run(tmp_path, "# nothing\n")
    assert code == 1
    assert "test_it.py::test_skips: Skipped: no such part here" in lines
    assert lines[-1].startswith("1 passed, 1 skipped, 1 xfailed")


def test_run_passes_when_the_list_has_the_skip(tmp_path):
    code, lines = run(tmp_path, "test_it.py::test_sk*   the part is optional\n")
    assert code == 0
    assert not any("does not allow" in line for line in lines)


def test_clone_has_the_files_that_ci_calls():
    root = list_experiments()["quickstart"].parents[2]
    assert all(os.access(root / file, os.X_OK) for file in (".ci/run", "launch/local.sh", "launch/find-python.sh", "launch/install.sh"))

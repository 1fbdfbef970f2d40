"""A placement on a real Slurm: its tree of switches, `megascale place --topology slurm`, `launch/slurm.sbatch --node-order`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascale_jax.cluster.node_order import read_names
from tests.real_slurm import ROOT, RealSlurm, missing_programs, real_slurm

LIMIT_S = 60.0
TREE = "SwitchName=s1 Nodes=n1,n3\nSwitchName=s2 Nodes=n2,n4\nSwitchName=top Switches=s1,s2\n"
MESH = ("parallel.pipe=2", "parallel.data=4", "parallel.tensor=2", "train.global_batch_size=16")
PROGRAM = """#!/bin/sh
echo "$MEGASCALE_PROCESS_ID $SLURMD_NODENAME $MEGASCALE_NUM_PROCESSES ${MEGASCALE_COORDINATOR%:*} $*" >>ranks
"""
pytestmark = pytest.mark.skipif(bool(missing_programs()), reason=f"Slurm is not installed: no {', '.join(missing_programs())}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with real_slurm(tmp_path_factory.mktemp("slurm"), 4, topology=TREE) as cluster:
        yield cluster


def submit(slurm: RealSlurm, folder: Path, *arguments: str) -> tuple[int, str]:
    """Run the batch script to its end with a program that only says which rank it has; its exit code and its log."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/megascale").write_text(PROGRAM)
    (folder / "bin/megascale").chmod(0o755)
    environment = dict(slurm.environment) | {"PATH": f"{folder / 'bin'}:{slurm.environment['PATH']}"}
    options = ["--wait", "--nodes=4", "--gpus-per-node=0", f"--output={folder / 'log'}", "--chdir", str(folder)]
    command = ["sbatch", *options, str(ROOT / "launch/slurm.sbatch"), *arguments]
    # from there, since the script takes the environment that lies where it is called from
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.returncode, done.stderr + (folder / "log").read_text()


def test_ranks_are_where_the_order_puts_them(slurm, tmp_path):
    (tmp_path / "nodes").write_text("n1\nn2\nn3\nn4\n")
    place = [sys.executable, "-m", "megascale_jax.cli.main", "place", "quickstart", *MESH, "--devices-per-node", "4"]
    place += ["--nodes", str(tmp_path / "nodes"), "--topology", "slurm", "--node-order", str(tmp_path / "order")]
    environment = dict(slurm.environment) | {"PYTHONPATH": str(ROOT), "PATH": f"{os.environ['PATH']}:{slurm.environment['PATH']}"}
    done = subprocess.run(place, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    order = read_names(tmp_path / "order", "")
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset(("n1", "n3")), frozenset(("n2", "n4"))}, "a stage under each switch"

    code, log = submit(slurm, tmp_path, "--node-order", str(tmp_path / "order"), "quickstart", "a b")
    assert code == 0, log
    ranks = sorted(line.split(maxsplit=4) for line in (tmp_path / "ranks").read_text().splitlines())
    assert [line[1] for line in ranks] == list(order) and [line[0] for line in ranks] == ["0", "1", "2", "3"]
    assert {tuple(line[2:]) for line in ranks} == {("4", order[0], "train quickstart a b")}


def test_an_order_of_other_nodes_is_refused(slurm, tmp_path):
    for names, words in (
        ("n1 n2 n3 n9", "got 4 nodes (n1 n2 n3 n9)"),
        ("n1 n2 n3", "got 3 nodes"),
        ("n1 n2 n3 n3", "each of the 4 of this job once"),
    ):
        (tmp_path / "order").write_text("# an order\n" + names.replace(" ", "\n") + "\n")
        code, log = submit(slurm, tmp_path, "--node-order", str(tmp_path / "order"), "quickstart")
        assert code == 2 and words in log
    code, log = submit(slurm, tmp_path, "--node-order", str(tmp_path / "missing"), "quickstart")
    assert code == 2 and "cannot be read" in log
    assert not (tmp_path / "ranks").exists()

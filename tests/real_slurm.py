"""A real Slurm of this machine: munge, a controller, and a daemon for each node, all below one folder and gone with it."""

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "sinfo", "squeue", "srun", "salloc", "sbatch", "scancel")
ROOT = Path(__file__).parents[1]
START_LIMIT_S, END_LIMIT_S, COMMAND_LIMIT_S = 40.0, 20.0, 30.0
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def missing_programs() -> list[str]:
    """What of Slurm and munge is not installed."""
    return [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]


@dataclass(frozen=True)
class RealSlurm:
    """A running cluster. ``environment``: what its commands need; ``started``: its daemons."""

    folder: Path
    names: tuple[str, ...]
    environment: Mapping[str, str]
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(self, *command: str | Path) -> None:
        """Start a daemon, which ends with the cluster."""
        with (self.folder / "daemons.log").open("ab") as log:
            self.started.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        self.start("slurmd", "-D", "-f", self.folder / "slurm.conf", "-N", name)

    def ask(self, *command: str) -> str:
        """Output of a Slurm command."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """State of each node, such as IDLE+DRAIN."""
        lines = self.ask("sinfo", "--noheader", "--Node", "--Format=NodeList:20,StateComplete:60").splitlines()
        return {line.split()[0]: line.split()[1].upper() for line in lines}

    def submit_drive(self, folder: Path, nodes: int, run: Path, *arguments: str, log: Path, **variables: str) -> tuple["RealSlurm", str]:
        """Submit `launch/slurm-drive.sbatch` with this Python's `megascale`; the cluster as the job's user sees it, and the job's number.

        ``variables`` come on top of an environment without any of XLA, JAX or this project.
        """
        program = folder / "bin" / "megascale"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m megascale_jax.cli.main "$@"\n')
        program.chmod(0o755)
        environment = {name: value for name, value in self.environment.items() if not name.startswith(("XLA", "JAX", "MEGASCALE"))}
        environment |= {"PATH": f"{program.parent}:{environment['PATH']}", "PYTHONPATH": str(ROOT), **variables}
        options = ["--parsable", "--gpus-per-node=0", f"--output={log}", f"--nodes={nodes}", "--chdir", str(folder)]
        script = [
            str(ROOT / "launch/slurm-drive.sbatch"),
            *arguments,
            f"cluster.slurm.node_folder={run}/cluster/nodes",
            "--run-folder",
            str(run),
        ]
        seen = replace(self, environment=environment)
        return seen, seen.ask("sbatch", *options, *script).strip()

    def daemon(self, name: str) -> int:
        """Process number of a node's slurmd."""
        return int((self.folder / f"slurmd-{name}.pid").read_text())


@contextmanager
def real_slurm(folder: Path, nodes: int, topology: str = "") -> Iterator[RealSlurm]:
    """Start everything, wait until the nodes are idle; afterwards end everything, jobs first. ``topology``: lines of a topology.conf."""
    names = tuple(f"n{number}" for number in range(1, nodes + 1))
    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    for name in [name for name in environment if name.startswith(("SLURM_JOB", "SLURM_STEP"))]:
        del environment[name]
    _configure(folder, names, topology)
    slurm = RealSlurm(folder, names, environment)
    try:
        options = [f"--{kind}-file={folder / f'munge.{kind}'}" for kind in ("key", "pid", "log", "seed")]
        slurm.start("munged", "--foreground", "--force", f"--socket={folder / 'munge.socket'}", *options)
        slurm.start("slurmctld", "-D", "-f", folder / "slurm.conf")
        for name in names:
            slurm.start_node(name)
        limit = time.monotonic() + START_LIMIT_S
        while set(_try_states(slurm).values()) != {"IDLE"}:
            assert time.monotonic() < limit, "\n".join(log.read_text(errors="replace")[-2000:] for log in folder.glob("*.log"))
            time.sleep(0.2)
        yield slurm
    finally:
        _end(slurm)


def _configure(folder: Path, names: Sequence[str], topology: str) -> None:
    host = socket.gethostname().partition(".")[0]
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": _port(),
        "SlurmUser": getpass.getuser(),
        "SlurmdUser": getpass.getuser(),
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder / 'munge.socket'}",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool" / "%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd-%n.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "slurmd-%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/linear",
        "ReturnToService": 2,
        "SlurmdParameters": "config_overrides",
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "SchedulerParameters": "sched_interval=1,batch_sched_delay=0",
        "KillWait": 10,
        "MinJobAge": 10,
    }
    if topology:
        settings["TopologyPlugin"] = "topology/tree"
        (folder / "topology.conf").write_text(topology)
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={_port()} CPUs=1" for name in names]
    lines.append(f"PartitionName=main Nodes={','.join(names)} Default=YES MaxTime=INFINITE State=UP")
    (folder / "state").mkdir()
    for name in names:
        (folder / "spool" / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")


def _try_states(slurm: RealSlurm) -> dict[str, str]:
    try:
        return slurm.states()
    except AssertionError:
        return {"": "unreachable"}


def _end(slurm: RealSlurm) -> None:
    with suppress(AssertionError, subprocess.TimeoutExpired):
        slurm.ask("scancel", "--user", getpass.getuser())
        limit = time.monotonic() + END_LIMIT_S
        while slurm.ask("squeue", "--noheader") and time.monotonic() < limit:
            time.sleep(0.2)
    for process in reversed(slurm.started):
        process.send_signal(signal.SIGTERM)
    for process in slurm.started:
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

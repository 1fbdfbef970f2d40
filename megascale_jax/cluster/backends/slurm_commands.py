"""What is asked of Slurm, as argument lists without a shell, and what it answers, as values.

Only commands and formats that every Slurm since 20.11 has. `Run` is the boundary: tests put a small Slurm of their own behind it.
"""

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale_jax.errors import BackendError

COMMAND_LIMIT_S = 20.0
REASON_MARK = "megascale: "
"""Begins the reason of a node that was drained by a driver: no other drain is ever lifted."""
_REASON_CHARACTERS = 200
_STEP_NAME = "megascale-"
_WHOLE_JOB = re.compile(
    r"SLURM_(GPUS|GPUS_PER_TASK|GPUS_PER_SOCKET|GPU_BIND|NTASKS_PER_GPU|CPUS_PER_GPU|CPUS_PER_TASK|TRES_PER_TASK|CPU_BIND.*|NTASKS.*|NPROCS"
    r"|NNODES|JOB_NUM_NODES|TASKS_PER_NODE|DISTRIBUTION|ARBITRARY.*|HOSTFILE|EXCLUSIVE|EXACT|CORE_SPEC|THREAD_SPEC|KILL_BAD_EXIT|NO_KILL)"
)
"""Variables of a batch script that `srun` takes for options: they count for the whole job or for a task of its script, not for a node."""

Run = Callable[[Sequence[str], float], str]
"""Runs a command for so many seconds at most; its output. Raises BackendError."""


@dataclass(frozen=True)
class Step:
    """One executor's job step. ``number``: JOB.STEP."""

    number: str
    node: str
    tag: str
    """Whose it is: executors of another job, or of another driver's address, have another one."""


@dataclass(frozen=True)
class NodeState:
    """One node as Slurm sees it."""

    states: frozenset[str]
    address: str
    reason: str

    @property
    def is_down(self) -> bool:
        """Whether Slurm runs nothing there any more; a node that drains goes on with what it has."""
        return bool(self.states & {"DOWN", "FAIL", "FUTURE", "POWERED_DOWN"})

    @property
    def is_drained(self) -> bool:
        """Whether it gets no new jobs."""
        return "DRAIN" in self.states

    def __str__(self) -> str:
        return f"{'+'.join(sorted(self.states))}{f': {self.reason}' if self.reason else ''}"


@dataclass(frozen=True)
class JobState:
    """A job, as far as it matters whether it can be queued again."""

    is_batch: bool
    may_requeue: bool
    restarts: int


class Slurm:
    """The commands. Every one of them raises BackendError when Slurm refuses, fails or does not answer in time."""

    def __init__(self, run: Run | None = None):
        self._run = run or run_command

    def host_names(self, node_list: str) -> tuple[str, ...]:
        """Names in a list such as ``n[1-3,7]``."""
        return tuple(self._run(["scontrol", "show", "hostnames", node_list], COMMAND_LIMIT_S).split())

    def steps(self, job: str) -> tuple[Step, ...]:
        """Steps of a job that are executors."""
        text = self._run(["squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i|%N|%j"], COMMAND_LIMIT_S)
        return parse_steps(text)

    def nodes(self, names: Sequence[str]) -> dict[str, NodeState]:
        """States by name."""
        return parse_nodes(self._run(["scontrol", "--oneliner", "show", "node", ",".join(names)], COMMAND_LIMIT_S))

    def topology(self) -> str:
        """Switches, a line each, as far as Slurm knows them."""
        return self._run(["scontrol", "--oneliner", "show", "topology"], COMMAND_LIMIT_S)

    def job(self, job: str) -> JobState:
        """A job."""
        return parse_job(self._run(["scontrol", "--oneliner", "show", "job", job], COMMAND_LIMIT_S))

    def drain(self, node: str, reason: str) -> None:
        """Give a node no further job."""
        self._run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={clean_reason(reason)}"], COMMAND_LIMIT_S)

    def resume(self, node: str) -> None:
        """Take a drained node back."""
        self._run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], COMMAND_LIMIT_S)

    def end(self, steps: Sequence[Step]) -> None:
        """SIGTERM to steps, and SIGKILL after the cluster's KillWait. None at all is no fault."""
        if steps:
            self._run(["scancel", "--quiet", *(step.number for step in steps)], COMMAND_LIMIT_S)

    def requeue(self, job: str) -> None:
        """End a batch job and queue it again."""
        self._run(["scontrol", "requeue", job], COMMAND_LIMIT_S)


def run_command(command: Sequence[str], limit_s: float) -> str:
    """The real thing. Raises BackendError with Slurm's own words."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False, env=plain_environment()
        )
    except FileNotFoundError as error:
        raise BackendError(f"{command[0]} is not installed here; the driver needs Slurm's commands on its node") from error
    except OSError as error:
        raise BackendError(f"{command[0]} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"{command[0]} gave no answer within {limit_s:.0f} s; is slurmctld up?") from error
    if done.returncode != 0:
        raise BackendError(last_words(done.stderr) or f"{' '.join(command[:2])} ended with code {done.returncode}")
    return done.stdout


def plain_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Without the user's own wishes for the output of Slurm's commands."""
    own = re.compile(r"(SQUEUE|SINFO|SCONTROL|SCANCEL)_.*|SLURM_TIME_FORMAT|SLURM_BITSTR_LEN|LANGUAGE|LC_.*")
    return {name: value for name, value in environment.items() if own.fullmatch(name) is None} | {"LC_ALL": "C"}


def step_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For ``srun`` of a step that has a whole node, whatever the batch script was submitted with."""
    return {name: value for name, value in environment.items() if _WHOLE_JOB.fullmatch(name) is None}


def step_command(job: str, node: str, tag: str, log: Path, command: Sequence[str]) -> list[str]:
    """``srun`` of an executor: one task with all of a node beside whatever else runs there, its output appended to ``log``."""
    options = [f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", f"--job-name={step_name(node, tag)}"]
    options += ["--kill-on-bad-exit=0", "--cpu-bind=none", "--mpi=none", "--input=none", "--export=ALL"]
    return ["srun", *options, f"--output={str(log).replace('%', '%%')}", "--open-mode=append", *command]


def step_name(node: str, tag: str) -> str:
    """By which the step of an executor is found again."""
    return f"{_STEP_NAME}{node}-{tag}"


def parse_steps(text: str) -> tuple[Step, ...]:
    """Executors among the lines ``JOB.STEP|NODE|NAME``; other steps and whatever else is printed are passed over.

    JOB is ``ARRAY_INDEX`` for a job of an array, ``FIRST+OFFSET`` for a part of a heterogeneous one.
    """
    found = []
    for line in text.splitlines():
        number, _, rest = line.strip().partition("|")
        node, _, name = rest.partition("|")
        tag = name.removeprefix(f"{_STEP_NAME}{node}-")
        if re.fullmatch(r"\d+([_+]\d+)?\.\d+", number, re.ASCII) and node and tag != name and re.fullmatch(r"[0-9a-f]+", tag):
            found.append(Step(number, node, tag))
    return tuple(found)


def parse_nodes(text: str) -> dict[str, NodeState]:
    """Nodes among the lines of ``scontrol --oneliner show node``. A star or another sign behind a state counts for nothing."""
    found = {}
    for line in text.splitlines():
        name, state, address = (re.search(rf"(?:^| ){field}=(\S+)", line) for field in ("NodeName", "State", "NodeAddr"))
        if name is None or state is None:
            continue
        reason = re.search(r" Reason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?\s*$", line)
        states = frozenset(one.rstrip("*~#!%$@^-") for one in state[1].upper().split("+"))
        said = reason[1] if reason and reason[1] != "(null)" else ""
        found[name[1]] = NodeState(states, address[1] if address else name[1], said)
    return found


def parse_job(text: str) -> JobState:
    """A job from its line of ``scontrol --oneliner show job``. Raises BackendError for something else."""
    fields = {name: re.search(rf" {name}=(\d+)(?: |$)", text) for name in ("BatchFlag", "Requeue", "Restarts")}
    values = {name: int(match[1]) for name, match in fields.items() if match is not None}
    if len(values) < len(fields):
        raise BackendError(f"scontrol show job says nothing of {', '.join(sorted(fields.keys() - values.keys()))}: {text[:200]!r}")
    return JobState(values["BatchFlag"] == 1, values["Requeue"] == 1, values["Restarts"])


def clean_reason(reason: str) -> str:
    """A reason as Slurm shows it: marked as ours, one line of printable ASCII, not too long."""
    words = "".join(character if " " <= character <= "~" and character not in "\"'`\\|=" else " " for character in reason).split()
    return (REASON_MARK + " ".join(words))[:_REASON_CHARACTERS].rstrip()


def last_words(text: str) -> str:
    """The last line that says something, without the program's name and the word error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^(\w+: )?(error: |fatal: )?", "", lines[-1]) if lines else ""

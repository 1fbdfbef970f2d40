"""A small Slurm behind the boundary `slurm_commands.Run`: nodes with states and reasons, steps of one job, refusals."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megascale_jax.errors import BackendError


class Child:
    """What the backend needs of an ``srun`` that it started."""

    def __init__(self) -> None:
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


@dataclass
class FakeSlurm:
    """Answers commands. ``refuses``: first words of commands, such as ``scontrol update``, that fail with that text."""

    names: tuple[str, ...] = ("n1", "n2", "n3")
    job: str = "7"
    job_line: str = "JobId=7 JobName=x Requeue=1 Restarts=0 BatchFlag=1 Reboot=0"
    states: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    steps: dict[str, tuple[str, str]] = field(default_factory=dict)
    children: dict[str, Child] = field(default_factory=dict)
    refuses: dict[str, str] = field(default_factory=dict)
    asked: list[list[str]] = field(default_factory=list)
    address: str = "127.0.0.1"
    now: float = 100.0

    def __call__(self, command: Sequence[str], limit_s: float) -> str:
        """`Run`."""
        assert limit_s > 0 and all(isinstance(word, str) for word in command)
        self.asked.append([*command])
        for words, error in self.refuses.items():
            if " ".join(command).startswith(words):
                raise BackendError(error)
        match [*command]:
            case ["scontrol", "show", "hostnames", _]:
                return "".join(f"{name}\n" for name in self.names)
            case ["scontrol", "--oneliner", "show", "node", names]:
                return "".join(self._node_line(name) for name in names.split(","))
            case ["scontrol", "--oneliner", "show", "job", self.job]:
                return self.job_line
            case ["scontrol", "update", name, "State=DRAIN", reason]:
                node = name.removeprefix("NodeName=")
                self.states[node], self.reasons[node] = "ALLOCATED+DRAIN", reason.removeprefix("Reason=")
            case ["scontrol", "update", name, "State=RESUME"]:
                self.states.pop(name.removeprefix("NodeName="))
                self.reasons.pop(name.removeprefix("NodeName="))
            case ["scontrol", "requeue", self.job]:
                pass
            case ["squeue", "--steps", "--noheader", jobs, "--format=%i|%N|%j"] if jobs == f"--jobs={self.job}":
                return "".join(f"{number}|{node}|{name}\n" for number, (node, name) in self.steps.items())
            case ["scancel", "--quiet", *numbers]:
                for number in numbers:
                    self.end(number, 0)
            case _:
                raise AssertionError(f"not a command that is known: {command}")
        return ""

    def launch(self, command: list[str], log: Path) -> Child:
        """``srun``: the step is there at once."""
        options = dict(re.findall(r"--([a-z-]+)=(\S+)", " ".join(command)))
        assert command[0] == "srun" and options["jobid"] == self.job and "--overlap" in command
        number = f"{self.job}.{len(self.children)}"
        self.steps[number] = (options["nodelist"], options["job-name"])
        self.children[number] = child = Child()
        return child

    def end(self, number: str, code: int) -> None:
        """A step ends, and its ``srun`` with it if that is there."""
        self.steps.pop(number, None)
        if (child := self.children.get(number)) is not None and child.returncode is None:
            child.returncode = code

    def kill_srun(self, number: str) -> None:
        """The step goes on without it."""
        self.children[number].returncode = -9

    def steps_of(self, node: str) -> list[str]:
        return [number for number, (where, _) in self.steps.items() if where == node]

    def _node_line(self, name: str) -> str:
        reason = f" Reason={self.reasons[name]} [root@2026-01-01T00:00:00]" if name in self.reasons else ""
        state = self.states.get(name, "ALLOCATED")
        return f"NodeName={name} Arch=x86_64 NodeAddr={self.address} OS=Linux 6.1 #1 SMP State={state} Weight=1{reason}\n"

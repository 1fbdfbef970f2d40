"""Nodes of a Slurm allocation: one executor on each, as a job step that outlives the driver.

The driver runs inside the allocation (`launch/slurm-drive.sbatch`, or `salloc`). A step is found again by its name, which says the node
and whose it is. Evicted nodes are drained, so that no other job gets them; spares are nodes of the same allocation.
"""

import hashlib
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from megascale_jax.cluster.backends.base import NODES_FOLDER, Start
from megascale_jax.cluster.backends.slurm_commands import Slurm, Step, last_words, step_command, step_environment
from megascale_jax.cluster.backends.slurm_worker import FRESH_S, Look, SlurmWorker
from megascale_jax.cluster.messages import is_name
from megascale_jax.cluster.ports import address_towards
from megascale_jax.config.cluster import SlurmConfig
from megascale_jax.errors import BackendError, UsageError

_STARTS_PER_S = 32
_SHORT_S, _LONGEST_WAIT_S = 30.0, 30.0
_END_LIMIT_S = 20.0
"""Longest wait at the end of a job for Slurm to end steps."""
STALE_S = 120.0
"""A node that was heard of and is missed for so long although Slurm says that its step runs has that step ended: after a power failure
shorter than SlurmdTimeout, Slurm goes on listing what ran before. An executor that hangs is ended so, too. One that was never heard of may
still be starting, and has `SlurmConfig.start_s`."""
_GONE_S = 60.0
"""After so long, KillWait and more, a step that was to end counts as gone, whatever is listed."""
_MISSED_AGAIN_S = 20.0
"""A node that was not asked for in so long was there meanwhile."""
_TAIL_BYTES = 4096


class SlurmEngine:
    """The nodes of the allocation that this process runs in: those that train, then the spares. Raises UsageError when it has too few."""

    launch = ""

    def __init__(
        self,
        nodes: int,
        spares: int,
        config: SlurmConfig,
        say: Callable[[str], None],
        environment: Mapping[str, str] = os.environ,
        slurm: Slurm | None = None,
    ):
        self._config, self._say, self._slurm = config, say, slurm or Slurm()
        self._job, listed = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NODELIST", "")
        wanted = nodes + spares
        if not re.fullmatch(r"\d+", self._job) or not listed:
            raise UsageError(
                "--backend slurm drives the nodes of an allocation, and this process is in none (no SLURM_JOB_ID); use "
                f"`sbatch --nodes {wanted} launch/slurm-drive.sbatch EXPERIMENT --nodes {nodes} --spares {spares}`, or the same command "
                f"within `salloc --no-kill --nodes {wanted}`"
            )
        try:
            found = self._slurm.host_names(listed)
        except BackendError as error:
            raise UsageError(f"the nodes of job {self._job} cannot be listed: {error}") from error
        if len(found) < wanted:
            raise UsageError(
                f"job {self._job} has {len(found)} nodes ({listed}), expected {nodes} that train and {spares} spares; ask Slurm for "
                f"{wanted} (sbatch --nodes {wanted}), or lower --nodes or --spares"
            )
        if odd := [name for name in found if not is_name(name)]:
            raise UsageError(
                f"Slurm's node name {odd[0]!r} is none for a job: expected letters, digits, '.', '_' and '-', at most 63 of them"
            )
        self.names = found[:wanted]
        if len(found) > wanted:
            say(f"{len(found) - wanted} nodes of job {self._job} are left unused; use them with --spares {len(found) - nodes}")
        self.host = self._host(found, environment.get("SLURMD_NODENAME", ""))

    def backend(self, start: Start) -> "SlurmBackend":
        """Job steps, and a thread that talks to Slurm."""
        worker = SlurmWorker(self._slurm, self._job, self.names, self._say)
        backend = SlurmBackend(self._job, start, self._config, worker)
        worker.start()
        return backend

    def start_over(self) -> str:
        """Have the job queued again, for other nodes, when that is wanted and allowed; what became of it."""
        if not self._config.requeue:
            return "Slurm is not asked for other nodes (cluster.slurm.requeue=false)"
        try:
            job = self._slurm.job(self._job)
            if not job.is_batch or not job.may_requeue:
                reason = "it is no batch job" if not job.is_batch else "it was submitted with --no-requeue"
                return f"job {self._job} is not queued again: {reason}; submit it again by hand"
            if job.restarts >= self._config.max_requeues:
                return (
                    f"job {self._job} was queued again {job.restarts} times already (cluster.slurm.max_requeues); submit it again by hand"
                )
            self._slurm.requeue(self._job)
        except BackendError as error:
            return f"job {self._job} cannot be queued again: {error}; submit it again by hand"
        return f"job {self._job} is queued again, for other nodes ({job.restarts + 1} of at most {self._config.max_requeues} times)"

    def _host(self, nodes: tuple[str, ...], own: str) -> str:
        """The address that was wished for, or the one from which another node of the allocation is reached."""
        if (wish := self._config.host) is not None:
            return address_of_host(wish)
        others = [name for name in nodes if name != own] or list(nodes)
        try:
            address = self._slurm.nodes(others[:1])[others[0]].address
            return address_towards((address, 1))
        except (BackendError, KeyError, OSError) as error:
            raise UsageError(
                f"no way from this node to {others[0]} was found ({error}); name the address or the interface at which the nodes reach "
                "this one with cluster.slurm.host"
            ) from error


class SlurmBackend:
    """Executors as steps of one job."""

    def __init__(
        self,
        job: str,
        start: Start,
        config: SlurmConfig,
        worker: SlurmWorker,
        launch: Callable[[list[str], Path], "subprocess.Popen[bytes]"] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._job, self._start, self._config, self._worker, self._clock = job, start, config, worker, clock
        self._launch = launch or launch_step
        self._folder = start.folder / NODES_FOLDER
        self._tag = tag_of(start)
        self._began_s = clock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._started_s: dict[str, float] = {}
        self._unsure_s: dict[str, float] = {}
        """When ``srun`` was killed by somebody: its step may run on, which only a later look can tell."""
        self._failures: dict[str, tuple[int, str]] = {}
        self._starts: list[float] = []
        self._ended_s: dict[str, float] = {}
        """When steps were to end."""
        self._missed_s: dict[str, tuple[float, float]] = {}
        """Since when a node is asked for, and when it last was."""
        self._heard: set[str] = set()
        """Nodes that were part of the job since their step was started."""
        self._end_s: float | None = None

    def ensure(self, name: str) -> None:
        """Start the step unless it runs, or may run. Raises BackendError when the node is down, or its last step failed."""
        is_alive, look, now = self._is_alive(name), self._look(), self._clock()
        if is_alive is None and look is None and self._worker.trouble and now > self._began_s + FRESH_S:
            raise BackendError(f"nothing is known of Slurm's nodes: {self._worker.trouble}")
        if look is not None and (state := look.nodes.get(name)) is not None and state.is_down:
            self._end(look.steps.get(name, ()))
            raise BackendError(f"Slurm says that it is {state}")
        if is_alive is not False:
            self._end_stale(name, look, now)
            return
        steps = () if look is None else look.steps.get(name, ())
        if foreign := [step for step in steps if step.tag != self._tag and not self._is_gone(step)]:
            self._end(foreign)
            return
        count, words = self._failures.get(name, (0, ""))
        if now < self._started_s.get(name, 0.0) + (0.0 if count == 0 else min(_LONGEST_WAIT_S, 2.0**count)):
            raise BackendError(f"its step ended: {words}; see {self._folder / name}/executor.log")
        self._starts = [at_s for at_s in self._starts if at_s > now - 1.0]
        if len(self._starts) < _STARTS_PER_S:
            self._starts.append(now)
            self._begin(name, now)

    def is_alive(self, name: str) -> bool | None:
        """From the end of ``srun``, else from the newest look; ``None`` while there is none that can tell.

        The driver asks it of nodes that are part of the job, so they are not missed.
        """
        self._heard.add(name)
        self._missed_s.pop(name, None)
        return self._is_alive(name)

    def remove(self, name: str, machine: str, reason: str) -> None:
        """Drain the node and end its step; that it cannot be drained is said by the worker."""
        self._worker.drain(name, reason)
        look = self._look()
        if look is not None:
            self._end(look.steps.get(name, ()))

    def restore(self, name: str, machine: str) -> None:
        """Resume the node if a driver has drained it."""
        self._worker.resume(name)

    def taken_back(self) -> Mapping[str, str]:
        """A node that others resume has to be taken back with `megascale job uncordon`."""
        return {}

    def switch(self, machine: str) -> None:
        """Nothing beyond what each node says of itself: Slurm tells it to the step (`switch_of`)."""

    def release(self, name: str) -> None:
        """End the step if it is still there. Waits for Slurm, some seconds in all, since the job is over."""
        if self._end_s is None:
            self._end_s = self._clock() + _END_LIMIT_S
            self._worker.wait(_END_LIMIT_S)
        look = self._look()
        if self._is_alive(name) is False or look is None or not look.steps.get(name):
            return
        self._end(look.steps[name])
        if not self._worker.wait(max(0.0, self._end_s - self._clock())):
            raise BackendError(f"Slurm did not end its step within {_END_LIMIT_S:.0f} s; the end of job {self._job} ends it")

    def facts(self) -> Mapping[str, str]:
        """The job, and where logs are."""
        where = self._config.node_folder or f"SLURM_TMPDIR, TMPDIR or /tmp of the node, there megascale-{os.geteuid()}-{self._job}"
        return {
            "Slurm job": self._job,
            "executor logs": f"{self._folder}/NODE/executor.log",
            "process logs": f"{where}/NODE/attempt-NUMBER",
        }

    def _is_alive(self, name: str) -> bool | None:
        look, child = self._look(), self._children.get(name)
        if look is not None and (state := look.nodes.get(name)) is not None and state.is_down:
            return False
        if child is not None:
            if child.poll() is None:
                return True
            self._note_end(name, child)
        if name not in self._unsure_s and name in self._started_s:
            return False  # srun ends after its step
        if look is None or look.began_s <= self._unsure_s.get(name, self._began_s):
            return None
        return any(step.tag == self._tag and not self._is_gone(step) for step in look.steps.get(name, ()))

    def _look(self) -> Look | None:
        look = self._worker.newest
        return look if look is not None and self._clock() < look.began_s + FRESH_S else None

    def _end(self, steps: Sequence[Step]) -> None:
        fresh = [step for step in steps if step.number not in self._ended_s]
        self._ended_s |= dict.fromkeys((step.number for step in fresh), self._clock())
        if fresh:
            self._worker.end(fresh)

    def _is_gone(self, step: Step) -> bool:
        return self._clock() > self._ended_s.get(step.number, math.inf) + _GONE_S

    def _end_stale(self, name: str, look: Look | None, now: float) -> None:
        """End the steps of a node that is missed, for as long as they are said to run."""
        first_s, last_s = self._missed_s.get(name, (now, now))
        first_s = now if now > last_s + _MISSED_AGAIN_S else max(first_s, self._started_s.get(name, first_s))
        self._missed_s[name] = (first_s, now)
        if look is not None and now > first_s + (STALE_S if name in self._heard else self._config.start_s):
            self._end(look.steps.get(name, ()))

    def _note_end(self, name: str, child: "subprocess.Popen[bytes]") -> None:
        """``srun`` has ended: it tells how its step did, unless it was killed itself."""
        now = self._clock()
        del self._children[name]
        if child.returncode < 0:
            self._unsure_s[name] = now
            return
        was_short = now < self._started_s[name] + _SHORT_S
        if child.returncode == 0 or not was_short:
            self._failures.pop(name, None)
        else:
            self._failures[name] = (self._failures.get(name, (0, ""))[0] + 1, _tail(self._folder / name / "srun.log"))

    def _begin(self, name: str, now: float) -> None:
        place = self._folder / name
        command = [sys.executable, "-m", "megascale_jax.cluster.executor_process", "--driver", _address(self._start.driver)]
        command += ["--security", str(self._start.security), "--node", name]
        if self._config.node_folder:
            command += ["--folder", f"{self._config.node_folder}/{name}"]
        command += ["--", *self._start.training]
        self._started_s[name] = now
        self._unsure_s.pop(name, None)
        self._heard.discard(name)
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._children[name] = self._launch(
                step_command(self._job, name, self._tag, place / "executor.log", command), place / "srun.log"
            )
        except OSError as error:
            self._failures[name] = (self._failures.get(name, (0, ""))[0] + 1, str(error))
            raise BackendError(f"its step cannot be started: {error}") from error


def launch_step(command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start ``srun`` in a session of its own, so that the step goes on without the driver. Raises OSError."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True, env=step_environment()
        )


def tag_of(start: Start) -> str:
    """Whose executors these are: of this job's certificates, looking for a driver at this address."""
    job = (start.security / "job").read_text().strip()
    return hashlib.sha256(f"{job} {_address(start.driver)}".encode()).hexdigest()[:8]


def address_of_host(wish: str) -> str:
    """An address of this machine by interface, host name or address. Raises UsageError."""
    interfaces = psutil.net_if_addrs()
    if wish in interfaces:
        found = [one.address for one in interfaces[wish] if one.family == socket.AF_INET]
        if found:
            return found[0]
    try:
        return str(socket.getaddrinfo(wish, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        names = ", ".join(sorted(interfaces))
        raise UsageError(f"cluster.slurm.host is {wish!r}; expected an address, a name, or an interface of this node ({names})") from error


def _address(driver: tuple[str, int]) -> str:
    return f"{driver[0]}:{driver[1]}"


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return last_words(file.read().decode(errors="replace"))
    except OSError:
        return ""

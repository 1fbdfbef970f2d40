"""The faults that a drill injects into a live job: signals to real processes, nodes without power, cut links, full disks, rotten bytes."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil

from megascale_jax.checkpoint.manifest import published_steps
from megascale_jax.cluster.asking import ask_driver
from megascale_jax.cluster.attempts import attempt_folder
from megascale_jax.cluster.executor_file import executor_process, has_started
from megascale_jax.cluster.freezer import freezer_root, frozen, slowed
from megascale_jax.cluster.injury import Fault, Injury, Job, Power, nothing
from megascale_jax.cluster.lifecycle import NodeStatus
from megascale_jax.cluster.slow_compile import CACHE, TIMES, SlowCompile
from megascale_jax.cluster.slow_node import SlowNode
from megascale_jax.cluster.small_disk import filled
from megascale_jax.errors import MegascaleError, UsageError
from megascale_jax.observe.marks import FLIP

SLOW_SHARE = 0.3
SLOW_S = 40.0
FULL_S = 20.0
DROPPED_S = 2.5
DELAYED_S = 2.0
WITHOUT_SPARES_S = 15.0
SHRUNK_STEPS = 3
TWO_CHECKPOINTS_S = 120.0
FLAPS_S = (3.0, 4.0, 3.0)
"""Without power, with it, without it again."""


def _pid(job: Job, status: Mapping[str, Any], node: str) -> int:
    """The node's training process. Raises UsageError unless that runs on this machine: elsewhere its number is another process's."""
    pid = status["nodes"][node]["processes"][0]["pid"]
    if has_started(_executor(job, node), pid):
        return pid
    raise UsageError(f"process {pid} of {node} does not run on this machine: a drill needs a job whose nodes are here")


def node_folder(job: Job, node: str) -> Path:
    """Where a node of a job on this machine keeps its logs."""
    return job.folder / "cluster" / "nodes" / node


def _executor(job: Job, node: str) -> int:
    process = executor_process(node_folder(job, node))
    if process is None:
        raise UsageError(
            f"{node} has no executor below {node_folder(job, node)} on this machine: a drill needs a job whose nodes are here, and one "
            "under Slurm that was started with cluster.slurm.node_folder=RUN/cluster/nodes"
        )
    return process.pid


def _after(seconds: float) -> Callable[[object], bool]:
    limit = time.monotonic() + seconds
    return lambda _: time.monotonic() > limit


def _held(inside: AbstractContextManager[object]) -> Callable[[], None]:
    """Enter a context; what leaves it."""
    stack = ExitStack()
    stack.enter_context(inside)
    return stack.close


def _signalled(number: signal.Signals) -> Callable[[Job, dict[str, Any], str], Injury]:
    def inject(job: Job, status: dict[str, Any], node: str) -> Injury:
        pid = _pid(job, status, node)
        os.kill(pid, number)
        return Injury(frozenset({node}), _continued(pid) if number == signal.SIGSTOP else nothing)

    return inject


def _continued(pid: int) -> Callable[[], None]:
    def undo() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    return undo


def _process_frozen(job: Job, status: dict[str, Any], node: str) -> Injury:
    return Injury(frozenset({node}), _held(frozen(_pid(job, status, node))))


def _process_slowed(job: Job, status: dict[str, Any], node: str) -> Injury:
    return Injury(frozenset({node}), _held(slowed(_pid(job, status, node), SLOW_SHARE)), _after(SLOW_S))


def _executor_killed(job: Job, status: dict[str, Any], node: str) -> Injury:
    os.kill(_executor(job, node), signal.SIGKILL)
    return Injury(frozenset({node}))


def _executor_halted(job: Job, status: dict[str, Any], node: str) -> Injury:
    """Its beats stop while its training goes on, and its connection stays open."""
    pid = _executor(job, node)
    os.kill(pid, signal.SIGSTOP)
    return Injury(frozenset({node}), _continued(pid))


def _beats_delayed(job: Job, status: dict[str, Any], node: str) -> Injury:
    pid = _executor(job, node)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(DELAYED_S)
    os.kill(pid, signal.SIGCONT)
    return Injury(frozenset({node}))


def _beats_dropped(job: Job, status: dict[str, Any], node: str) -> Injury:
    """Nothing passes between a node and the driver, for less time than makes it lost."""
    assert job.proxy is not None, "asked for by `lacks`"
    return Injury(frozenset({node}), _held(job.proxy.cut_off(_executor(job, node))), _after(DROPPED_S))


def _node_partitioned(job: Job, status: dict[str, Any], node: str) -> Injury:
    assert job.proxy is not None, "asked for by `lacks`"
    return Injury(frozenset({node}), _held(job.proxy.cut_off(_executor(job, node))))


def _driver_killed(job: Job, status: dict[str, Any], node: str) -> Injury:
    job.kill_driver()
    return Injury(frozenset())


def _off(job: Job, *nodes: str) -> Callable[[], None]:
    power = _power(job)
    for node in nodes:
        power.off(node)

    def on() -> None:
        for node in nodes:
            power.on(node)

    return on


def _node_down(job: Job, status: dict[str, Any], node: str) -> Injury:
    return Injury(frozenset({node}), _off(job, node))


def _node_flapping(job: Job, status: dict[str, Any], node: str) -> Injury:
    power = _power(job)

    def flap() -> None:
        for is_off, seconds in zip((True, False, True), FLAPS_S, strict=True):
            (power.off if is_off else power.on)(node)
            time.sleep(seconds)
        power.on(node)

    thread = threading.Thread(target=flap, name="flapping", daemon=True)
    thread.start()
    return Injury(frozenset({node}), thread.join, lambda _: not thread.is_alive())


def _power(job: Job) -> Power:
    assert job.power is not None, "asked for by `lacks`"
    return job.power


def _spares(status: Mapping[str, Any]) -> list[str]:
    return [name for name, node in status["nodes"].items() if node["status"] == NodeStatus.READY]


def _spares_exhausted(job: Job, status: dict[str, Any], node: str) -> Injury:
    """A node and every spare go down: the job waits until there are enough again."""
    gone = (*_spares(status), node)
    return Injury(frozenset(gone), _off(job, *gone), _after(WITHOUT_SPARES_S))


def _shrunk(job: Job, status: dict[str, Any], node: str) -> Injury:
    """As `_spares_exhausted`, for longer than the job waits: it goes on with fewer nodes, and grows back when they return."""
    gone, full = (*_spares(status), node), len(status["seats"])
    steps: list[int] = []

    def has_trained(now: dict[str, Any] | None) -> bool:
        if now is not None and now["phase"] == "running" and len(now["seats"]) < full:
            steps.append(now["step"])
        return bool(steps) and steps[-1] >= steps[0] + SHRUNK_STEPS

    return Injury(frozenset(gone), _off(job, *gone), has_trained)


def _disk_full(job: Job, status: dict[str, Any], node: str) -> Injury:
    """No byte can be written in the run folder: no checkpoint, no metrics, no log, no journal."""
    return Injury(frozenset(), _held(filled(job.folder)), _after(FULL_S))


def _checkpoint_corrupt(job: Job, status: dict[str, Any], node: str) -> Injury:
    """Everything in memory is lost, and the newest checkpoint on the disk is rotten."""
    place = job.folder / "checkpoints"
    limit = time.monotonic() + TWO_CHECKPOINTS_S
    while len(complete := published_steps(place)) < 2:
        if time.monotonic() > limit:
            raise UsageError(f"{place} has {len(complete)} checkpoint(s); the newest can be hurt only if there is another")
        time.sleep(0.5)
    files = [path for path in (place / str(complete[-1])).rglob("*") if path.is_file() and "/d/" in str(path)]
    flip_byte(max(files, key=lambda path: path.stat().st_size))
    for keeper in _keepers(job):
        with suppress(psutil.NoSuchProcess):
            keeper.kill()
    os.kill(_pid(job, status, node), signal.SIGKILL)
    return Injury(frozenset({node}))


def _compile_slow(job: Job, status: dict[str, Any], node: str) -> Injury:
    """A process is killed, and those that come after it compile for ten times as long: one interruption, and no alarm after it."""
    pid = _pid(job, status, node)
    compiling = SlowCompile(job.folder / "cluster" / "nodes", status["attempt"])
    measured = {"compile_before_s": compiling.before_s, "compile_limit_s": status["compile_limit_s"]}

    def amiss() -> str:
        if (lasted_s := compiling.lasted_s()) is None:
            return "the slow compilation was not completed"
        measured["compile_s"] = lasted_s
        return "" if lasted_s >= TIMES * compiling.before_s else f"compiling took only {lasted_s / compiling.before_s:.1f} times as long"

    os.kill(pid, signal.SIGKILL)
    return Injury(frozenset({node}), compiling.release, compiling.is_enough, measured, amiss)


def _node_slow(job: Job, status: dict[str, Any], node: str) -> Injury:
    """Its process takes 11 % longer for each step, and nothing else shows it."""
    slow = SlowNode(job, status, node, _pid(job, status, node))
    return Injury(frozenset({node}), slow.release, slow.is_enough, slow.measured, slow.amiss)


def _silent_corruption(job: Job, status: dict[str, Any], node: str) -> Injury:
    """One bit of one device's copy of a parameter is another; nothing else shows it. A node that was evicted for it is repaired."""
    process = status["nodes"][node]["processes"][0]
    (attempt_folder(node_folder(job, node), status["attempt"]) / f"rank-{process['rank']}{FLIP}").touch()

    def repair() -> None:
        with suppress(MegascaleError, OSError):
            ask_driver(job.folder, None, "uncordon", node=node)

    return Injury(frozenset({node}), repair)


def flip_byte(path: Path) -> None:
    """Change the byte in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def _keepers(job: Job) -> Iterator[psutil.Process]:
    place = str(job.folder / "cluster" / "nodes")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any("keeper_process" in word for word in process.cmdline()) and any(place in word for word in process.cmdline()):
                yield process


def _lacks_flips(job: Job) -> str:
    return "" if job.flips_bits else "its processes were not started for a drill (MEGASCALE_DRILL=1)"


def _lacks_freezer(job: Job) -> str:
    return "" if freezer_root() is not None else "this user may not make groups of cgroup v2"


def _lacks_compilation(job: Job) -> str:
    reason = "" if job.compiles_anew else f"its processes may take programs compiled before; those of a scenario do not ({CACHE}=false)"
    return reason or _lacks_freezer(job)


def _lacks_isolation(job: Job) -> str:
    return _lacks_freezer(job) if job.isolates else "it does nothing about slow nodes (cluster.slow_nodes.action=act)"


def _lacks_proxy(job: Job) -> str:
    return "" if job.proxy is not None else "its nodes reach their driver without a proxy of this drill"


def _lacks_power(job: Job) -> str:
    return "" if job.power is not None else "its nodes are no processes of this machine that a drill could switch off"


def _lacks_shrink_or_power(job: Job) -> str:
    return _lacks_shrinking(job) or _lacks_power(job)


def _lacks_disk(job: Job) -> str:
    return "" if job.has_small_disk else "its run folder is no small disk of its own"


def _lacks_shrinking(job: Job) -> str:
    return "" if job.shrinks else "it may not shrink (--shrink)"


KINDS: Mapping[str, Fault] = {
    "process_killed": Fault(_signalled(signal.SIGKILL)),
    "process_halted": Fault(_signalled(signal.SIGSTOP)),
    "process_frozen": Fault(_process_frozen, lacks=_lacks_freezer),
    "process_slowed": Fault(_process_slowed, interrupts=False, lacks=_lacks_freezer, looks_for="step_drift", after_steps=30),
    "executor_killed": Fault(_executor_killed),
    "executor_halted": Fault(_executor_halted),
    "beats_delayed": Fault(_beats_delayed, interrupts=False),
    "beats_dropped": Fault(_beats_dropped, interrupts=False, lacks=_lacks_proxy),
    "node_partitioned": Fault(_node_partitioned, lacks=_lacks_proxy),
    "driver_killed": Fault(_driver_killed, hits_node=False, interrupts=False),
    "node_down": Fault(_node_down, lacks=_lacks_power),
    "node_flapping": Fault(_node_flapping, lacks=_lacks_power),
    "spares_exhausted": Fault(_spares_exhausted, lacks=_lacks_power),
    "shrunk": Fault(_shrunk, lacks=_lacks_shrink_or_power),
    "disk_full": Fault(_disk_full, hits_node=False, interrupts=None, lacks=_lacks_disk),
    "checkpoint_corrupt": Fault(_checkpoint_corrupt),
    "compile_slow": Fault(_compile_slow, lacks=_lacks_compilation, interruptions=1, limit_s=1200.0),
    "node_slow": Fault(_node_slow, lacks=_lacks_isolation, interruptions=1, limit_s=1800.0, after_steps=30),
    "silent_corruption": Fault(_silent_corruption, lacks=_lacks_flips),
}


def draw(faults: int, seed: int, kinds: Mapping[str, Fault] = KINDS) -> list[tuple[str, int]]:
    """A random scenario over all kinds: kind, and a number that chooses the node. Every kind comes before one comes again."""
    random, drawn = Random(seed), []
    while len(drawn) < faults:
        names = list(kinds)
        random.shuffle(names)
        drawn += [(kind, random.randrange(1 << 16)) for kind in names]
    return drawn[:faults]

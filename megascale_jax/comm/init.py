"""Starts this process's part of a run: platform, virtual devices, ``jax.distributed``, compilation cache.

`start` must come before anything else touches a device. Every wait has a limit: a process that never comes ends the others' start after
`START_TIMEOUT_S`, a collective of a dead CPU process fails after `CPU_COLLECTIVE_TIMEOUT_S`.
"""

import ipaddress
import logging
import os
import socket
from pathlib import Path

import jax

from megascale_jax.comm.cache import cache_folder
from megascale_jax.comm.compile_cache import keep_compiled
from megascale_jax.comm.flags import prepare_process
from megascale_jax.comm.processes import Processes
from megascale_jax.config.schema import SystemConfig
from megascale_jax.errors import UsageError

START_TIMEOUT_S = 120
CPU_THREADS_PER_DEVICE = 8
"""More than the collectives that one device may wait in at a time."""
CPU_COLLECTIVE_TIMEOUT_S = 300
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"

_logger = logging.getLogger(__name__)


def check_platform(platform: str, devices: Path = Path("/dev")) -> None:
    """Raise UsageError when this machine cannot have a device of the platform: before a corpus is prepared for it, without JAX's start."""
    if platform == "gpu" and not any(devices.glob("nvidia[0-9]*")):
        raise UsageError(_no_device(platform, "no NVIDIA"))


def _no_device(platform: str, found: str) -> str:
    return (
        f"system.platform is {platform}, but there are {found} devices here; for GPUs install megascale_jax[gpu] and check the "
        "driver with nvidia-smi, to try the run without any use system=cpu"
    )


def start(system: SystemConfig, num_devices: int, processes: Processes) -> None:
    """Prepare JAX for ``num_devices`` devices over all processes; joins them when there are several.

    On ``gpu`` the settings of `comm/flags.py` are put into the environment. On ``cpu`` each process gets its share of virtual
    devices. Raises UsageError when the devices do not divide over the processes, when a JAX that runs already has too few, when
    a process does not come within `START_TIMEOUT_S`, or when there is no device of that platform.
    """
    platform = system.platform
    prepare_process(system)
    if platform == "cpu":
        if num_devices % processes.count:
            raise UsageError(
                f"a mesh of {num_devices} CPU devices does not divide over {processes.count} processes; "
                f"start a divisor of {num_devices} processes, or change parallel.data"
            )
        _prepare_cpu(num_devices // processes.count)
    # The run handles SIGTERM itself: it finishes the step and saves.
    jax.config.update("jax_enable_preemption_service", False)
    keep_compiled(cache_folder() / "xla", every_rank=platform == "cpu" and processes.count > 1)
    if processes.count > 1:
        try:
            jax.distributed.initialize(
                processes.coordinator,
                processes.count,
                processes.index,
                initialization_timeout=START_TIMEOUT_S,
                coordinator_bind_address=bind_address(processes.coordinator) if processes.index == 0 and processes.coordinator else None,
                # Otherwise JAX sees Slurm and gives each process the one device of its local rank.
                cluster_detection_method="deactivate",
            )
        except RuntimeError as error:
            raise UsageError(
                f"process {processes.index} of {processes.count} could not join {processes.coordinator} within {START_TIMEOUT_S} s: "
                f"{str(error).splitlines()[0]}; check that all processes run and that the address can be reached"
            ) from error
    found = jax.default_backend()
    if found != platform:
        raise UsageError(_no_device(platform, f"only {found}"))


def bind_address(coordinator: str) -> str | None:
    """Where the coordinator listens that is announced as ``HOST:PORT``: there alone, since it lets in whoever comes.

    ``None``, and a warning, where that is no address of this host (behind a translation of addresses), or a name has not exactly one that
    others can reach: JAX then listens on every address. ``None`` too where ``JAX_COORDINATOR_BIND_ADDRESS`` says it.
    """
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    if os.environ.get(_BIND):
        return None
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
        if len(found) > 1 and all(ipaddress.ip_address(address).is_loopback for address in found):
            found = found[:1]  # 127.0.0.1 before ::1
        if len(found) != 1:
            raise OSError(f"it is {len(found)} addresses: {', '.join(found)}")
        address = found[0]
        if ipaddress.ip_address(address).is_loopback and host not in (address, "localhost"):
            raise OSError(f"this host takes it for {address}, which others cannot reach")
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except (OSError, ValueError) as error:
        _logger.warning(
            "the coordinator listens on all addresses of this host, not on %s alone: %s; set %s=ADDRESS:%s",
            host,
            error,
            _BIND,
            port,
        )
        return None
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _prepare_cpu(local_devices: int) -> None:
    """Virtual CPU devices of this process; a JAX that runs already (a notebook) must have enough of them."""
    # a device that waits in a collective holds a thread: with as many threads as devices, two orders of messages end in a deadlock
    os.environ.setdefault("PJRT_NPROC", str(CPU_THREADS_PER_DEVICE * local_devices))
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_collective_timeout_seconds" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_collective_timeout_seconds={CPU_COLLECTIVE_TIMEOUT_S}".strip()
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", local_devices)
    except RuntimeError as error:
        have = len(jax.local_devices())
        if have < local_devices:
            raise UsageError(
                f"JAX runs already, with {have} device(s), and this run needs {local_devices}; start it in a new process, "
                f"or set jax.config.update('jax_num_cpu_devices', {local_devices}) before the first array is made"
            ) from error

"""XLA options and NCCL variables of a run on GPUs, each with its reason. Imports no JAX: they must be set before it starts.

Two kinds of XLA settings. *Step options* go with the step into the compiler, on absent GPUs too (`aot/worker.py`), so that what
is judged is what runs; one that the installed jaxlib does not know is left out with a warning. *Process flags* act at run time
and are read once, from ``XLA_FLAGS``; there an unknown name ends the process, so a child process tries them first. What the
user has set in the environment stays as it is. Sources: XLA's flags as jaxlib 0.11.2 takes them; NCCL's environment variables;
paper section 5 for the time-outs ("network flapping").
"""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from megascale_jax.config.schema import SystemConfig

TRY_LIMIT_S = 120
"""A child that only parses flags takes a second."""


@dataclass(frozen=True)
class Setting:
    """One option, flag or variable."""

    name: str
    value: str | int | bool
    reason: str

    @property
    def as_flag(self) -> str:
        """As in ``XLA_FLAGS``."""
        return f"--{self.name}={str(self.value).lower() if isinstance(self.value, bool) else self.value}"


def step_settings(system: SystemConfig) -> tuple[Setting, ...]:
    """Options of the compiled step on GPUs; none on CPU."""
    if system.platform != "gpu":
        return ()
    return (
        Setting("xla_gpu_enable_latency_hiding_scheduler", True, "moves starts and ends of transfers apart; off by default below sm_90"),
        Setting(
            "xla_gpu_experimental_parallel_collective_overlap_limit",
            2,
            "a phase has two transfers in flight, mostly one on NVLink and one on the network",
        ),
        Setting("xla_gpu_experimental_enable_collective_multi_streaming", True, "or both would queue on one communication stream"),
        *(
            Setting(f"xla_gpu_{kind}_combine_threshold_bytes", 0, "messages that XLA joins leave the phases that hide them")
            for kind in ("all_gather", "reduce_scatter")
        ),
    )


def process_flags(system: SystemConfig) -> tuple[Setting, ...]:
    """Flags of the process on GPUs; none on CPU."""
    if system.platform != "gpu":
        return ()
    limits = system.limits
    return (
        Setting(
            "xla_gpu_execution_terminate_timeout",
            f"{limits.execution_s}s",
            "ends a step that hangs; counts execution only, never the compile, but must outlast a cold first step",
        ),
        Setting(
            "xla_gpu_first_collective_call_terminate_timeout_seconds",
            str(limits.first_collective_s),
            "ends a start at which a rank never comes to the first collective",
        ),
        Setting(
            "xla_gpu_nccl_termination_timeout_seconds",
            str(limits.first_collective_s),
            "bounds the making of a communicator, which waits for ever by default",
        ),
        Setting(
            "xla_gpu_nccl_init_max_rank_per_root_ratio",
            limits.ranks_per_root,
            "one NCCL root for so many ranks: a single root makes start-up grow with the number of GPUs",
        ),
    )


def nccl_variables(system: SystemConfig) -> tuple[Setting, ...]:
    """Environment of NCCL on GPUs; none on CPU."""
    if system.platform != "gpu":
        return ()
    limits = system.limits
    return (
        Setting(
            "NCCL_IB_TIMEOUT",
            limits.ib_timeout_exponent,
            "4.096 us times 2 to this power for one try: a link that flaps is back in seconds and must not end the run",
        ),
        Setting(
            "NCCL_IB_RETRY_CNT", limits.ib_retries, "tries before NCCL reports an error; with the time-out above it bounds a dead link"
        ),
        Setting("NCCL_DEBUG", "WARN", "names the peer and the device of a failing transfer, and says nothing else"),
    )


def known_step_options(
    system: SystemConfig, compiles: Callable[[Mapping[str, str | int | bool]], bool], environment: Mapping[str, str] = os.environ
) -> dict[str, str | int | bool]:
    """Step options that the installed jaxlib takes; ``compiles`` tells whether a program compiles with some.

    Those that the user has set in ``XLA_FLAGS`` are left out: an option of a compile would win over the flag.
    """
    settings = _not_given(step_settings(system), environment.get("XLA_FLAGS", ""))
    if not settings or compiles({setting.name: setting.value for setting in settings}):
        return {setting.name: setting.value for setting in settings}
    known = {setting.name: setting.value for setting in settings if compiles({setting.name: setting.value})}
    _warn_of(setting for setting in settings if setting.name not in known)
    return known


def prepare_process(system: SystemConfig, environment: dict[str, str] | None = None) -> tuple[Setting, ...]:
    """Put flags and variables into the environment, this process's by default, before JAX starts; gives what it set."""
    target = os.environ if environment is None else environment
    given = target.get("XLA_FLAGS", "")
    missing = _not_given(process_flags(system), given)
    refused = refused_flags(missing) if missing else set()
    _warn_of(flag for flag in missing if flag.name in refused)
    flags = [flag for flag in missing if flag.name not in refused]
    if flags:
        target["XLA_FLAGS"] = " ".join([given, *(flag.as_flag for flag in flags)]).strip()
    variables = [variable for variable in nccl_variables(system) if variable.name not in target]
    for variable in variables:
        target[variable.name] = str(variable.value)
    return (*flags, *variables)


def refused_flags(flags: Iterable[Setting]) -> set[str]:
    """Names that the installed jaxlib does not know; all of them when the child neither takes them nor says which."""
    flags = list(flags)
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flag.as_flag for flag in flags)}
    try:
        child = subprocess.run(
            [sys.executable, "-c", "import jax; jax.devices()"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TRY_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {flag.name for flag in flags}
    if child.returncode == 0:
        return set()
    found = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", child.stderr)
    if not found:
        return {flag.name for flag in flags}
    named = set(re.findall(r"--(\w+)", found.group(1)))
    return {flag.name for flag in flags if flag.name in named}


def _not_given(settings: Iterable[Setting], given: str) -> list[Setting]:
    """Settings that a value of ``XLA_FLAGS`` does not name."""
    return [setting for setting in settings if not re.search(rf"--{setting.name}\b", given)]


def _warn_of(settings: Iterable[Setting]) -> None:
    for setting in settings:
        warnings.warn(f"the installed jaxlib does not take {setting.name}, left out; what it is for: {setting.reason}", stacklevel=3)

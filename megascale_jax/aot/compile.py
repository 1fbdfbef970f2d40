"""Runs the compile worker in a subprocess and reads what it leaves: an abort of XLA becomes an error with its reason.

Failure cases: parts of the ``[aot]`` extra missing (`ConfigError`, before anything starts), the compiler aborting or running
into the time limit (`CompileError`, with XLA's last words), rates unknown for the system (`ConfigError`), a plan that the
worker refuses (`ConfigError`, in its words).
"""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megascale_jax.aot.hlo import parse_module
from megascale_jax.aot.report import CompileReport, make_report
from megascale_jax.aot.targets import TARGETS
from megascale_jax.config.layout import MeshShape
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import CompileError, ConfigError

LIMIT_S = 1800
"""The shipped plans take about a minute; what has not ended by then (deep chunks, the rings of a large model) is given up."""
PARTS = {
    "jax_cuda13_plugin": "jax-cuda13-plugin",
    "jax_plugins.xla_cuda13": "jax-cuda13-pjrt",
    "nvidia.cu13.bin": "nvidia-cuda-nvcc",
    "nvidia.cu13.nvvm": "nvidia-nvvm",
    "nvidia.cudnn": "nvidia-cudnn-cu13",
    "jax_triton": "jax-triton",
}
"""Packages of ``[aot]`` by a module or folder that no other package has."""


def check_compile(experiment: Experiment) -> None:
    """Raise ConfigError for what is missing: compiler parts, or numbers of the system."""
    missing = [package for module, package in PARTS.items() if not _is_installed(module)]
    if missing:
        raise ConfigError(f"compiling for absent GPUs needs {', '.join(missing)}: run `make aot`, or pip install 'megascale_jax[aot]'")
    if experiment.system.platform != "gpu" or experiment.system.rates is None or experiment.system.peak_tflops is None:
        raise ConfigError("this system file has no GPU with rates and a peak to compile for; use --target h100, h200, b200 or a100")


def compile_experiment(experiment: Experiment, target: str, folder: Path) -> CompileReport:
    """Compile the step of a checked experiment for absent GPUs; the worker's files stay in ``folder``.

    Raises CompileError when the compiler gives up, ConfigError when the plan is refused before it starts.
    """
    nodes = -(-MeshShape.of(experiment.parallel).size // TARGETS[target].gpus_per_domain)
    request = {"experiment": experiment.model_dump(mode="json"), "target": target, "nodes": nodes}
    (folder / "request.json").write_text(json.dumps(request))
    _run_worker(folder)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    module = parse_module((folder / "module.hlo").read_text())
    streams = json.loads((folder / "streams.json").read_text())
    return make_report(experiment, target, TARGETS[target].memory_bytes, module, streams, result)


def _run_worker(folder: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS", "TRITON_INTERPRET")}
    # names each pass as it begins, so that an abort can be told where it happened
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "hlo_pass_pipeline=1"}
    command = [sys.executable, "-m", "megascale_jax.aot.worker", str(folder)]
    try:
        done = subprocess.run(
            command, env=environment | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"the compiler did not end within {LIMIT_S} s; try shallower chunks (parallel.virtual_stages=null)") from error
    if (refused := folder / "refused.txt").exists():
        raise ConfigError(refused.read_text())
    if done.returncode:
        raise CompileError(f"the compiler {_end_of(done.returncode)}: {_last_words(done.stderr)}")


def _end_of(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    return f"ended with code {code}"


def _last_words(stderr: str) -> str:
    """XLA's fatal line, else the exception's own; and the last pass that it named."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    fatal = next((line for line in lines if re.match(r"^F\d{4} ", line)), None)
    said = [line for line in lines if not re.match(r"^([IWE]\d{4} |Extension modules)", line)]
    raised = next((line for line in reversed(said) if re.match(r"^[\w.]+(Error|Exception)\b", line)), None)
    reason = fatal or raised or (said[-1] if said else "no output")
    passes = re.findall(r"\bHLO pass ([\w-]+)", stderr)
    return reason + (f" (last pass: {passes[-1]})" if passes else "")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False

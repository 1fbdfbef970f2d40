"""Compiles the step of an experiment for GPUs that are not there, in a process of its own: XLA may abort, not raise.

``python -m megascale_jax.aot.worker FOLDER`` reads ``request.json`` (``experiment``, ``target``, ``nodes``) in the folder and
leaves there ``module.hlo`` (the scheduled program), ``streams.json`` (communication stream of each collective) and
``result.json`` (seconds and bytes). Run with ``JAX_PLATFORMS=cpu``. A plan that is refused leaves ``refused.txt``.
"""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from megascale_jax.aot.targets import TARGETS
from megascale_jax.aot.topology import absent_devices
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import ConfigError
from megascale_jax.parallel.plan import BATCH_PARTITION, DEVICE_PARTITION, Plan, make_plan
from megascale_jax.train.state import abstract_state
from megascale_jax.train.step import BATCH_KEYS, make_steps

COMPILER_OPTIONS: dict[str, Any] = {
    "xla_gpu_autotune_level": 0,  # there is nothing to time kernels on
    "xla_backend_optimization_level": 0,  # nothing will run them; the schedule, which is what is wanted, stays the same
}
"""Beside those that the step has by itself (`comm/flags.py`)."""
_STREAM = re.compile(r"^\s*(\d+): kAsyncStart.*stream=communication_stream\[(\d+)\]", re.MULTILINE)
_BUFFER = re.compile(r"^ *[\d.]+\w+\([ \d]+%\); *([\d.]+)([GM]iB);[^;]*;[^;]*;(.*)$", re.MULTILINE)
"""Running sum with its share, size, offset, number of values, arrays."""
_ANNOTATION = re.compile(r'profile_annotation: "([^"]+)"\s+thunk_id: (\d+)')


def main(folder: Path) -> None:
    """Serve one request."""
    request = json.loads((folder / "request.json").read_text())
    experiment = Experiment.model_validate(request["experiment"], strict=False)
    devices = absent_devices(TARGETS[request["target"]], request["nodes"])
    began_s = time.perf_counter()
    lowered = lower_step(experiment, make_plan(experiment, devices))
    lowered_s = time.perf_counter() - began_s
    dump = folder / "dump"
    compiled = lowered.compile(compiler_options=COMPILER_OPTIONS | {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True})
    compiled_s = time.perf_counter() - began_s - lowered_s
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None, "XLA gave no text or no memory analysis"
    (folder / "module.hlo").write_text(text)
    (folder / "streams.json").write_text(json.dumps(_streams(dump)))
    result = {
        "lower_s": lowered_s,
        "compile_s": compiled_s,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        "largest_buffers": _largest_buffers(dump),
    }
    (folder / "result.json").write_text(json.dumps(result))


def lower_step(experiment: Experiment, plan: Plan) -> jax.stages.Lowered:
    """The run's own step on abstract arrays of the plan's mesh."""
    steps = make_steps(experiment, plan)
    rows = experiment.parallel.data * experiment.parallel.micro_batch_size
    shape = (experiment.num_micro_batches, rows, experiment.model.sequence_length)
    batch = {key: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=plan.sharding(BATCH_PARTITION)) for key in BATCH_KEYS}
    votes = jax.ShapeDtypeStruct((plan.mesh.size,), jnp.int32, sharding=plan.sharding(DEVICE_PARTITION))
    return steps.train.lower(abstract_state(plan, steps.optimizer), batch, votes)


def _streams(dump: Path) -> dict[str, int]:
    """Stream of each collective by its scheduling name, from the runtime's own list of thunks."""
    sequence, metadata = _one(dump, "*thunk_sequence_after_thunk_passes.txt"), _one(dump, "*thunk_metadata.txt")
    names = {int(number): name for name, number in _ANNOTATION.findall(metadata)}
    return {names[int(number)]: int(stream) for number, stream in _STREAM.findall(sequence) if int(number) in names}


def _largest_buffers(dump: Path, count: int = 8) -> list[str]:
    """Size and arrays of the largest buffers, from the rows of XLA's memory report."""
    rows = _BUFFER.findall(_one(dump, "*memory-usage-report.txt"))
    return [f"{size} {unit}: {arrays.strip()}" for size, unit, arrays in rows[:count]]


def _one(folder: Path, pattern: str) -> str:
    return next(iter(sorted(folder.glob(pattern)))).read_text()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    try:
        main(place)
    except ConfigError as error:
        (place / "refused.txt").write_text(str(error))
        sys.exit(2)

"""The peer: MaxText pre-training on eight virtual CPU devices, its CPU clock read at each of its log lines.

``pip install maxtext`` installs none of its dependencies; they are in ``decoupled-requirements.txt`` inside its wheel. Give
it a virtual environment of its own with the jax version that we run. The cost of a step is the difference of the process's
CPU clock between two consecutive "completed step" lines; the step times that it prints are dispatch times. Step 0
(compilation) is not counted.
"""

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIANT = "MaxText, fsdp 8, bfloat16, full"
FLAGS = (
    "hardware=cpu skip_jax_distributed_system=true dataset_type=synthetic decoder_block=llama2 base_emb_dim=512 "
    "base_num_query_heads=8 base_num_kv_heads=8 head_dim=64 base_mlp_dim=1408 base_num_decoder_layers=8 vocab_size=32000 "
    "max_target_length=512 per_device_batch_size=2 enable_checkpointing=false attention=dot_product ici_fsdp_parallelism=8"
)
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "DECOUPLE_GCLOUD": "TRUE",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
}
_COMPLETED = re.compile(r"completed step: (\d+),.* loss: ([\d.]+)")


def peer_steps(python: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Run the peer for ``steps`` counted steps; one ``{"variant", "loss", "wall_s", "cpu_s"}`` each, step 0 without times."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["run_name=peer", f"base_output_directory={folder}", f"steps={steps + 1}", *FLAGS.split()]
        command = [str(python.absolute()), "-m", "maxtext.trainers.pre_train.train", *arguments]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | ENVIRONMENT
        with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            yield from _read(process)
        if process.returncode:
            raise SystemExit(f"the peer ended with code {process.returncode}; run it by hand: {' '.join(command)}")


def _read(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout
    before: tuple[float, float] | None = None
    for line in process.stdout:
        if found := _COMPLETED.search(line):
            now = time.perf_counter(), _cpu_seconds(process.pid)
            step: dict[str, Any] = {"variant": VARIANT, "loss": float(found[2])}
            if before is not None:
                step |= {"wall_s": now[0] - before[0], "cpu_s": now[1] - before[1]}
            yield step
            before = now


def _cpu_seconds(process_id: int) -> float:
    """User and system time of all threads of a process that runs, seconds (resolution: one tick, 10 ms)."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

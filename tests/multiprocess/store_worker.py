"""One process of a run that only saves and restores; what it did goes to a file. Started by `test_store.py`.

python -m tests.multiprocess.store_worker SETTINGS.json
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax

from megascale_jax.checkpoint.two_stage import CheckpointStore
from megascale_jax.comm.init import Processes, start
from megascale_jax.config.schema import CheckpointConfig, SystemConfig
from tests.checkpoint.states import check_state, plan, random_state


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    processes, mesh = Processes.from_environment(), settings["mesh"]
    size = mesh.get("pipe", 1) * mesh.get("data", 1) * mesh.get("tensor", 1)
    start(SystemConfig(platform="cpu", device="CPU"), size, processes)
    said: list[str] = []
    here = plan(**mesh)
    store = CheckpointStore(settings["folder"], settings["run"], here, CheckpointConfig(**settings["checkpoint"]), said.append)
    restored = store.restore()
    if restored is not None:
        check_state(here, restored.arrays)
    for step in settings.get("save", []):
        store.save(step, random_state(here), {"note": step})
    if settings.get("die") == processes.index:
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait()
    result = {
        "step": None if restored is None else restored.step,
        "tier": None if restored is None else restored.tier,
        "bytes_read": 0 if restored is None else restored.bytes_read,
        "errors": store.errors,
        "said": said,
        "keeper": store.keeper_pid,
        "devices": jax.local_device_count(),
    }
    store.close(is_over=settings.get("over", False))
    Path(f"{settings['result']}.{processes.index}").write_text(json.dumps(result))
    sys.stdout.flush()
    if "die" in settings:
        os._exit(0)  # not through the barrier at the end of `jax.distributed`, which waits for the dead


if __name__ == "__main__":
    main()

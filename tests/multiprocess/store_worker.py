"""One process of a run that only saves and restores; what it did goes to a file. Started by `test_store.py`.

python -m tests.multiprocess.store_worker SETTINGS.json
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import jax

from megascale_jax.checkpoint import host_memory, two_stage
from megascale_jax.checkpoint.keeper_client import KeeperClient
from megascale_jax.checkpoint.two_stage import CheckpointStore
from megascale_jax.comm.init import Processes, start
from megascale_jax.config.schema import CheckpointConfig, SystemConfig
from megascale_jax.errors import CheckpointError
from tests.checkpoint.states import check_state, plan, random_state


def fail_to_open(open_store, what):
    """The error of a store that is opened while something does not work on this rank."""

    def refuse(*_, **__):
        raise OSError(f"no {what} for us")

    ask = KeeperClient.ask_for_slots

    def refuse_question(self, op, **message):
        return refuse() if op == what else ask(self, op, **message)

    place, name, instead = {
        "storage": (two_stage, "Storage", refuse),
        "keeper": (host_memory, "KeeperClient", refuse),
        "held": (KeeperClient, "ask_for_slots", refuse_question),
        "peers": (KeeperClient, "ask_for_slots", refuse_question),
        "naming of the peer": (host_memory.HostMemory, "_name_peer", refuse),
        None: (host_memory, "SLOTS", host_memory.SLOTS),
    }[what]
    try:
        with mock.patch.object(place, name, instead):
            open_store().close()
    except CheckpointError as error:
        return str(error)
    return None


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    processes, mesh = Processes.from_environment(), settings["mesh"]
    size = mesh.get("pipe", 1) * mesh.get("data", 1) * mesh.get("tensor", 1)
    start(SystemConfig(platform="cpu", device="CPU"), size, processes)
    said: list[str] = []
    here = plan(**mesh)
    open_store = partial(
        CheckpointStore, settings["folder"], settings["run"], here, CheckpointConfig(**settings["checkpoint"]), said.append
    )
    refused = [fail_to_open(open_store, what if processes.index == settings["fails_on"] else None) for what in settings.get("fail", [])]
    store = open_store()
    restored = store.restore()
    if restored is not None:
        check_state(here, restored.arrays)
    for step in settings.get("save", []):
        store.save(step, random_state(here), {"note": step})
    if settings.get("die") == processes.index:
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait()
    if settings.get("rot") == processes.index:
        for slot in store._memory._slots.values():
            slot.data ^= 1
    result = {
        "step": None if restored is None else restored.step,
        "tier": None if restored is None else restored.tier,
        "bytes_read": 0 if restored is None else restored.bytes_read,
        "errors": store.errors,
        "said": said,
        "refused": refused,
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

"""One process of the checkpoint benchmark: reads what to do from a JSON file, writes what it measured to another.

    python benchmarks/checkpoint_worker.py SETTINGS.json

``mode``: ``steps`` (block time and the stretch of the next steps), ``save`` (one checkpoint of a random state), ``restore``.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megascale_jax.checkpoint.two_stage import CheckpointStore
from megascale_jax.comm.agree import all_gather_json
from megascale_jax.comm.init import Processes, start
from megascale_jax.config.layout import MeshShape
from megascale_jax.config.load import load_experiment
from megascale_jax.config.schema import CheckpointConfig
from megascale_jax.parallel.plan import Plan, make_plan
from megascale_jax.train.saved import named_arrays
from megascale_jax.train.state import initial_state
from megascale_jax.train.step import make_steps, place_batch

Settings = dict[str, Any]
BETWEEN = 2
"""Steps that are not counted: the first compiles, and what a copy left in the caches is gone after them."""


def main() -> None:
    settings: Settings = json.loads(Path(sys.argv[1]).read_text())
    processes = Processes.from_environment()
    experiment = load_experiment(settings["experiment"], settings["overrides"])
    start(experiment.system, MeshShape.of(experiment.parallel).size, processes)
    plan = make_plan(experiment, jax.devices())
    checkpoint = CheckpointConfig(**settings.get("checkpoint", {}))
    store = CheckpointStore(settings["storage"], settings["run"], plan, checkpoint)
    measured = {"steps": measure_steps, "save": save_once, "restore": restore}[settings["mode"]](settings, plan, store)
    store.close(is_over=settings.get("over", True))
    Path(f"{settings['result']}.{processes.index}").write_text(json.dumps(measured))
    all_gather_json(None)


def measure_steps(settings: Settings, plan: Plan, store: CheckpointStore) -> Settings:
    """Rounds of: a plain copy after steps; ten steps; a save; ten steps. Every time, seconds.

    The copy and the save both come right after steps, so the state is equally cold in the caches for both.
    """
    experiment = plan.experiment
    steps = make_steps(experiment, plan)
    state = initial_state(plan, steps.optimizer, 0)
    votes = np.zeros(plan.mesh.size, np.int32)
    shape = (
        experiment.num_micro_batches,
        experiment.parallel.data * experiment.parallel.micro_batch_size,
        experiment.model.sequence_length,
    )
    tokens = np.random.default_rng(0).integers(0, experiment.model.vocab_size, shape, dtype=np.int32)
    positions = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    batch = place_batch(plan, {"tokens": tokens, "targets": tokens, "segment_ids": np.ones(shape, np.int32), "positions": positions})

    def run(count: int) -> list[float]:
        nonlocal state
        times = []
        for _ in range(count):
            began = time.monotonic()
            state, metrics = steps.train(state, batch, votes)
            jax.block_until_ready((state, metrics))
            times.append(time.monotonic() - began)
        return times

    store.prepare()
    run(BETWEEN)
    into = [np.empty(shard.data.shape, shard.data.dtype) for array in named_arrays(state).values() for shard in array.addressable_shards]
    plain_copy(named_arrays(state), into)
    rounds, copies = [], []
    for number in range(1, settings["rounds"] + 1):
        run(BETWEEN)
        copies.append(plain_copy(named_arrays(state), into))
        run(BETWEEN)
        quiet = run(10)
        store.save(number, named_arrays(state), {})
        saved_at = time.monotonic()
        disturbed = run(10)
        store.wait()
        rounds.append({"quiet_s": quiet, "blocked_s": store.blocked_s, "disturbed_s": disturbed, "window_s": time.monotonic() - saved_at})
    durable = store.durable()
    assert durable is not None and store.errors == 0, "the benchmark's own saves must succeed"
    return {"copies_s": copies, "rounds": rounds, "num_bytes": durable["num_bytes"], "host_bytes": 2 * store.slot_bytes}


def plain_copy(state: Any, into: list[np.ndarray]) -> float:
    """Seconds of a plain copy of all shards into memory that is there already."""
    shards = [np.asarray(shard.data) for array in state.values() for shard in array.addressable_shards]
    began = time.monotonic()
    for target, shard in zip(into, shards, strict=True):
        np.copyto(target, shard)
    return time.monotonic() - began


def save_once(settings: Settings, plan: Plan, store: CheckpointStore) -> Settings:
    state = initial_state(plan, make_steps(plan.experiment, plan).optimizer, 0)
    began = time.monotonic()
    store.save(1, named_arrays(state), {})
    store.wait()
    assert store.errors == 0, "the benchmark's own saves must succeed"
    return {"seconds": time.monotonic() - began}


def restore(settings: Settings, plan: Plan, store: CheckpointStore) -> Settings:
    began = time.monotonic()
    restored = store.restore(settings.get("step"))
    assert restored is not None, "there is a checkpoint"
    jax.block_until_ready(restored.arrays)
    return {"seconds": time.monotonic() - began, "tier": restored.tier, "bytes_read": restored.bytes_read}


if __name__ == "__main__":
    main()

"""States whose every element is known in logical order, made on the host for any plan."""

import jax
import numpy as np

from megascale_jax.checkpoint.grid import KINDS
from megascale_jax.checkpoint.restore import grid_of
from megascale_jax.checkpoint.retention import Retention
from megascale_jax.checkpoint.slot import Slot, SlotIndex
from megascale_jax.checkpoint.stage_one import SlotLayout
from megascale_jax.checkpoint.stage_two import Publication, Target, tidy, write_part
from megascale_jax.config.schema import DataConfig
from tests.build import experiment, plan_of, random_parameters

COUNTERS = {"step": np.int32(7), "updates": np.int32(5), "rng": np.array([3, 4_000_000_000], np.uint32)}


def plan(pipe=1, data=1, tensor=1, virtual_stages=None, layers=None, **model):
    """A small model on so many virtual devices."""
    parallel = {"pipe": pipe, "data": data, "tensor": tensor, "virtual_stages": virtual_stages, "layers": layers, "micro_batch_size": 1}
    settings = {"num_layers": 4, "window": "full"} | model
    return plan_of(experiment(parallel=parallel, train={"global_batch_size": 12 * data, "data": DataConfig(source="stdlib")}, **settings))


def random_state(plan):
    """Named arrays on the plan's mesh; the same logical values on every mesh."""
    _, placed = random_parameters(plan)
    state = {name: jax.device_put(value, plan.sharding(jax.sharding.PartitionSpec())) for name, value in COUNTERS.items()}
    for number, kind in enumerate(KINDS, 1):
        for name, value in placed.items():
            pieces = [jax.device_put(np.asarray(shard.data) * number, shard.device) for shard in value.addressable_shards]
            state[f"{kind}.{name}"] = jax.make_array_from_single_device_arrays(value.shape, value.sharding, pieces)
    return state


def check_state(plan, arrays):
    """The arrays are `random_state`, bit for bit, pads included."""
    expected = random_state(plan)
    assert arrays.keys() == expected.keys()
    for name, value in expected.items():
        assert arrays[name].sharding == value.sharding
        for got, wanted in zip(arrays[name].addressable_shards, value.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(got.data), np.asarray(wanted.data), err_msg=name)


def filled_slot(plan, step=7, launch="launch", description=None):
    """A state in a slot, with what the slot says of itself."""
    grid = grid_of(plan)
    layout = SlotLayout(plan, grid)
    slot = Slot(layout.num_bytes)
    layout.copy(random_state(plan), slot)
    return slot, SlotIndex(step, launch, 0, grid.stored, layout.blocks, "mark", description or {"note": f"step {step}"})


def published(folder, plan, step=7, launch="launch", compression="none", keep=2, key_file=None):
    """A checkpoint of `random_state` in a folder, as a keeper of one rank makes it."""
    description = {"experiment": plan.experiment.model_dump_json(), "data": {"samples": 24 * step}, "commit": "0123456789abcdef"}
    slot, index = filled_slot(plan, step, launch, description)
    target = Target(str(folder), 1, compression, Retention(keep), publish_limit_s=10, key_file=key_file)
    storage = target.storage()
    write_part(storage, target, slot, index)
    manifest = Publication(target, index).attempt()
    assert manifest is not None
    tidy(storage, target, manifest)
    return manifest

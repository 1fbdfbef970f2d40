"""Any mesh to any mesh, bit for bit, parameters, moments and counters (Megatron-LM #659: saved on 16 ranks, loads on 32, not on 24)."""

import numpy as np
import pytest

from megascale_jax.checkpoint.restore import Shards, grid_of, load_arrays, read_plain
from megascale_jax.checkpoint.slot import SlotReader, checksums
from megascale_jax.comm.storage import Storage
from megascale_jax.errors import CheckpointError
from tests.checkpoint.states import check_state, filled_slot, plan, published

MESHES = {
    "data-2": {"data": 2},
    "data-3": {"data": 3},
    "data-4": {"data": 4},
    "data-7": {"data": 7},
    "tensor-2": {"tensor": 2},
    "tensor-4": {"tensor": 4},
    "pipe-2-v-1": {"pipe": 2, "virtual_stages": 1},
    "pipe-2-v-2": {"pipe": 2, "virtual_stages": 2},
    "pipe-4": {"pipe": 4},
    "uneven": {"pipe": 2, "virtual_stages": 1, "layers": (1, 3)},
    "all": {"pipe": 2, "data": 2, "tensor": 2},
}
WAYS = [
    ("data-2", "data-3"),
    ("data-3", "data-4"),
    ("data-4", "data-2"),
    ("data-7", "data-4"),
    ("tensor-2", "tensor-4"),
    ("tensor-4", "data-7"),
    ("pipe-2-v-1", "pipe-4"),
    ("pipe-4", "pipe-2-v-2"),
    ("pipe-2-v-2", "uneven"),
    ("uneven", "all"),
    ("all", "data-3"),
]


@pytest.mark.parametrize(("saved", "wanted"), WAYS, ids=["->".join(way) for way in WAYS])
def test_state_is_the_same_bits_on_another_mesh(saved, wanted, tmp_path):
    published(tmp_path, plan(**MESHES[saved]))
    target = plan(**MESHES[wanted])
    check_state(target, load_arrays(Storage(tmp_path), 7, target))


def test_state_is_the_same_bits_with_every_kind_of_parameter(tmp_path):
    everything = {
        "attention_bias": True,
        "mlp_bias": True,
        "position": "learned",
        "activation": "swiglu",
        "num_kv_heads": 4,
        "block": "serial",
    }
    published(tmp_path, plan(pipe=2, data=2, tensor=2, **everything), compression="zstd")
    target = plan(data=3, tensor=2, **everything)
    check_state(target, load_arrays(Storage(tmp_path), 7, target))


@pytest.mark.parametrize("mesh", MESHES)
def test_slot_gives_back_what_it_was_filled_with(mesh):
    here = plan(**MESHES[mesh])
    slot, index = filled_slot(here)
    shards = Shards(here, grid_of(here), index.arrays, index.arrays)
    read_plain(shards, SlotReader(slot, index, checksums(slot, index), "this host's"))
    check_state(here, shards.arrays())


def test_damaged_slot_is_noticed():
    here = plan(data=2)
    slot, index = filled_slot(here)
    sums = checksums(slot, index)
    block = index.blocks[len(index.blocks) // 2]
    slot.data[block.offset + block.num_bytes // 2] ^= 1
    with pytest.raises(CheckpointError, match="wrong checksum"):
        read_plain(Shards(here, grid_of(here), index.arrays, index.arrays), SlotReader(slot, index, sums, "this host's"))


def test_another_model_is_refused_by_name(tmp_path):
    published(tmp_path, plan(data=2))
    with pytest.raises(CheckpointError, match=r"of another model: params\.up: checkpoint \[4, 34, 40\], expected \[4, 34, 48\]"):
        load_arrays(Storage(tmp_path), 7, plan(mlp_size=48))
    with pytest.raises(CheckpointError, match=r"params\.gate: the checkpoint lacks it, expected \[4, 34, 40\]"):
        load_arrays(Storage(tmp_path), 7, plan(activation="swiglu"))


def test_a_part_of_the_state_can_be_read(tmp_path):
    published(tmp_path, plan(data=2))
    arrays = load_arrays(Storage(tmp_path), 7, plan(tensor=2), ["params.q", "step"])
    assert sorted(arrays) == ["params.q", "step"] and int(arrays["step"]) == 7
    assert np.asarray(arrays["params.q"]).std() > 0

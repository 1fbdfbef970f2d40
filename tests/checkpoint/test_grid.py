"""The cut of a state into blocks, for any mesh: every element once, nothing twice, all of it from any other cut."""

from collections import Counter
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.checkpoint.grid import COUNTERS, STACK, StateGrid
from megascale_jax.checkpoint.stored import needed_chunks, overlap
from megascale_jax.config.layout import Layout
from megascale_jax.config.schema import ModelConfig, ParallelConfig
from megascale_jax.model.parameters import parameter_specs
from tests.build import MODEL


@st.composite
def grids(draw, num_layers=None, width=None, vocab=None):
    """A grid of a small model with odd sizes on a mesh, even or uneven."""
    pipe, chunks, tensor = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4]))
    layers = num_layers or draw(st.integers(pipe * chunks, 9))
    virtual = min(pipe * chunks, layers)
    pipe, chunks = (pipe, chunks) if virtual == pipe * chunks else (1, 1)
    cuts = sorted(draw(st.permutations(range(1, layers)))[: pipe * chunks - 1])
    counts = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    sizes = {"num_layers": layers, "window": "full", "hidden_size": width or draw(st.integers(3, 17)), "num_kv_heads": 4}
    sizes["vocab_size"] = vocab or draw(st.integers(3, 40))
    model = ModelConfig(**(MODEL | sizes | {"attention_bias": True, "mlp_bias": True, "position": "learned"}))
    parallel = ParallelConfig(
        pipe=pipe, data=draw(st.integers(1, 5)), tensor=tensor, virtual_stages=chunks, layers=counts if len(set(counts)) > 1 else None
    )
    return StateGrid(parameter_specs(model), Layout.of(model, parallel), layers)


@settings(deadline=None, max_examples=60)
@given(grids())
def test_every_chunk_is_owned_by_one_rank_and_lies_inside_its_shard(grid):
    owned = Counter()
    for name, array in grid.stored.items():
        for rank in range(grid.layout.mesh.size):
            room = prod(grid.local_shape(name)) * 4
            seen = set()
            for block in grid.blocks(name, rank):
                assert block.index not in seen and 0 <= block.offset <= room - block.num_bytes
                seen.add(block.index)
                owned[name, block.index] += block.is_owned
        assert {index for other, index in owned if other == name} == set(array.indices())
    assert set(owned.values()) == {1}


@settings(deadline=None, max_examples=60)
@given(grids())
def test_regions_of_all_ranks_tile_every_array(grid):
    for name, array in grid.stored.items():
        covered = np.zeros(array.shape, int)
        for rank in range(grid.layout.mesh.size):
            for region in grid.regions(name, rank):
                covered[tuple(map(slice, region.start, region.stop))] += 1
        assert covered.min() == covered.max() >= 1, name


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_cut_is_filled_from_any_other(data):
    source = data.draw(grids())
    specs = source.specs
    width, vocab = specs["q"].shape[0], specs["embedding"].shape[0]
    target = data.draw(grids(num_layers=source.stored["params.q"].shape[0], width=width, vocab=vocab))
    for name in ("params.q", "first_moment.norm_scale", "params.embedding", "second_moment.up_bias", "rng"):
        stored = source.stored[name]
        whole = np.arange(prod(stored.shape)).reshape(stored.shape)
        for rank in range(target.layout.mesh.size):
            for region in target.regions(name, rank):
                got = np.full([b - a for a, b in zip(region.start, region.stop, strict=True)], -1)
                for index in needed_chunks(stored, region):
                    block = whole[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, stored.chunk, strict=True))]
                    of_block, of_region = overlap(stored, index, region)
                    got[of_region] = block[of_block]
                np.testing.assert_array_equal(got, whole[tuple(map(slice, region.start, region.stop))])


def test_what_is_replicated_is_written_by_many_ranks():
    """Biases, which all data-parallel ranks have alike, are dealt out among them; so are norms among tensor-parallel ones."""
    model = ModelConfig(**(MODEL | {"num_layers": 8, "window": "full", "hidden_size": 8, "attention_bias": True, "mlp_bias": True}))
    grid = StateGrid(parameter_specs(model), Layout.of(model, ParallelConfig(data=4, tensor=2)), 8)
    shares = Counter()
    for rank in range(8):
        for name in ("params.up_bias", "first_moment.q_bias", "second_moment.v_bias", "params.k_bias"):
            shares["data", rank // 2] += sum(block.is_owned for block in grid.blocks(name, rank))
        for name in ("params.norm_scale", "first_moment.norm_bias"):
            shares["tensor", rank % 2] += sum(block.is_owned for block in grid.blocks(name, rank))
    data, tensor = ([share for (axis, _), share in shares.items() if axis == wanted] for wanted in ("data", "tensor"))
    assert sum(data) == 4 * 8 * 2 and max(data) < 0.5 * sum(data)
    assert sum(tensor) == 2 * 8 * 4 and max(tensor) < 0.75 * sum(tensor)


def test_layer_parameters_lie_in_whole_chunks_and_counters_everywhere():
    model = ModelConfig(**(MODEL | {"num_layers": 8, "window": "full", "hidden_size": 8}))
    grid = StateGrid(parameter_specs(model), Layout.of(model, ParallelConfig(pipe=2, data=3, tensor=2, virtual_stages=2)), 8)
    assert grid.stored["params.q"].chunk == (2, 3, 4, 4)
    assert grid.stored["params.embedding"].chunk == (16, 3)
    assert [block.index[0] for block in grid.blocks("params.q", rank=0)] == [0, 2]
    assert [block.index[0] for block in grid.blocks("params.q", rank=11)] == [1, 3]
    assert all(len(list(grid.blocks(name, rank))) == 1 for name in COUNTERS for rank in range(12))
    assert grid.local_shape("params.q")[:STACK] == (1, 2, 2)

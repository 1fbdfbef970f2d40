"""Dealing out what a group shares, and the streams in which it travels: any sizes, any width of a round."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.checkpoint.broadcast import Receiver, Sender, deal
from megascale_jax.checkpoint.stored import StoredArray, needed_chunks
from megascale_jax.errors import DamagedCheckpointError
from tests.checkpoint.test_grid import grids


class Source:
    """Blocks of known content; the one at ``broken`` cannot be read."""

    def __init__(self, arrays, broken=None):
        self.arrays, self.broken = arrays, broken

    def read(self, name, index):
        if (name, index) == self.broken:
            raise DamagedCheckpointError("rotten")
        array = self.arrays[name]
        clipped = [min(step, size - place * step) for place, step, size in zip(index, array.chunk, array.shape, strict=True)]
        return np.full(clipped, hash((name, index)) % 1000 + 1, array.dtype)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=8), st.integers(1, 23))
def test_receiver_gets_the_blocks_of_the_sender_in_rounds_of_any_width(sizes, width):
    arrays = {f"a{number}": StoredArray(f"a{number}", (size,), (chunk,), "float32") for number, (size, chunk) in enumerate(sizes)}
    stream = [(name, index) for name, array in arrays.items() for index in array.indices()]
    source = Source(arrays)
    sender, receiver, got = Sender(source, stream, arrays), Receiver(stream, arrays), []
    for _ in range(-(-sum(arrays[name].chunk_bytes // 4 for name, _ in stream) // width) + 2):  # two rounds of nothing but zeros
        words = sender.take(width)
        assert words.shape == (width,)
        got += [(name, index, block.copy()) for name, index, block in receiver.take(words)]
    assert [(name, index) for name, index, _ in got] == stream
    for name, index, block in got:
        expected = source.read(name, index)
        np.testing.assert_array_equal(block[: len(expected)], expected)
        assert not block[len(expected) :].any()
    assert sender.problem is None


def test_sender_that_cannot_read_goes_on_with_zeros_and_says_so():
    arrays = {"a": StoredArray("a", (6,), (2,), "float32")}
    stream = [("a", (0,)), ("a", (1,)), ("a", (2,))]
    sender = Sender(Source(arrays, broken=("a", (1,))), stream, arrays)
    words = np.concatenate([sender.take(4), sender.take(4)])
    assert words[:2].all() and not words[2:].any()
    assert isinstance(sender.problem, DamagedCheckpointError)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_every_shared_block_is_dealt_to_one_rank_that_needs_it(data):
    source = data.draw(grids())
    width, vocab = source.specs["q"].shape[0], source.specs["embedding"].shape[0]
    target = data.draw(grids(num_layers=source.stored["params.q"].shape[0], width=width, vocab=vocab))
    mesh = target.layout.mesh
    processes = data.draw(st.lists(st.integers(0, 3), min_size=mesh.data, max_size=mesh.data))
    names = ["params.q", "params.embedding", "first_moment.up_bias", "rng"]
    dealt = deal(target, source.stored, names, (0, 0), processes)
    needed = {}
    for place in range(mesh.data):
        for name in names:
            for region in target.regions(name, place * mesh.tensor):
                for index in needed_chunks(source.stored[name], region):
                    needed.setdefault((name, index), set()).add(processes[place])
    shared = {key for key, who in needed.items() if len(who) > 1}
    read = [key for stream in dealt.streams.values() for key in stream]
    assert sorted(read) == sorted(shared)
    for reader, stream in dealt.streams.items():
        assert all(processes[reader] in needed[key] for key in stream)
        assert dealt.num_words[reader] == sum(source.stored[name].chunk_bytes // 4 for name, _ in stream)

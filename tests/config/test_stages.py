import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_jax.config.layout import advice_on_depth, virtual_stages_of
from megascale_jax.config.stages import EMPTY, place_layers
from megascale_jax.errors import ConfigError
from tests.build import experiment


@given(st.integers(1, 8), st.integers(1, 4), st.data())
def test_every_layer_lies_in_exactly_one_place(pipe, chunks, data):
    counts = data.draw(st.lists(st.integers(1, 4), min_size=pipe * chunks, max_size=pipe * chunks))
    stages = place_layers(sum(counts), pipe, chunks, counts)
    flat = [layer for stage in stages.table for chunk in stage for layer in chunk if layer != EMPTY]
    assert sorted(flat) == list(range(sum(counts)))
    assert stages.is_even == (len(set(counts)) == 1)
    for virtual, own in enumerate(stages.layers):
        chunk, stage = divmod(virtual, pipe)
        assert tuple(layer for layer in stages.table[stage][chunk] if layer != EMPTY) == own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 2, 2), r"model.num_layers 10 is not divisible by .* = 2 \* 2 = 4; nearest: 8, 12; or list"),
        ((10, 2, 2, (3, 3, 3)), "lists 3 virtual stages, expected .* = 4"),
        ((10, 2, 2, (3, 3, 3, 2)), "doubles 1 layers: its numbers add up to 11"),
        ((10, 2, 2, (3, 3, 1, 2)), "loses 1 layers"),
    ],
)
def test_lost_or_doubled_layers_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        place_layers(*arguments)


def test_windows_must_agree_between_chunks():
    stages = place_layers(8, 2, 2)
    assert stages.windows([4, None] * 4) == (4, None)
    with pytest.raises(ConfigError, match="layer 0 4 and layer 2 full, but both are layer 0 of their chunk"):
        stages.windows([4, 4, None, None] * 2)


@pytest.mark.parametrize(
    ("layers", "window", "pipe", "expected"),
    [
        (24, "full", 1, 24),
        (24, (8, "full"), 1, 12),
        (24, (8, "full"), 4, 3),
        (24, (8, 8, "full"), 4, 2),
        (7, "full", 2, 1),
        (24, tuple(range(1, 25)), 1, 1),
    ],
)
def test_chunks_are_as_shallow_as_layers_and_windows_allow(layers, window, pipe, expected):
    config = experiment(num_layers=layers, window=window, parallel={"pipe": pipe})
    assert virtual_stages_of(config.model, config.parallel) == expected


def test_listed_layers_decide_the_chunks():
    config = experiment(num_layers=7, window="full", parallel={"pipe": 2, "layers": (2, 2, 2, 1)})
    assert virtual_stages_of(config.model, config.parallel) == 2


@pytest.mark.parametrize(
    ("window", "chunks", "advice"),
    [
        ("full", None, None),
        ("full", 6, None),
        ("full", 2, "chunks of 12 layers take long.*parallel.virtual_stages=24 makes chunks of 1"),
        (tuple(range(1, 25)), None, "chunks of 24 layers.*pattern shorter than 24"),
    ],
)
def test_deep_chunks_come_with_advice(window, chunks, advice):
    config = experiment(num_layers=24, window=window, parallel={"virtual_stages": chunks})
    found = advice_on_depth(config.model, config.parallel)
    assert found is None if advice is None else re.match(advice, found)

"""Loss spikes: which steps count, what a rewind would take away, and which checkpoint it would go back to."""

import math

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from megascale_jax.config.cluster import ClusterConfig, RulesConfig
from megascale_jax.config.schema import CheckpointConfig
from megascale_jax.observe.marks import Marks, read_marks
from megascale_jax.observe.spike import Spike, SpikeWatch
from megascale_jax.train.spikes import Spikes
from tests.build import experiment

BATCH = 10


def watch(**options) -> SpikeWatch:
    return SpikeWatch(**({"window": 16, "deviations": 8.0, "steps": 3, "margin": 4, "keep": 2, "every": 10} | options))


def fed(spikes: SpikeWatch, losses, step=0) -> list[Spike | None]:
    return [spikes.seen(step + number, loss, BATCH * (step + number)) for number, loss in enumerate(losses, 1)]


def test_so_many_steps_in_a_row_are_a_spike_and_it_goes_on_until_a_good_one():
    spikes = watch()
    spikes.begin(0, 0)
    assert fed(spikes, [3.0] * 20) == [None] * 20
    spikes.durable(10)
    found = fed(spikes, [9.0, 9.0, 9.0, math.nan, 8.0, 3.0, 9.0, 9.0, 3.0], 20)
    assert found == [None, None, Spike(21, 23, 10, 160, 230), None, Spike(21, 25, 10, 160, 250), *[None] * 4]


def test_nothing_is_judged_before_the_window_is_full():
    assert fed(watch(), [3.0] * 15 + [9.0] * 3) == [None] * 18


def test_a_new_level_is_no_spike_for_ever():
    spikes = watch()
    found = fed(spikes, [3.0] * 16 + [5.0] * 60)
    assert [spike is not None for spike in found[16:]] == [False] * 2 + [True] * 13 + [False] * 45
    assert not spikes.is_young and spikes.limit > 5


def test_saves_are_held_for_a_while_only():
    spikes = watch(window=64)
    fed(spikes, [3.0] * 64)
    held = []
    for step in range(65, 110):
        spikes.seen(step, 9.0, step)
        held.append(spikes.is_young)
    assert held == [True] * 30 + [False] * 15


def test_it_goes_back_to_the_newest_checkpoint_before_that_is_still_there():
    spikes = watch(keep=2, every=5)
    spikes.begin(0, 0)
    fed(spikes, [3.0] * 12)
    for step in (5, 10):
        spikes.durable(step)
    fed(spikes, [3.0] * 8, 12)
    assert fed(spikes, [9.0] * 3, 20)[-1] == Spike(21, 23, 10, 160, 230), "step 15 may be among those that go"
    spikes.saved(20)
    assert fed(spikes, [9.0], 23)[-1].rewind_step is None, "retention keeps 15 and 20 by now"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 0.5), st.floats(0, 0.02))
def test_noise_and_slopes_are_none(seed, noise, slope):
    rng = np.random.default_rng(seed)
    losses = 5 + noise * rng.standard_normal(300) - slope * np.arange(300) / 10
    assert not any(fed(watch(window=64), losses))


def test_what_a_loop_does_with_a_spike_follows_the_rule(tmp_path):
    for rule, shown, held in (("off", False, False), ("observe", True, False), ("act", True, True)):
        rules = RulesConfig(loss_spike=rule, loss_spike_window=8, loss_spike_steps=2, loss_spike_margin=0)
        config = experiment(train={"checkpoint": CheckpointConfig(every=4)}).model_copy(update={"cluster": ClusterConfig(rules=rules)})
        events, said, path = [], [], tmp_path / rule
        spikes = Spikes(config, Marks(path), lambda step, name, events=events: events.append((step, name)), said.append)
        spikes.begin(4, 40, is_durable=True)
        for step in range(5, 13):
            spikes.read(step, 3.0, 10 * step)
        spikes.saved(8)
        spikes.durable(8)
        for step in (13, 14, 15):
            spikes.read(step, 9.0, 10 * step)
        assert read_marks(path).spike == (Spike(13, 15, 8, 120, 150) if shown else None)
        assert (len(events), len(said), spikes.holds_saves) == (shown, shown, held)

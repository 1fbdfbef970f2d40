"""The fabric of the MegaScale paper, and paths over it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_jax.config.load import load_experiment, load_system
from megascale_jax.errors import ConfigError
from megascale_jax.sim.network.topology import LAYERS, NO_LINK, Clos, Flows

CONFIG = load_system("a100").network


def test_the_paper_s_fabric_holds_its_largest_job_and_blocks_nowhere():
    clos = Clos(CONFIG, 1536)
    assert (clos.tor_sets, clos.pods) == (24, 6)
    assert CONFIG.tor_oversubscription == CONFIG.without_split().tor_oversubscription == 1.0
    assert dict(zip(LAYERS, clos.layer_sizes, strict=True))["nic up"] == 12_288
    assert len(clos.capacity()) == clos.num_links == clos.layer_starts[-1]
    ports_of_an_aggregation_switch = CONFIG.tor_sets_per_pod * CONFIG.rails + CONFIG.aggregation_uplinks
    assert ports_of_an_aggregation_switch == 64


def test_without_the_split_as_much_goes_into_a_tor_from_half_as_many_nodes():
    whole = CONFIG.without_split()
    assert (whole.nodes_per_tor, whole.nic_gbit_s, whole.port_split) == (32, 400, 1)


@given(st.data())
def test_paths_go_up_as_far_as_they_must_and_every_link_has_one_layer(data):
    clos = Clos(CONFIG, 600)
    draw = lambda most: np.array([data.draw(st.integers(0, most - 1))])  # noqa: E731
    source, target, rail, other = draw(600), draw(600), draw(8), draw(8)
    flows = Flows(source, rail, target, other, np.array([50_000]))
    (path,) = clos.paths(flows, draw(32), draw(32))
    used = [hop for hop, link in enumerate(path) if link != NO_LINK]
    same_tor, same_pod = source // 64 == target // 64 and rail == other, source // 256 == target // 256
    assert used == ([0, 5] if same_tor else [0, 1, 4, 5] if same_pod else [0, 1, 2, 3, 4, 5])
    for hop in used:
        assert clos.layer_starts[hop] <= path[hop] < clos.layer_starts[hop + 1]


def test_neighbours_share_the_uplink_of_their_tor_and_nothing_else():
    clos, number = Clos(CONFIG, 128), np.arange(2)
    flows = Flows.on_one_rail(number, 64 + number, np.zeros(2, int), number)
    first, second = clos.paths(flows, np.full(2, 5), np.full(2, 7))
    assert [a == b and a != NO_LINK for a, b in zip(first, second, strict=True)] == [False, True, False, False, True, False]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("system.network.rail=8", "unknown key system.network.rail; did you mean system.network.rails"),
        ("system.network.nic_gbit_s=-1", "system.network.nic_gbit_s: got -1, expected a number > 0"),
        ("system.network.nodes_per_tor=63", "system.network: nodes_per_tor is 63, expected a multiple of port_split, 2"),
        ("system.network.hop_us=null", "system.network.hop_us: got null, expected a number > 0"),
    ],
)
def test_wrong_sizes_are_named(override, words):
    with pytest.raises(ConfigError) as error:
        load_experiment("gpt-175b", ["system=a100", override])
    assert words in str(error.value)


def test_a_system_loads_alone_and_takes_its_own_keys_only():
    assert load_system("h100", ["system.network.hop_us=2.0"]).network.hop_us == 2.0
    with pytest.raises(ConfigError, match=r"got train\.steps=3, but h100 is a system"):
        load_system("h100", ["train.steps=3"])
    with pytest.raises(ConfigError, match=r"h100\.yaml: network\.hop_us: got 0, expected a number > 0"):
        load_system("h100", ["system.network.hop_us=0"])
